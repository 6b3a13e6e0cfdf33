"""Micro-batches of `accumulate`: what is returned of each is kept, whatever stage makes it."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import Array
from tests.covering import Case, Rules, covering
from tests.pipelines.kinds import SYNCHRONOUS, devices_of, stages
from tests.pipelines.test_programs import compiled, hold_bytes, hold_to, results

MICRO = 4
LOOP = """
dim batch = 4, model = 4, layers = 8, out = model
program net(x[batch, model], target[batch, model]) {
  a = x * 0.5
  x = a
  repeat layers {
    param w[model, out]
    x = tanh(einsum(x, w -> [batch, out]))[out -> model]
  }
  y = x * 2.0
  large = y > 0.1
  both = y + a
  loss = mean(square(both - target))
  return RETURNED
  minimize loss with OPT
}
"""
CUT = """
dim batch = 4, model = 4, hidden = 6, low = 5, out = 4
program net(x[batch, model], target[batch, out]) {
  param w1[model, hidden]
  param w2[hidden, low]
  param w3[low, hidden]
  param w4[hidden, out]
  a = tanh(einsum(x, w1 -> [batch, hidden]))
  x = tanh(einsum(a, w2 -> [batch, low]))
  y = tanh(einsum(x, w3 -> [batch, hidden]))
  both = y + a
  large = einsum(both, w4 -> [batch, out])
  loss = mean(square(large - target))
  return RETURNED
  minimize loss with OPT
}
"""
PROGRAMS = {
    "loop": (LOOP, "layers -> pipe"),
    "cut": (CUT, "x: pipe = 1, y: pipe = 2, large: pipe = 3"),
}
RETURNED = ("loss, y", "a, loss", "x, large, loss, both")
MESHES = {"pipe:4": "", "data:2,pipe:2": ", batch -> data"}


FACTORS: dict[str, tuple[str, ...]] = {
    "name": SYNCHRONOUS,
    "returned": RETURNED,
    "mesh": tuple(MESHES),
    "program": tuple(PROGRAMS),
}
RULES: Rules = {
    ("program", "mesh", "name"): lambda case: (
        case["program"] == "loop" or stages(case["name"], devices_of(case["mesh"])) == 4
    )
}
"""Loops under every schedule; a network that is cut into four where there are as many stages."""


@functools.cache
def on_one_device(text: str) -> dict[str, Array]:
    """What a step without stages returns and updates."""
    return results(run_local(compiled(text, "pipe:1", "", "").text, seed=4))


@pytest.mark.parametrize("case", covering(FACTORS, RULES), ids=lambda case: "-".join(case.values()))
def test_what_is_returned_of_each(case: Case) -> None:
    """Loss, parameters and every tensor that has the batch are those of one device."""
    name, returned, mesh = case["name"], case["returned"], case["mesh"]
    text, rules = PROGRAMS[case["program"]]
    micro = 8 if name.startswith("dualpipe") else MICRO
    optimizer = f"momentum(lr=0.1, accumulate={micro})"
    text = text.replace("RETURNED", returned).replace("OPT", optimizer)
    made = compiled(text, mesh, rules + MESHES[mesh], f"with {name}")
    run = run_local(made.text, seed=4)
    hold_to(results(run), on_one_device(text), 2e-5)
    assert {v.shape[:1] for v in run.outputs.values() if v.ndim} == {(micro,)}
    assert all(np.isfinite(v).all() for v in run.outputs.values())
    hold_bytes(run, made)
    assert not run.disagreements()


ROWS = """
dim batch = 4, d = 2, layers = 4
program p(x[batch, d]) {
  repeat layers {
    param w[d]
    x = tanh(x * w)
    h = x
  }
  loss = mean(square(x))
  return loss, h
  minimize loss with sgd(lr=0.1, accumulate=2)
}
"""


@pytest.mark.parametrize("use", ["interleaved(chunks=2)", "zb_v", "breadth_first(chunks=2)"])
def test_what_each_layer_returns(use: str) -> None:
    """A device has the rows of several stages, of each batch."""
    made = compiled(ROWS, "pipe:2", "layers -> pipe", f"with {use}")
    hold_to(results(run_local(made.text, seed=4)), on_one_device(ROWS))
