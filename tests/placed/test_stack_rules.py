"""A loop's stack has rules of its own: it is split along the loop's dim where it is outside."""

from __future__ import annotations

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.placed.place import POLICIES
from tests.pipelines.test_programs import compiled, hold_bytes, hold_to, on_one_device, results

FORWARD = """
dim b = 4, d = 4
program p(x[b]) {
  repeat d {
    x = tanh(x)
    s = x * 2
  }
  return s
}
"""
TRAINED = """
dim b = 8, m = 6, l = 4, o = m
program p(x[b, m], t[b, m]) {
  param scale[l, m]
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m] * scale)
    s = x * 2
  }
  u = s * 0.5
  loss = mean(square(x - t)) + 0.1 * mean(square(u)) + 0.1 * sum(square(w))
  return loss, u
  minimize loss with momentum(lr=0.1)
}
"""
RULES = ("s: l -> a", "s: l -> a, u: l -> a", "w: l -> a", "scale: l -> a", "s: l -> a, m -> e")


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_loop_collects_is_split_behind_it(policy: str) -> None:
    made = compiled(FORWARD, "a:2", "s: d -> a", "", policy)
    run = run_local(made.text, seed=4)
    alone = run_local(compiled(FORWARD, "a:1", "", "").text, seed=4)
    hold_to(run.outputs, alone.outputs)
    assert [held["s"].shape for held in run.device_outputs] == [(2, 4), (2, 4)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rules", RULES)
def test_a_step_is_that_of_one_device(rules: str, policy: str) -> None:
    """Also where the backward pass reads the stack again, and of parameters of the loop."""
    run = run_local((made := compiled(TRAINED, "a:2,e:2", rules, "", policy)).text, seed=4)
    hold_to(results(run), on_one_device(TRAINED))
    hold_bytes(run, made)
