"""Documents in rows of their own: what is read, what counts, and programs that do not say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.backends.train import document_rows
from meshdsl.backends.train.data import open_data, open_everything
from meshdsl.backends.train.job import DataFiles
from meshdsl.diagnostics import DiagnosticError

END, LENGTH = 9, 4
DOCUMENTS = [[1, 2], [], [3], [1, 2, 3, 4], [5, 6, 7, 8, 1], [4] * 12, [2, 2, 2], [7]]
"""Without the token that ends each of them, which the last one lacks."""


def tokens() -> list[int]:
    return [token for document in DOCUMENTS for token in (*document, END)][:-1]


def expected() -> list[tuple[list[int], list[int], list[bool]]]:
    """Tokens, targets and what counts of each row, document by document."""
    rows = []
    for number, document in enumerate(DOCUMENTS):
        left = document + [END] * (number < len(DOCUMENTS) - 1)
        while len(left) > 1:
            row, left = left[: LENGTH + 1], left[LENGTH:]
            read, following = (row + [END] * LENGTH)[:LENGTH], (row[1:] + [END] * LENGTH)[:LENGTH]
            rows.append((read, following, [n < len(row) - 1 for n in range(LENGTH)]))
    return rows


IGNORED = -100


def inputs(rows: int = 3, counts: str = "f32") -> dict[str, Spec]:
    """Tokens, targets and which of these count; without `counts` others are ignored."""
    dims = {"batch": rows, "seq": LENGTH}
    split: dict[str, tuple[str, ...]] = {"batch": ("d",), "seq": ("t",)}
    index = Spec("i32", dims, split, ("below", 10))
    if not counts:
        return {"tokens": index, "targets": index._replace(draw=("below", 10, IGNORED))}
    return {"tokens": index, "targets": index, "counts": Spec(counts, dims, split)}


@pytest.fixture
def files(tmp_path: Path) -> DataFiles:
    np.array(tokens(), "<u2").tofile(tmp_path / "t.bin")
    return DataFiles(str(tmp_path / "t.bin"), tokens="uint16", end=END, rows=True)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("counts", ["f32", "bool", ""])
def test_rows_are_documents_and_padding(
    at_once: int, counts: str, files: DataFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_rows, "SCANNED_AT_ONCE", at_once)
    everything = open_everything(files, inputs(1, counts), proven=False)
    wanted = expected()
    assert everything.count == len(wanted)
    batches, mesh = everything.batches(), {"d": 1, "t": 2}
    for step, row in enumerate(wanted):
        for number, name in enumerate(inputs(1, counts)):
            values: list[Any] = [*row[number]]
            spec = inputs(1, counts)[name]
            parts = [local_part(spec, mesh, rank) for rank in range(2)]
            blocks = [batches.block(name, spec, step, part) for part in parts]
            found = np.concatenate(blocks, 1)[0]
            kept = row[2] if name != "counts" else [True] * LENGTH
            assert [*found[kept]] == [v for v, k in zip(values, kept, strict=True) if k]
            padding = END if counts else IGNORED
            assert (found[~np.array(kept)] == padding).all() or name == "tokens"
        assert batches.weight(step) == sum(row[2])


def test_every_row_comes_once_a_pass(files: DataFiles) -> None:
    data, spec = open_data(files, inputs(), 3).training, inputs()["tokens"]
    part = (slice(0, 3), slice(0, LENGTH))
    rows = [tuple(r) for s in range(data.order.passes) for r in data.block("tokens", spec, s, part)]
    assert len(rows) == len(expected()) // 3 * 3
    assert set(rows) <= {tuple(read) for read, _, _ in expected()}


REFUSED: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "padding that counts": ({}, ["tokens", "targets"], "MD0512", "rows of documents are padded"),
    "no end": ({"end": None}, [*inputs()], "MD0583", "nothing says which token ends a document"),
    "another end": ({"end": 10}, [*inputs()], "MD0513", "documents end with the token 10"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_say_what_becomes_of_padding(case: str, files: DataFiles) -> None:
    from dataclasses import replace

    changed, names, code, words = REFUSED[case]
    with pytest.raises(DiagnosticError) as caught:
        open_data(replace(files, **changed), {n: inputs()[n] for n in names}, 0)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert words in diagnostic.message
    assert diagnostic.help
