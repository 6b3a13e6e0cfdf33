"""Refusals of `verify` of buckets and collectives in flight: each is a mistake of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshdsl.device.ir import Bucket, Loop, Node, Program, Start, Wait
from meshdsl.device.verify import verify
from tests.device.steps import passed, plain, with_overlap

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


BROKEN = {
    "nobody waits": (without(Wait), "nobody waits for|is not assigned"),
    "nothing is issued": (without(Start), "nothing is in"),
    "waited for before it is issued": (waits_first, "nothing is in"),
    "two kinds in a bucket": (mixed, "one bucket for"),
}


@pytest.fixture(scope="module")
def program() -> Program:
    """A step with a bucket and with a collective in flight, at its top."""
    return passed(plain("zero2", "immediate"), with_overlap)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_program_is_refused(case: str, program: Program) -> None:
    change, message = BROKEN[case]
    with pytest.raises(AssertionError, match=message):
        verify(replace(program, body=change(program.body)))


def test_a_trip_has_to_issue_what_the_next_one_waits_for() -> None:
    program = passed(plain("zero3"), with_overlap)
    loop = next(node for node in program.body if isinstance(node, Loop))
    body = tuple(n for n in loop.body if not (isinstance(n, Start) and n.ahead))
    nodes = tuple(replace(loop, body=body) if n is loop else n for n in program.body)
    with pytest.raises(AssertionError):
        verify(replace(program, body=nodes))
