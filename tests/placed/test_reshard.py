"""Routes between placements: every step means what the table says, and leads to the same tensor.

The devices are simulated in numpy; the effect of a step is defined here independently.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.runtime.values import group_members
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.collectives import Step
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.placed.reshard import Route, route

Array = np.ndarray[Any, np.dtype[Any]]
Parts = list[Array]

SQUARE = Mesh("square", (("x", 2), ("y", 2)))
MESHES = (
    Mesh("cube", (("x", 2), ("y", 2), ("z", 2))),
    Mesh("oblong", (("x", 2), ("y", 4))),
    Mesh("beam", (("x", 4), ("y", 2), ("z", 4))),
)
TENSOR = TensorType((Dim("i", 32), Dim("j", 32)), F32)
WHOLE = np.random.default_rng(1).integers(-9, 10, TENSOR.shape)
JOIN: dict[str, Callable[..., Array]] = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
}  # fmt: skip


def placements(op: ReduceOp, mesh: Mesh = SQUARE) -> list[Placement]:
    """Every placement on the mesh; of a dim over several axes, in every order."""
    found: list[Placement] = []
    for kinds in itertools.product(("i", "j", "B", op), repeat=len(mesh.axes)):
        by_axis = dict(zip(mesh.names, kinds, strict=True))
        for axes in itertools.permutations(mesh.names):
            splits: dict[str, tuple[str, ...]] = {}
            for axis in axes:
                if by_axis[axis] in TENSOR.names:
                    splits[by_axis[axis]] = (*splits.get(by_axis[axis], ()), axis)
            partial = tuple(a for a, kind in by_axis.items() if kind == op)
            found.append(placement(mesh, splits, partial, op))
    return list(dict.fromkeys(found))


# --- local blocks -----------------------------------------------------------------------------


def block(p: Placement, rank: int, mesh: Mesh = SQUARE) -> tuple[slice, ...]:
    """The part of the whole that a device's block is."""
    at = mesh.coordinates(rank)
    found = []
    for dim in TENSOR.dims:
        index = functools.reduce(lambda n, a: n * mesh.size(a) + at[a], p.axes_of(dim.name), 0)
        extent = dim.size // mesh.size(*p.axes_of(dim.name))
        found.append(slice(index * extent, (index + 1) * extent))
    return tuple(found)


def held(p: Placement, mesh: Mesh = SQUARE) -> Parts:
    """The local block of `WHOLE` on every device; partial values are random and reduce to it."""
    rng = np.random.default_rng(2)
    found = [WHOLE[block(p, rank, mesh)].copy() for rank in range(mesh.devices)]
    for members in groups(mesh, p.partial) if p.partial else []:
        for rank in members[1:]:
            noise = rng.integers(0, 9, found[rank].shape)
            if p.op == "sum":
                found[members[0]] = found[members[0]] - noise
                found[rank] = noise
            else:
                found[rank] = found[rank] - noise if p.op == "max" else found[rank] + noise
    return found


def groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    return group_members(dict(mesh.axes), axes)


def is_held(parts: Parts, p: Placement, mesh: Mesh = SQUARE) -> bool:
    """Whether the parts are `WHOLE` placed so."""
    for members in groups(mesh, p.partial) if p.partial else [[r] for r in range(mesh.devices)]:
        joined = functools.reduce(JOIN[p.op or "sum"], [parts[r] for r in members])
        if not all(np.array_equal(joined, WHOLE[block(p, r, mesh)]) for r in members):
            return False
    return True


# --- what a step does -------------------------------------------------------------------------


def apply(step: Step, parts: Parts, mesh: Mesh = SQUARE) -> Parts:
    """The parts after one step, group by group."""
    found = list(parts)
    for members in groups(mesh, step.axes):
        if step.kind == "permute":
            made = [parts[holder(step, members, rank, mesh)] for rank in members]
        elif step.kind == "slice":
            made = [kept(step, parts[rank], rank, mesh) for rank in members]
        else:
            made = STEPS[step.kind](step, [parts[r] for r in members])
        for rank, part in zip(members, made, strict=True):
            found[rank] = part
    return found


def kept(step: Step, part: Array, rank: int, mesh: Mesh) -> Array:
    """The part that a slice keeps; its axes are the innermost of the dim, outer first."""
    assert step.after.axes_of(str(step.dim))[-len(step.axes) :] == step.axes
    at = zip(block(step.after, rank, mesh), block(step.before, rank, mesh), strict=True)
    return part[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in at)]


def holder(step: Step, members: list[int], rank: int, mesh: Mesh) -> int:
    """The member that has before the step what `rank` has after it; itself, if it has."""
    wanted = block(step.after, rank, mesh)
    return next(m for m in [rank, *members] if block(step.before, m, mesh) == wanted)


def axis_of(step: Step) -> int:
    assert step.dim is not None
    return TENSOR.index(step.dim)


def all_gather(step: Step, parts: Parts) -> Parts:
    return [np.concatenate(parts, axis_of(step))] * len(parts)


def all_reduce(step: Step, parts: Parts) -> Parts:
    return [functools.reduce(JOIN[str(step.op)], parts)] * len(parts)


def reduce_scatter(step: Step, parts: Parts) -> Parts:
    return np.split(all_reduce(step, parts)[0], len(parts), axis_of(step))


def all_to_all(step: Step, parts: Parts) -> Parts:
    sent = [np.split(part, len(parts), TENSOR.index(str(step.to_dim))) for part in parts]
    received = zip(*sent, strict=True)
    return [np.concatenate(blocks, axis_of(step)) for blocks in received]


