"""Routes known without a search, and what no route can go below.

With both, the search for the cheapest route (`reshard.py`) looks at few placements however many
axes a mesh has: nothing dearer than a route that is known, as far as the bound tells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.types import TensorType
from meshdsl.placed import collectives as c
from meshdsl.placed.placements import Mesh, Placement, placement

Steps = tuple[c.Step, ...]


def least_bytes(
    type_: TensorType, here: Placement, goal: Placement, mesh: Mesh, devices: int, uneven: bool
) -> int:
    """Bytes that a device sends on any route from one placement to another, at least.

    `devices` are those along the axes that are not whole at both ends. Every element of a sum of n
    parts is received n - 1 times before one device has it, and once more by each other that has it
    in the end. Of a block that is not partial, a device receives what it does not have.
    """
    ours, its = parts(here, mesh), parts(goal, mesh)
    still_partial = goal.partial if here.op == goal.op else ()
    summed = mesh.size(*(a for a in here.partial if a not in still_partial))
    if summed > 1:
        others = 0 if goal.partial else devices // its - 1
        return -(-type_.bytes * (summed - 1 + others) // devices)
    if here.partial or goal.partial:
        return 0
    if uneven:
        return max(-(-type_.bytes * (devices // its - devices // ours) // devices), 0)
    return type_.bytes // its - _in_both(type_.bytes, here, goal, mesh)


def parts(p: Placement, mesh: Mesh) -> int:
    """The number of blocks of a tensor."""
    return mesh.size(*(a for _, axes in p.splits for a in axes))


def _in_both(whole: int, here: Placement, goal: Placement, mesh: Mesh) -> int:
    """The bytes of a block that a device has already: of the device that has least."""
    for dim in {d for d, _ in (*here.splits, *goal.splits)}:
        ours, its = here.axes_of(dim), goal.axes_of(dim)
        prefix = common(ours, its)
        if len(ours) > prefix and len(its) > prefix:
            return 0  # other axes number the blocks: of two devices, they lie apart
        whole //= mesh.size(*max(ours, its, key=len))
    return whole


def common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many axes two splits begin with alike."""
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


# --- without a search ------------------------------------------------------------------------


def plain(source: Placement, goal: Placement, mesh: Mesh) -> Steps | None:
    """Reduce, gather what is split otherwise, and keep the part that is asked for.

    None where that makes no such partial value.
    """
    steps: list[c.Step] = []
    here = source

    def take(step: c.Step) -> None:
        nonlocal here
        steps.append(step)
        here = step.after

    still_partial = goal.partial if source.op == goal.op else ()
    summed = tuple(a for a in source.partial if a not in still_partial)
    if summed:
        take(c.all_reduce(mesh, here, summed))
    for dim, axes in source.splits:
        prefix = common(axes, goal.axes_of(dim))
        while len(left := here.axes_of(dim)) > prefix:
            take(c.all_gather(mesh, here, dim, _in_mesh_order(left[prefix:], mesh)))
    filled = [a for a in goal.partial if a not in here.partial]
    if filled and (goal.op is None or goal.op == "prod"):
        return None
    for axis in filled:
        assert goal.op is not None
        take(c.zero_fill(mesh, here, axis, goal.op, None))
    for dim, axes in goal.splits:
        for axis in axes[len(here.axes_of(dim)) :]:
            take(c.slice_(mesh, here, dim, (axis,)))
    return tuple(steps) if here == goal else None


def _in_mesh_order(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """The innermost of some axes, as far as they follow each other in mesh order."""
    starts = (i for i in range(len(axes)) if axes[i:] == mesh.sorted(set(axes[i:])))
    return axes[next(starts) :]


def turned(source: Placement, goal: Placement, mesh: Mesh) -> Steps | None:
    """The same blocks on other devices; None where the blocks are others."""
    if source.partial != goal.partial or source.op != goal.op:
        return None
    ours, its = dict(source.splits), dict(goal.splits)
    alike = ours.keys() == its.keys()
    sizes = ([mesh.size(a) for a in axes] for dim in ours for axes in (ours[dim],))
    if not alike or list(sizes) != [[mesh.size(a) for a in its[dim]] for dim in ours]:
        return None
    return (c.permute(mesh, source, its),)


# --- axes that go together -------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 12)
def joined(source: Placement, goal: Placement, axes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Groups of axes that follow each other at both ends, by the name of the first.

    A group acts as one axis of their product: whatever a step does over that, it does over them.
    """
    groups: list[list[str]] = []
    for axis in axes:
        if groups and all(_follow(groups[-1][-1], axis, p) for p in (source, goal)):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return {group[0]: tuple(group) for group in groups}


def _follow(outer: str, inner: str, p: Placement) -> bool:
    """Whether one axis follows another in the same dim, or both are partial, or both whole."""
    for _, axes in p.splits:
        if outer in axes or inner in axes:
            return (outer, inner) in itertools.pairwise(axes)
    return (outer in p.partial) == (inner in p.partial)


def joined_mesh(groups: dict[str, tuple[str, ...]], mesh: Mesh) -> Mesh:
    """The mesh with an axis for each group."""
    return Mesh(mesh.name, tuple((name, mesh.size(*axes)) for name, axes in groups.items()))


def on_joined(p: Placement, groups: dict[str, tuple[str, ...]], mesh: Mesh) -> Placement:
    """A placement with an axis for each group."""
    splits = {d: tuple(a for a in axes if a in groups) for d, axes in p.splits}
    return placement(mesh, splits, tuple(a for a in p.partial if a in groups), p.op)


def apart(steps: Steps, groups: dict[str, tuple[str, ...]], mesh: Mesh) -> Iterator[c.Step]:
    """Steps on groups as steps on their axes."""

    def each(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for name in axes for a in groups[name])

    def own(p: Placement) -> Placement:
        return placement(mesh, {d: each(axes) for d, axes in p.splits}, each(p.partial), p.op)

    here: Placement | None = None
    for step in steps:
        before, after = here or own(step.before), own(step.after)
        if step.kind in ("zero_fill", "slice"):
            yield from _local(step, before, each(step.axes), mesh)
        else:
            yield replace(step, axes=each(step.axes), before=before, after=after)
        here = after


def _local(step: c.Step, here: Placement, axes: tuple[str, ...], mesh: Mesh) -> Iterator[c.Step]:
    """A local step over one axis after the other, as a search takes it."""
    for axis in axes if step.kind == "slice" else reversed(axes):
        if step.kind == "slice":
            assert step.dim is not None
            local_step = c.slice_(mesh, here, step.dim, (axis,))
        else:
            assert step.after.op is not None
            local_step = c.zero_fill(mesh, here, axis, step.after.op, step.dim)
        here = local_step.after
        yield local_step
