"""Sums of a step over micro-batches: wherever a rule places them, whatever pass adds to them."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from tests.covering import turns
from tests.pipelines.test_programs import compiled, hold, hold_bytes, hold_to, results

# --- sums that a rule places otherwise than what is added to them --------------------------------

GIVEN = """
dim batch = 4, m = 4, layers = 4
program q(x[batch, m]) {
  repeat layers {
    param w[m]
    x = tanh(x * w)
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1, accumulate=4)
}
"""
PLACED = "layers -> pipe, m -> t, grads: layers -> t"
SCHEDULES = [
    "one_f_one_b(reduce=each)",
    "gpipe(reduce=each)",
    "zb_h1(reduce=each)",
    "interleaved(chunks=2, reduce=each)",
    "breadth_first(chunks=2, reduce=each)",
    "zb_v(reduce=each)",
    "dualpipe_v(reduce=each)",
    "chimera(reduce=each)",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sum_lies_where_its_rule_says(schedule: str) -> None:
    """What is added is moved to the sum; the sum stays in its memory, in all of its rows."""
    made = compiled(GIVEN, "pipe:2,t:2", PLACED, f"with {schedule}").measured
    run = run_local(made.text, seed=0)
    hold_bytes(run, made)
    plain = compiled(GIVEN, "pipe:2,t:2", "layers -> pipe, m -> t", "").measured
    alone = run_local(plain.text, seed=0)
    hold_to(results(run), results(alone))
    assert float(run.outputs["grad_norm"]) == pytest.approx(0.01929, abs=5e-6)


# --- blocks of micro-batches ---------------------------------------------------------------------

LOOP = """
dim batch = 12, m = 4, layers = 4
program q(x[batch, m]) {
  param u[batch]
  param alone[batch]
  x = x * u + alone
  repeat layers {
    param v[batch]
    param w[m]
    x = tanh(x * v * w)
  }
  loss = mean(square(x * u))
  return loss, x
  minimize loss with sgd(lr=0.1)
}
"""
CUT = """
dim batch = 12, m = 4, k = m
program q(x[batch, m]) {
  param u[batch]
  param a[m, k]
  param v[batch]
  param b[m, k]
  h = tanh(einsum(x * u, a -> [batch, k]))
  y = tanh(einsum(h[k -> m] * v, b -> [batch, k]))
  loss = mean(square(y * u))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
STAGED = {
    "one stage a device": (LOOP, "pipe:2", "layers -> pipe"),
    "over samples": (LOOP, "pipe:2,d:2", "layers -> pipe, batch -> d"),
    "over features": (LOOP, "pipe:2,t:2", "layers -> pipe, m -> t"),
    "cut by rules": (CUT, "pipe:2", "h: pipe = 0, y: pipe = 1"),
}
PASSES = [
    "interleaved[batch](6, chunks=2)",
    "zb_v[batch](6)",
    "gpipe[batch](3)",
    "one_f_one_b[batch](6, reduce=each)",
    "dualpipe_v[batch](6)",
    "chimera[batch](6)",
    "zb_h1[batch](3)",
    "zb_h2[batch](6)",
]


def cases() -> list[tuple[str, str]]:
    """Kinds of stages with schedules that each can have, in turn."""
    several, one = ("zb_v", "dualpipe_v", "interleaved"), ("over features", "cut by rules")
    pairs = [
        (case["name"], case["schedule"]) for case in turns({"name": STAGED, "schedule": PASSES})
    ]
    return [(name, use) for name, use in pairs if not (use.startswith(several) and name in one)]


@pytest.mark.parametrize(("name", "schedule"), cases())
def test_each_pass_adds_to_the_block_of_its_micro_batch(name: str, schedule: str) -> None:
    """A parameter of samples has a gradient of samples, also where a backward pass has halves."""
    text, mesh, rules = STAGED[name]
    run = hold(compiled(text, mesh, rules, f"with {schedule}"), text)
    assert all(np.isfinite(array).all() for array in results(run).values())
