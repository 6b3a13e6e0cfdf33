"""No more bytes than the least that is known, counted where the programs run."""

from __future__ import annotations

import pytest

from benchmarks.bytes import CHANGES, TENSOR_BYTES, Change, Known, forward, main, measure, of_change
from benchmarks.gradients import GRADIENTS


@pytest.mark.parametrize("known", forward(), ids=lambda k: k.name)
def test_forward_programs_send_the_least_known(known: Known) -> None:
    ours = measure(known.text, layout=known.layout)
    assert ours.counted == ours.predicted <= known.least
    assert ours.proven


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c.source} -> {c.target}")
def test_changes_of_placement_send_the_least_known(change: Change) -> None:
    assert of_change(change).cluster <= change.least * TENSOR_BYTES


def test_the_tables_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (GRADIENTS[1], GRADIENTS[-1])  # they are all run by tests/training/test_peers.py
    monkeypatch.setattr("benchmarks.gradients.GRADIENTS", rows)
    main()
    printed = capsys.readouterr().out.splitlines()
    known = (*forward(), *rows)
    notes = sum(bool(k.note) for k in known)
    assert len(printed) == 3 + 3 + len(known) + notes + 2 + len(CHANGES)
