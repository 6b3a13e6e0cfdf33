"""Refusals of `verify`: collectives in flight, sums and results in vain; each a pass's mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshdsl.device.ir import Bucket, Compute, DeviceLoop, DeviceProgram, Node, Start, Wait
from meshdsl.device.verify import verify
from meshdsl.ir.program import OpKind, block_loops
from tests.device.steps import passed, plain, with_overlap
from tests.ir_text.device import parse_program

Broken = Callable[[tuple[Node, ...]], tuple[Node, ...]]


def without(kind: type[Node]) -> Broken:
    """Takes the first node of a kind away."""

    def change(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        at = next(i for i, node in enumerate(nodes) if isinstance(node, kind))
        return nodes[:at] + nodes[at + 1 :]

    return change


def waits_first(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The first start is after its wait."""
    start = next(node for node in nodes if isinstance(node, Start))
    rest = [node for node in nodes if node is not start]
    at = next(i for i, n in enumerate(rest) if isinstance(n, Wait) and n.work == start.work)
    return (*rest[: at + 1], start, *rest[at + 1 :])


def mixed(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The first bucket has another kind of move in it."""
    at, bucket = next((i, n) for i, n in enumerate(nodes) if isinstance(n, Bucket))
    move = replace(bucket.moves[0], step=replace(bucket.step, kind="all_to_all"))
    return (*nodes[:at], replace(bucket, moves=(move, *bucket.moves[1:])), *nodes[at + 1 :])


def of_a_kind(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The first operator is said to be what leaves the stages of a pipeline."""
    at, op = next((i, n) for i, n in enumerate(nodes) if isinstance(n, Compute))
    return (*nodes[:at], replace(op, kind=OpKind.STAGE_OUTPUT), *nodes[at + 1 :])


BROKEN = {
    "nobody waits": (without(Wait), "nobody waits for|is not assigned"),
    "nothing is issued": (without(Start), "nothing is in"),
    "waited for before it is issued": (waits_first, "nothing is in"),
    "two kinds in a bucket": (mixed, "one bucket for"),
    "an operator of another kind": (of_a_kind, "a stage_output is no"),
}


@pytest.fixture(scope="module")
def program() -> DeviceProgram:
    """A step with a bucket and with a collective in flight, at its top."""
    return passed(plain("zero2", "immediate"), with_overlap)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_program_is_refused(case: str, program: DeviceProgram) -> None:
    change, message = BROKEN[case]
    with pytest.raises(AssertionError, match=message):
        verify(replace(program, body=change(program.body)))


@pytest.mark.parametrize("late", [False, True], ids=["ahead", "late"])
def test_a_trip_has_to_issue_what_the_next_one_waits_for(late: bool) -> None:
    program = passed(plain("zero3"), with_overlap)
    *_, loop = block_loops(program.body, DeviceLoop)
    left_out = [n for n in loop.body if isinstance(n, Start) and (n.late if late else n.ahead)]
    body = tuple(n for n in loop.body if n not in left_out)
    nodes = tuple(replace(loop, body=body) if n is loop else n for n in program.body)
    assert left_out
    with pytest.raises(AssertionError, match=r"nobody waits for|nothing is in|is not assigned"):
        verify(replace(program, body=nodes))


def test_nothing_but_the_loop_collects_what_arrives_late() -> None:
    program = passed(plain("zero3"), with_overlap)
    *_, loop = block_loops(program.body, DeviceLoop)
    made = loop.late[0].collective.makes
    others = tuple(c for c in loop.collected if c.inside not in made)
    nodes = tuple(replace(loop, collected=others) if n is loop else n for n in program.body)
    with pytest.raises(AssertionError, match="is not collected"):
        verify(replace(program, body=nodes))


# --- what is made in vain -----------------------------------------------------------------------

PIPELINE = """
program q on each of 2 devices, mesh m { p: 2 }
  input  x_stack : f32[accumulate 2, a 4] = x
  param  w : f32[a 4] = w
  d_w = zeros {dims=(a), dtype=f32} : f32[a 4]
  repeat accumulate 2 as accumulate over p
    slice x : f32[a 4] = x_stack[accumulate]
    carry d_w : f32[a 4] = d_w
    stage 0: F0 F1
    stage 1: F0 F1
    part EVERY
      PASS
    next  d_w = NEXT; at the end d_w
  w_new = sub w d_w [update] : f32[a 4]
  update w = w_new
"""
COLLECTIVE = """
program q on each of 2 devices, mesh m { p: 2 }
  input  x : f32[a 4] partial sum over p = x
  y = all_reduce sum over p: x : f32[a 4]
  z = all_reduce sum over p: x : f32[a 4]
  return y = y
"""
BUFFER = {"PASS": "d_w = add d_w x : f32[a 4]", "NEXT": "d_w"}
READ = {"return y = y": "return y = y\n  return z = z"}
TEXTS = {
    "a sum that is added to": (PIPELINE, BUFFER, None),
    "a sum that nothing adds to": (
        PIPELINE, {"PASS": "y = add d_w x : f32[a 4]", "NEXT": "d_w"}, "no pass writes d_w of line",
    ),
    "a sum that goes on elsewhere": (
        PIPELINE, {"PASS": "y = add d_w x : f32[a 4]", "NEXT": "y"}, "d_w of line .* goes on as y",
    ),
    "collectives that are read": (COLLECTIVE, READ, None),
    "a collective that nothing reads": (
        COLLECTIVE, {}, "nothing reads z, the all_reduce of x of line",
    ),
}  # fmt: skip
"""By name: a text, what stands in it, and what the verifier says; None: nothing."""


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_made_in_vain(name: str) -> None:
    text, words, message = TEXTS[name]
    for word, written in words.items():
        text = text.replace(word, written)
    program = parse_program(text.strip())
    if message is None:
        verify(program)
        return
    with pytest.raises(AssertionError, match=message):
        verify(program)
