"""Kinds of schedules: those of one kind have the same passes, and differ in their table alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from meshdsl.schedule.registry import generate, schedules
from tests.covering import Case

SYNCHRONOUS = tuple(name for name, made in schedules().items() if not made.asynchronous)


def devices_of(mesh: str) -> int:
    """The devices along the axis of the stages."""
    return int(mesh.split("pipe:")[1].split(",")[0])


@functools.cache
def stages(schedule: str, devices: int) -> int:
    """The stages that a schedule makes of so many devices."""
    return generate(schedule, devices, 8).stages


def stages_in(case: Case) -> int:
    """The stages of a case, whichever schedule of its kind it has."""
    return stages(KINDS[case["kind"]][0], devices_of(case["mesh"]))


def kind(schedule: str) -> str:
    """How many stages a device has, of which micro-batches, and whether backward has halves.

    Schedules both ways are one kind, with halves or without: they take turns.
    """
    table = generate(schedule, 2, 8)
    actions = [[action for action in row if action.kind == "F"] for row in table.rows]
    ways = {action.stage for action in actions[0]} & {action.stage for action in actions[1]}
    halves = any(action.kind == "W" for row in table.rows for action in row)
    return f"{table.stages} stages{' both ways' if ways else ' in halves' if halves else ''}"


KINDS = {
    one: tuple(name for name in SYNCHRONOUS if kind(name) == one) for one in map(kind, SYNCHRONOUS)
}


def can_be(schedule: str, case: Case) -> bool:
    """Micro-batches go both ways in pairs; a schedule of two of a kind fills all its devices."""
    micro: int = case["micro"]
    if schedule == "dualpipe_v":
        return micro >= stages_in(case)
    if schedule == "dualpipe":
        return micro >= 2 * devices_of(case["mesh"])
    return schedule != "chimera" or micro % 2 == 0


def is_made(case: Case) -> bool:
    """Whether any schedule of a kind can have the micro-batches of a case."""
    return any(can_be(name, case) for name in KINDS[case["kind"]])


def scheduled(cases: Sequence[Case]) -> list[Case]:
    """Cases with a schedule of their kind: those that can be take turns."""
    turns = {one: itertools.cycle(names) for one, names in KINDS.items()}
    return [
        case | {"schedule": next(n for n in turns[case["kind"]] if can_be(n, case))}
        for case in cases
    ]
