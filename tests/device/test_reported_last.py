"""Numbers that a step only reports: after the backward pass, in the bucket of its gradients."""

from __future__ import annotations

import pytest

from meshdsl.device.ir import Bucket, Move
from meshdsl.ir.program import every
from tests.programs.harness import Case, compiled
from tests.training.stepping import check_step

TEXT = """
dim b = 8, i = 4
program p(x[b, i]) {{
  param w[i]
  param seen[] = zeros()
  y = x * w
  first = mean(y^2)
  second = mean(y)
  {body}
  return {returned}
  minimize {goal} with sgd(lr=0.1)
}}
"""
SUM = "loss = first + 0.1 * second"

BODIES: dict[str, tuple[str, str, str, int]] = {
    "a sum of two": (SUM, "loss, second", "loss", 1),
    "the step needs it": ("loss = exp(first + 0.1 * second)", "loss", "loss", 2),
    "a state has it": (f"{SUM}\n  seen := loss + 1.0", "loss", "loss", 2),
    "a state is read": (f"{SUM}\n  old = seen * 2.0\n  seen := 1.0 - seen", "loss, old", "loss", 1),
    "no goal": (f"{SUM}\n  other = sqrt(abs(second)) * 3.0", "loss, other", "first", 1),
}
"""By name: statements, what is returned, the goal, and how many collectives a step has."""


@pytest.mark.parametrize("name", BODIES)
def test_it_is_right_and_reduced_with_the_gradients(name: str) -> None:
    body, returned, goal, count = BODIES[name]
    case = Case(TEXT.format(body=body, returned=returned, goal=goal), "d:2", "{ b -> d }")
    check_step(case)
    nodes = [n for n in every(compiled(case).device.body) if isinstance(n, Move | Bucket)]
    assert len([n for n in nodes if n.step.moves]) == count
