"""An index out of range is the same error in every engine and layout."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.diagnostics import DiagnosticError
from tests.compiling import compile_text

PROGRAM = """
dim batch = 8, seq = 8, vocab = 16, model = 8, n = 2
mesh grid = { x: 2, y: 2 }
layout whole { }
layout batch_split { batch -> x }
layout both_split { batch -> x, seq -> y }
layout vocab_split { vocab -> (x, y) }
layout mixed { seq -> y, vocab -> x }
program p(ids[batch, seq]: i32) {
  param table[vocab, model]
  h = table[vocab = ids]
  repeat n {
    h = h + table[vocab = ids + 1]
  }
  total = sum(h)
  return total
}
"""
CASES = {
    "negative": {(3, 5): -1},
    "too large": {(6, 2): 16},
    "the first of several": {(7, 7): 99, (2, 6): -4, (2, 7): 1000},
    "in the loop only": {(5, 1): 15},
}
LAYOUTS = ("whole", "batch_split", "both_split", "vocab_split", "mixed")


def ids(bad: dict[tuple[int, int], int]) -> np.ndarray:
    """Valid indices but for `bad`."""
    found = np.arange(64, dtype=np.int32).reshape(8, 8) % 15
    for at, value in bad.items():
        found[at] = value
    return found


def message(
    tmp_path, engine: str, layout: str, bad: dict[tuple[int, int], int], mesh: str | None = None
) -> str:
    """The message to the user."""
    path = tmp_path / "ids.npz"
    np.savez(path, ids=ids(bad))
    with pytest.raises(DiagnosticError) as error:
        run(compile_text(PROGRAM, layout=layout, mesh=mesh), engine, InputSource(inputs=str(path)))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == "MD0801"
    return diagnostic.message


@pytest.mark.parametrize("case", CASES)
def test_the_same_in_every_layout(tmp_path, case):
    told = {message(tmp_path, "local", layout, CASES[case]) for layout in LAYOUTS}
    told.add(message(tmp_path, "reference", "whole", CASES[case]))
    assert len(told) == 1, told
    assert "test.mdsl:1" in told.pop()


@pytest.mark.usefixtures("forked_ranks")
def test_the_same_on_real_processes(tmp_path):
    bad = CASES["the first of several"]
    real = message(tmp_path, "torchrun", "both_split", bad, "x:1,y:2")
    assert real == message(tmp_path, "reference", "whole", bad)
    assert "[batch=2, seq=6]" in real