def zero_fill(step: Step, parts: Parts) -> Parts:
    if step.op in ("max", "min"):
        return parts
    if step.dim is None:
        return [parts[0], *(np.zeros_like(part) for part in parts[1:])]
    found = []
    for index, part in enumerate(parts):
        blocks = [np.zeros_like(part) for _ in parts]
        blocks[index] = part
        found.append(np.concatenate(blocks, axis_of(step)))
    return found


STEPS: dict[str, Callable[[Step, Parts], Parts]] = {
    "all_gather": all_gather,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "zero_fill": zero_fill,
}


def wire(step: Step, local: int, n: int) -> int:
    """Bytes that a device sends, by the formulas of ring algorithms."""
    parts = {
        "all_gather": (n - 1, 1),
        "permute": (1, 1),
        "all_reduce": (2 * (n - 1), n),
        "reduce_scatter": (n - 1, n),
        "all_to_all": (n - 1, n),
    }
    above, below = parts.get(step.kind, (0, 1))
    return math.ceil(above * local / below)


# --- tests ------------------------------------------------------------------------------------


def pairs(op: ReduceOp) -> Iterator[tuple[Placement, Placement]]:
    yield from itertools.product(placements(op), repeat=2)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_every_route_leads_to_the_same_tensor_and_costs_what_it_says(op: ReduceOp) -> None:
    found = list(pairs(op))
    assert len(found) == 18 * 18
    for source, target in found:
        way = route(TENSOR, source, target, SQUARE)
        assert way is not None, f"{source} -> {target}"
        check_route(way, source, target)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: m.name)
def test_routes_on_larger_meshes(mesh: Mesh) -> None:
    every = placements("sum", mesh)
    chosen = random.Random(mesh.name)
    for source, target in [chosen.sample(every, 2) for _ in range(150)]:
        way = route(TENSOR, source, target, mesh)
        assert way is not None, f"{source} -> {target}"
        check_route(way, source, target, mesh)


def check_route(way: Route, source: Placement, target: Placement, mesh: Mesh = SQUARE) -> None:
    parts, total = held(source, mesh), 0
    assert is_held(parts, source, mesh)
    for step in way.steps:
        local = parts[0].size * TENSOR.dtype.bytes
        n = mesh.size(*step.axes)
        assert step.payload(TENSOR, mesh) == local
        assert step.wire(TENSOR, mesh) == wire(step, local, n)
        assert sum(step.by_device(TENSOR, mesh)) == cluster_wire(step, local, mesh)
        total += wire(step, local, n)
        parts = apply(step, parts, mesh)
        assert is_held(parts, step.after, mesh), f"{source} -> {target}: {step}"
    assert is_held(parts, target, mesh)
    assert total == way.wire_bytes


def cluster_wire(step: Step, local: int, mesh: Mesh) -> int:
    """Bytes that all devices send; in a permute those whose block stays send nothing."""
    if step.kind != "permute":
        return wire(step, local, mesh.size(*step.axes)) * mesh.devices
    members = [(r, m) for m in groups(mesh, step.axes) for r in m]
    return local * sum(holder(step, m, rank, mesh) != rank for rank, m in members)


UNEVEN = TensorType((Dim("i", 5), Dim("j", 4)), F32)


@pytest.mark.parametrize("type_", [TENSOR, UNEVEN], ids=["even", "uneven"])
def test_no_route_is_longer_than_one_through_a_third_placement(type_: TensorType) -> None:
    every = placements("sum")
    cost = {(a, b): way.wire_bytes for a, b in pairs("sum") if (way := route(type_, a, b, SQUARE))}
    for a, b, c in itertools.product(every, repeat=3):
        # Axes that are whole at both ends are left alone, so a third placement may use more.
        if set(active(b)) <= {*active(a), *active(c)} and dims(b) <= dims(a) | dims(c):
            assert cost[a, c] <= cost[a, b] + cost[b, c] or b.partial


def active(p: Placement) -> tuple[str, ...]:
    return (*p.partial, *(a for _, axes in p.splits for a in axes))


def dims(p: Placement) -> set[str]:
    return {d for d, _ in p.splits}


def test_a_partial_sum_never_becomes_a_partial_maximum() -> None:
    one = placement(SQUARE, {}, ("x",), "sum")
    other = placement(SQUARE, {}, ("x",), "max")
    way = route(TENSOR, one, other, SQUARE)
    assert way is not None
    assert [step.kind for step in way.steps] == ["all_reduce", "zero_fill"]


LEAST = {
    # From, to: total bytes sent over all four devices, in units of the whole tensor.
    ("x:i y:i", "x:i y:j"): 0.5,
    ("x:i y:j", "x:j y:i"): 0.5,
    ("x:B y:i", "x:i y:i"): 0.5,
    ("x:i y:P", "x:i y:i"): 1.0,
    ("x:P y:i", "x:i y:i"): 1.5,
    ("x:i y:P", "x:i y:B"): 2.0,
    ("x:P y:j", "x:B y:j"): 2.0,
    ("x:i y:j", "x:B y:B"): 3.0,
}


def named(text: str) -> Placement:
    """`x:i y:P` as a placement."""
    splits: dict[str, tuple[str, ...]] = {}
    partial = []
    for part in text.split():
        axis, _, kind = part.partition(":")
        if kind in TENSOR.names:
            splits[kind] = (*splits.get(kind, ()), axis)
        elif kind == "P":
            partial.append(axis)
    return placement(SQUARE, splits, tuple(partial), "sum" if partial else None)


@pytest.mark.parametrize(("source", "target"), LEAST)
def test_two_dimensional_reshards_send_the_least_there_is(source: str, target: str) -> None:
    way = route(TENSOR, named(source), named(target), SQUARE)
    assert way is not None
    total = sum(way.by_device(TENSOR, SQUARE))
    assert total == LEAST[source, target] * TENSOR.bytes
