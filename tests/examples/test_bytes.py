"""No more bytes than the least that is known, counted where the programs run."""

from __future__ import annotations

import pytest

from benchmarks.bytes import CHANGES, TENSOR_BYTES, Change, Known, forward, main, measure, of_change


@pytest.mark.parametrize("known", forward(), ids=lambda k: k.name)
def test_forward_programs_send_the_least_known(known: Known) -> None:
    ours = measure(known.text, layout=known.layout)
    assert ours.counted == ours.predicted <= known.least
    assert ours.proven


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c.source} -> {c.target}")
def test_changes_of_placement_send_the_least_known(change: Change) -> None:
    assert of_change(change).cluster <= change.least * TENSOR_BYTES


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out.splitlines()
    notes = sum(bool(known.note) for known in forward())
    assert len(printed) == 2 + len(forward()) + notes + 3 + len(CHANGES)
