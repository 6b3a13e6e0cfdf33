"""Training where no axis divides a dim: short and empty blocks of parameters, gradients, states.

The numbers are those of one device, in f64; gradients are also those of torch's autograd; bytes
predicted are bytes counted. CI takes a few of the cases, by number; `MESHDSL_CASES` all.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.reference import reference_step
from meshdsl.report.explanation import explain
from tests.programs.harness import Case, check_bytes, compiled
from tests.training.stepping import autograd, compiled_step, hold_to, values

PROGRAM = """
dim batch = {batch}, io = {io}, hidden = {hidden}, layers = 2

program mlp(x[batch, io], target[batch, io]) {{
  param g[io] = ones()
  h = x
  repeat layers {{
    param w[io, hidden]
    param b[hidden] = zeros()
    param v[hidden, io]
    {open}
    y = gelu(einsum(layer_norm[io](h) * g, w -> [batch, hidden]) + b)
    z = h + einsum(y, v -> [batch, io])
    {close}
    h = z
  }}
  loss = mean((h - target)^2)
  return loss, h
  minimize loss with {optimizer}
}}
"""

SIZES = ((5, 3, 7), (1, 5, 3), (3, 1, 5), (7, 7, 1))
"""Of batch, io and hidden: over two and four devices blocks are short, and some are empty."""

OPTIMIZERS = (
    "sgd(lr=1.0)",
    "adamw(lr=0.1, eps=1.0, clip=0.5)",
    "adafactor(lr=0.1, eps1=1.0)",
    "momentum(lr=0.1, nesterov=true, weight_decay=0.1, accumulate=3)",
    "adam(lr=0.1, eps=1.0, accumulate=2, clip=1.0)",
)

LAYOUTS = (
    "a:2 { batch -> a }",
    "a:2 { hidden -> a }",
    "a:2 { batch -> a, state: io -> a }",
    "a:2 { batch -> a, state: io -> a, grads: io -> a }",
    "a:2 { batch -> a, params: io -> a }",
    "a:2 { batch -> a, params: io -> a keep }",
    "a:4 { batch -> a, params: io -> a, params: hidden -> none }",
    "a:2,b:2 { batch -> a, hidden -> b, params: io -> a }",
    "a:2,b:2 { batch -> (a, b), params: io -> (a, b) }",
    "a:2,b:2 { batch -> (b, a), state: io -> (b, a) }",
    "a:2,b:2 { batch -> b, io -> a }",
)
POLICIES = ("deferred", "immediate", "mesh-tf", "optimal")

EVERY = list(itertools.product(SIZES, OPTIMIZERS, LAYOUTS, (False, True), POLICIES))
ALL = "MESHDSL_CASES" in os.environ
CASES = EVERY if ALL else EVERY[::267]
"""267 shares no factor with how many of each there are."""


def program(sizes: tuple[int, int, int], optimizer: str, again: bool) -> str:
    """The program at these sizes; `again`: the layer is computed again in the backward pass."""
    batch, io, hidden = sizes
    around = {"open": "recompute {", "close": "}"} if again else {"open": "", "close": ""}
    return PROGRAM.format(batch=batch, io=io, hidden=hidden, optimizer=optimizer, **around)


@pytest.mark.parametrize(("sizes", "optimizer", "layout", "again", "reduce"), CASES)
def test_steps_are_those_of_one_device(
    sizes: tuple[int, int, int], optimizer: str, layout: str, again: bool, reduce: str
) -> None:
    mesh, _, rules = layout.partition(" ")
    made = compiled_step(Case(program(sizes, optimizer, again), mesh, rules, reduce))
    inputs, params = values(made.named)
    kept, expected = dict(params), dict(params)
    for _ in range(2):
        step = made.step(inputs, kept)
        outputs, expected = reference_step(made.named, inputs, expected, expected)
        hold_to(step, outputs, expected, 1e-9)
        kept = step.run.updated


@pytest.mark.parametrize("layout", LAYOUTS if ALL else LAYOUTS[::3])
def test_gradients_are_those_of_torch(layout: str) -> None:
    mesh, _, rules = layout.partition(" ")
    text = program(SIZES[0], "sgd(lr=1.0)", again=True)
    made = compiled_step(Case(text, mesh, rules))
    inputs, params = values(made.named)
    slopes = autograd(text, inputs, params)
    updated = made.step(inputs, params).run.updated
    for name, slope in slopes.items():
        np.testing.assert_allclose(params[name] - updated[name], slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS if ALL else LAYOUTS[1:8:3])
def test_mixed_precision_sends_what_was_predicted(layout: str) -> None:
    mesh, _, rules = layout.partition(" ")
    text = program(SIZES[0], 'adam(lr=1e-3, compute="bf16")', again=False)
    case = Case(text, mesh, rules)
    made, alone = compiled(case), compiled(Case(text, "one:1", "{ }"))
    inputs, params = values(made.named)
    run, one = run_local(made.text, inputs, params), run_local(alone.text, inputs, params)
    check_bytes(explain(made.device), run)
    assert run.disagreements() == []
    for name, array in one.updated.items():
        np.testing.assert_allclose(run.updated[name], array, rtol=0.05, atol=0.02)
