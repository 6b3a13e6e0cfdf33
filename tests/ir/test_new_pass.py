"""CONTRIBUTING's pass: a function in a file, an entry of a table, and no other edit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import meshdsl.named
from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import Source
from meshdsl.named import passes
from meshdsl.named.attention_fusion import Spoken
from meshdsl.named.ir import walk
from meshdsl.pipeline import Compilation, Options
from tests.project import guide_file

TEXT = """\
dim l = 2, a = 4
mesh m = { x: 2 }
layout split { a -> x }
program p(x[a]) {
  y = -(-x)
  repeat l { y = -tanh(-(-y)) }
  return y
}
"""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The passes over the named program, with that of the guide in front."""
    (tmp_path / "fold_negations.py").write_text(guide_file("meshdsl/named/fold_negations.py"))
    monkeypatch.setattr(meshdsl.named, "__path__", [*meshdsl.named.__path__, str(tmp_path)])
    fold = import_module("meshdsl.named.fold_negations").fold_negations
    table = passes.passes

    def with_it(spoken: Spoken | None, is_step: bool) -> tuple[passes.Pass, ...]:
        return (fold, *table(spoken, is_step))

    monkeypatch.setattr(passes, "passes", with_it)
    yield
    sys.modules.pop("meshdsl.named.fold_negations", None)


def compiled(layout: str | None) -> Compilation:
    """The program of this file."""
    return Compilation(Source("p.mdsl", TEXT), Options(mesh="m", layout=layout))


def names(made: Compilation) -> list[str]:
    """The operators of the named program."""
    return [op.name for op in walk(made.named.body)]


def test_it_leaves_out_what_it_says(request: pytest.FixtureRequest) -> None:
    before = compiled("split")
    assert names(before) == ["neg", "neg", "neg", "neg", "tanh", "neg"]
    expected = run_local(before.text, seed=1).outputs["y"]
    request.getfixturevalue("added")
    folded = compiled("split")
    assert names(folded) == ["identity", "identity", "tanh", "neg"]
    assert np.array_equal(run_local(folded.text, seed=1).outputs["y"], expected)
