"""What several operators read is written over by the last of them, unless anything else has it."""

from __future__ import annotations

import pytest

from meshdsl.device.ir import Compute
from meshdsl.device.liveness import uses
from meshdsl.device.memory import MemoryReuse
from meshdsl.ir.program import every
from tests.programs.harness import Case, compiled
from tests.training.stepping import check_step

TEXT = """
dim b = 4, i = 4, c = b, t = 3
program p(x[b, i], z[t, b, i]) {{
  param w[i]
  {body}
  loss = mean(einsum(x, w -> [b]))
  return loss, {returned}
  minimize loss with sgd(lr=0.1)
}}
"""
TWICE = "a = x * 3.0\n m = max[i](a)\n r = a - m"

BODIES: dict[str, tuple[str, str, int]] = {
    "a row's largest is taken off": (TWICE, "r", 1),
    "one after the other": (f"{TWICE}\n e = exp(r)\n s = sum[i](r)\n q = e / sum[i](e)", "q, s", 2),
    "returned, too": (TWICE, "r, a", 0),
    "integers": ("a = cast(x * 3.0, i32)\n m = max[i](a)\n r = cast(a - m, f32)", "r", 0),
    "shown under other dims": ("a = x * 3.0\n k = a[b -> c]\n r = a - 1.0", "r, k", 0),
    "shown by the last one": ("a = x * 3.0\n m = max[i](a)\n r = a[b -> c] - 1.0", "r, m", 1),
    "a loop reads it": (
        "a = x * 3.0\n s = zeros[b, i]()\n repeat t { s = s + z * a }\n r = a - 1.0", "r, s", 0
    ),
    "in an iteration": ("s = zeros[b, i]()\n repeat t { a = z * 3.0\n s = s * (a - sum[i](a)) }",
                        "s", 1),
    "of an iteration before": (
        "a = x * 3.0\n repeat t { m = max[i](a)\n a = z * m + a }", "a", 0
    ),
    "all devices need it": ("a = x * 3.0\n k = cumsum[b](a)\n r = a - 1.0", "r, k", 1),
}  # fmt: skip
"""By name: statements, what is returned, and on one device how many are written over."""

LAYOUTS = {"one:1": "{ b -> none }", "x:2": "{ b -> x }", "x:2,y:2": "{ b -> x, i -> y }"}


def case_of(name: str, mesh: str) -> Case:
    body, returned, _ = BODIES[name]
    return Case(TEXT.format(body=body, returned=returned), mesh, LAYOUTS[mesh])


@pytest.mark.parametrize("mesh", LAYOUTS)
@pytest.mark.parametrize("name", BODIES)
def test_numbers_are_right(name: str, mesh: str) -> None:
    check_step(case_of(name, mesh))


@pytest.mark.parametrize("name", BODIES)
def test_only_what_nothing_else_has_is_written_over(name: str) -> None:
    program = compiled(case_of(name, "one:1")).device
    reads, computed = uses(program), (n for n in every(program.body) if isinstance(n, Compute))
    renamed = {v for node in computed if node.name == "rename" for v in node.makes}
    over = dict(MemoryReuse(program).found())
    again = [old for old in over.values() if reads[old] > 1 or old in renamed]
    assert len(again) == BODIES[name][2], [(v.name, old.name) for v, old in over.items()]


def test_a_softmax_over_devices_takes_one_buffer() -> None:
    text = """
    program p(x[b, v]) {
      param w[v]
      loss = mean(softmax[v](x * w)^2)
      return loss
      minimize loss with sgd(lr=0.1)
    }
    """
    program = compiled(Case("dim b = 64, v = 1024" + text, "m:2", "{ v -> m }")).device
    read = [old for old in dict(MemoryReuse(program).found()).values() if uses(program)[old] > 1]
    assert len(read) == 3  # for a maximum, a sum, and the gradient
