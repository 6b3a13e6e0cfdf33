"""Sums over iterations: in place where no other variable shares the memory, and right."""

from __future__ import annotations

import pytest

from meshdsl.backends.draws import draws
from meshdsl.backends.torch.emitter import emit
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, DeviceProgram
from meshdsl.device.sums import summed_in_place
from meshdsl.ir.program import every, loops
from tests.device.steps import TEXT
from tests.programs.harness import Case, compiled
from tests.training.stepping import check_step

HEAD = "dim b = 4, i = 4, t = 3, u = 2\n"
PROGRAM = """
program p(x[b, i], z[t, b, i], y[t, u, b, i]) {{
  param w[i]
  {body}
  loss = mean(({result})^2)
  return loss, {result}{more}
  minimize loss with sgd(lr=0.1)
}}
"""
ZEROS = "zeros[b, i]()"

BODIES: dict[str, tuple[str, str, str, int]] = {
    "a sum": (f"s = {ZEROS}\n repeat t {{ s = s + z * w }}", "s", "", 1),
    "the sum second": (f"s = {ZEROS}\n repeat t {{ s = z * w + s }}", "s", "", 1),
    "two of them": (
        f"s = {ZEROS}\n r = {ZEROS}\n repeat t {{ s = s + z * w \n r = r + z }}", "s + r", "", 2
    ),
    "from the same zeros": (
        f"o = {ZEROS}\n s = o\n r = o\n repeat t {{ s = s + z * w \n r = r + z }}", "s * r", "", 2
    ),
    "zeros that are returned too": (
        f"o = {ZEROS}\n s = o\n repeat t {{ s = s + z * w }}", "s", ", o", 1
    ),
    "what is added is read again": (
        f"s = {ZEROS}\n r = x\n repeat t {{ k = z * w \n s = s + k \n r = r * k }}", "s + r", "", 1
    ),
    "what is added is the same in every trip": (
        f"s = {ZEROS}\n k = x * w\n repeat t {{ s = s + k }}", "s + z[t = 0]", "", 1
    ),
    "a part without all dims": (f"s = {ZEROS}\n repeat t {{ s = s + w }}", "s + x", "", 1),
    "a sum of sums": (
        f"s = {ZEROS}\n repeat t {{ r = {ZEROS}\n repeat u {{ r = r + y * w }}\n s = s + r }}",
        "s", "", 2,
    ),
    "begun with something": ("s = x\n repeat t { s = s + z * w }", "s", "", 0),
    "read on the way": (f"s = {ZEROS}\n repeat t {{ s = s + tanh(s + z * w) }}", "s", "", 0),
    "twice itself": (f"s = {ZEROS} + x\n repeat t {{ s = s + s }}", "s * w", "", 0),
    "exchanged": (
        f"s = {ZEROS}\n r = x * w\n repeat t {{ k = s \n s = r + z \n r = k }}", "s + r", "", 0
    ),
}  # fmt: skip
"""By name: statements, the result, what else is returned, how many sums there are (forward)."""

LAYOUTS = {"one:1": "{ b -> none }", "x:2": "{ b -> x }", "x:2,y:2": "{ b -> x, i -> y }"}


def text_of(name: str) -> str:
    body, result, more, _ = BODIES[name]
    return HEAD + PROGRAM.format(body=body, result=result, more=more)


def in_place(program: DeviceProgram, phase: str = "forward") -> list[Compute]:
    """The additions that are done in place, also those of what an operator makes."""
    nodes = (node for node in every(program.body) if isinstance(node, Compute))
    return [node for node in nodes if node.over is not None and node.phase == phase]


@pytest.mark.parametrize("mesh", LAYOUTS)
@pytest.mark.parametrize("name", BODIES)
def test_a_sum_is_right_and_in_place_where_it_may_be(name: str, mesh: str) -> None:
    case = Case(text_of(name), mesh, LAYOUTS[mesh])
    check_step(case)
    assert len(in_place(compiled(case).device)) == BODIES[name][3]


@pytest.mark.parametrize("name", BODIES)
def test_a_forward_pass_writes_over_nothing(name: str) -> None:
    """It may be put through torch's autograd, which wants to read it again."""
    lines = text_of(name).splitlines()
    text = "\n".join(line for line in lines if "minimize" not in line)
    program = compiled(Case(text, "one:1", "{ b -> none }")).device
    assert not in_place(program)
    assert summed_in_place(program) is program


# --- steps of several batches -----------------------------------------------------------------

STEP = TEXT.replace("adamw(lr=1e-3", "adamw(lr=1e-3, accumulate=2")


def test_gradients_are_added_where_they_are_made() -> None:
    """Of layers slice by slice, right into the sum: no stack of a batch's gradients is made."""
    program = compiled(Case(STEP, "data:2", "data_parallel")).device
    batches, _, backward = loops(program.body, DeviceLoop)
    sums = {c.inside.name: c for c in batches.carries}
    assert all(c.init.name == c.next.name == name for name, c in sums.items())
    added = {c.stack.name for c in backward.collected if c.stack is not None}
    assert added == {f"d_{name}_part" for name in ("up", "bias", "down", "gain")}
    assert not [c for c in backward.collected if c.stack is None]
    assert len(in_place(program, "backward")) == 6


@pytest.mark.parametrize("layout", ["data_parallel", "zero1"])
def test_every_layout_sums_in_place(layout: str) -> None:
    program = compiled(Case(STEP, "data:4", layout)).device
    batches = next(loops(program.body, DeviceLoop))
    assert {c.next.name for c in batches.carries} == {c.inside.name for c in batches.carries}
    zeros = [n for n in every(program.body) if isinstance(n, Compute) and n.name == "zeros"]
    assert len(zeros) == len(batches.carries)


def test_the_text_of_a_sum_in_place() -> None:
    text = STEP.replace("adamw(lr=1e-3", 'sgd(lr=1e-3, compute="bf16"')
    made = compiled(Case(text, "data:2", "data_parallel"))
    program = emit(made.device, draws(made.named)).text
    assert "d_up_part = torch.zeros((3, 8, 16), dtype=torch.float32)" in program
    lines = [line.strip().partition("  #")[0] for line in program.splitlines()]
    # A narrow gradient is widened as it is added.
    (added,) = [line for line in lines if line.startswith("d_up_part[layers].add_(")]
    assert " @ " in added
    # The mean is taken in the same memory, which the devices then reduce.
    assert "d_up_part.mul_(0.5)" in lines
    assert "clone()" not in program


def test_what_is_collected_elsewhere_is_collected() -> None:
    """A stack of gradients that somebody else reads is not the sum."""
    program = compiled(Case(TEXT, "data:2", "data_parallel")).device
    found: list[DeviceCollected] = [c for node in every(program.body) for c in node.collected]
    assert found
    assert all(c.stack is None for c in found)
