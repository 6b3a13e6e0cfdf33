"""Large gradients of layers: reduced in their iterations, in place, while others are computed."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.device import buckets
from meshdsl.device.filled_stacks import filled_stacks
from meshdsl.device.ir import DeviceLoop, DeviceProgram, Move
from meshdsl.device.memory import memory
from meshdsl.device.reduced_in_loops import reduced_in_loops
from meshdsl.ir.program import loops
from meshdsl.report.explanation import explain
from tests.device.steps import CASES, passed, placed, plain, run, with_overlap
from tests.programs.harness import Case, check_bytes, compiled
from tests.training.stepping import check_step

LARGE = """
dim b = 8, i = 512, j = 512, layers = 3
program p(x[b, i], y[b, i]) {
  h = x
  repeat layers {
    param up[i, j]
    param down[j, i]
    param g[i]
    h = h * g + einsum(tanh(einsum(h, up -> [b, j])), down -> [b, i])
  }
  loss = mean((h - y)^2)
  return loss
  minimize loss with adamw(lr=1e-3, clip=1.0)
}
"""


def reduced(program: DeviceProgram) -> list[tuple[str, int]]:
    """The all_reduces that come an iteration later, with the number of iterations."""
    late = [
        (wait.collective, loop) for loop in loops(program.body, DeviceLoop) for wait in loop.late
    ]
    return [
        (move.target.hint, loop.dim.size)
        for collective, loop in late
        for move in collective.moves
        if move.step.kind == "all_reduce"
    ]


def sent(program: DeviceProgram) -> int:
    """The bytes that a device sends."""
    return sum(c["wire_bytes"] for c in explain(program)["collectives"])


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_bytes_are_those_of_one_after_the_loop(
    case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "SMALL", 0)
    before, named = plain(*case), placed(*case).named
    within = passed(before, reduced_in_loops, with_overlap, filled_stacks)
    outside = passed(before, with_overlap, filled_stacks)
    assert sent(within) == sent(outside)
    one, other = run(named, within), run(named, outside)
    for key, array in {**one.outputs, **one.updated}.items():
        assert np.array_equal(array, {**other.outputs, **other.updated}[key]), key
    check_bytes(explain(within), one)
    moves = [n for n in before.body if isinstance(n, Move) and n.step.kind == "all_reduce"]
    stacks = [m.target.hint for m in moves if m.source.local.names[:1] == ("layers",)]
    if case[0] not in ("zero2", "zero3", "both"):
        assert {(name, 3) for name in stacks} <= {*reduced(within)}
    elif case[1] == "optimal":  # on the same axis are collectives that the iterations wait for
        assert not reduced(within)


@pytest.mark.parametrize("layout", ["{ b -> d }", "{ b -> d, state: i -> d }"])
def test_only_large_ones_are_and_nothing_is_copied(layout: str) -> None:
    case = Case(LARGE, "d:2", layout)
    check_step(case)
    program = compiled(case).device
    assert reduced(program) == [("d_down", 3), ("d_up", 3)]
    (loop,) = (n for n in loops(program.body, DeviceLoop) if n.late)
    assert all(m.source in loop.in_slices for wait in loop.late for m in wait.collective.moves)
    report = memory(program)
    assert report["grads"] == report["params"]
