"""Dims that the compiler makes up are never those of the program, whatever these are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshdsl.cli.app import app

SIGNS = """dim k = 64, b = 8, s = 8, m = 64
mesh q = { data: 2, seq: 2 }
layout l { b -> data, s -> seq }
program p(x[b, s, m], t[b, m]) {
  param NAME[m, k]
  param v[k, m]
  h = cumsum[s](einsum(x, NAME -> [b, s, k]))
  y = sum[s](tanh(einsum(h, v -> [b, s, m])))
  loss = mean((y - t)^2)
  minimize loss with sgd(lr=0.1, compress=onebit())
  return loss
}
"""
"""A running sum in blocks of `s`, and gradients that each worker sends in blocks."""

COPIES = """dim b = 8, io = 4, NAME = 4
mesh q = { data: 2 }
layout l { b -> data }
def mine[rows, cols, other](w[rows, cols], g[rows, cols], lr) {
  gram = einsum(g, g[rows -> other] -> [rows, other])
  return w - lr * einsum(gram, g[rows -> other] -> [rows, cols])
}
program p(x[b, io], t[b, NAME]) {
  param w[io, NAME]
  loss = mean((einsum(x, w -> [b, NAME]) - t)^2)
  minimize loss with mine(lr=0.1)
  return loss
}
"""
"""An optimizer with a copy of `io`."""


@pytest.mark.parametrize("name", ["w", "s"])
def test_a_parameter_is_called_like_a_dim(name: str, tmp_path: Path) -> None:
    assert "loss" in run(SIGNS, name, tmp_path)


@pytest.mark.parametrize("name", ["out", "io_other"])
def test_a_dim_is_called_like_a_copy_of_another(name: str, tmp_path: Path) -> None:
    assert "verified" in run(COPIES, name, tmp_path, "--verify")


def run(text: str, name: str, folder: Path, *options: str) -> str:
    """What a step prints, with a name in the program."""
    path = folder / "named.mdsl"
    path.write_text(text.replace("NAME", name))
    ran = CliRunner().invoke(app, ["run", str(path), "--step", *options])
    assert ran.exit_code == 0, ran.output
    return ran.output
