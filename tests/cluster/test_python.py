"""A cluster in Python: `compile(cluster=…)`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md

TEXT = """
dim batch = 8, hidden = 16
program p(x[batch, hidden]) {
  param w[hidden]
  return einsum(x, w -> [batch])
}
"""


@pytest.fixture
def program(tmp_path: Path) -> md.Program:
    path = tmp_path / "p.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    return md.load(path)


def test_a_plan_on_a_cluster(program: md.Program) -> None:
    made = program.compile({"x": 2}, ["hidden -> x"], cluster="h100")
    assert "Predicted on h100" in str(made.explain())
    assert "Predicted on h100" in str(pickle.loads(pickle.dumps(made)).explain())
    plain = program.compile({"x": 2}, ["hidden -> x"])
    assert "Predicted" not in str(plain.explain())


def test_what_cannot_be(program: md.Program) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"cluster": "h10"}, "MD0320"),
        ({"objective": "time"}, "MD0324"),
        ({"objective": "speed"}, "MD0602"),
    )
    for given, code in wrong:
        with pytest.raises(md.ProgramError, match=code):
            program.compile({"x": 2}, ["hidden -> x"], **given)
