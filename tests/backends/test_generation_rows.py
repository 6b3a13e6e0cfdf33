"""`benchmarks.generation`: the model by hand says what ours does, and a row has all its cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import generation
from benchmarks.generation import HEAD, PROMPT, Case, Ours, measure, row

SIZES = {"batch": 2, "seq": 24, "model": 64, "heads": 2, "hidden": 64, "layers": 2}


def test_a_row_is_of_equal_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generation, "is_there", lambda: False)  # JAX compiles for seconds
    case = Case("tiny", SIZES)
    times, peaks = measure(case, 1)  # it compares the tokens
    assert set(times) == {"ours", "hand"}
    assert peaks["ours"] == pytest.approx(peaks["explain"], rel=0.05)
    assert row(case, times, peaks).count("|") == len(HEAD) + 1
    tokens = Ours(case, str(tmp_path)).timed()[0]
    assert len(tokens) == SIZES["seq"] + 1 - len(PROMPT)
    assert len(set(tokens)) > 3, "a text of one token tells little"
