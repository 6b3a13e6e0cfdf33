"""Resharding: the steps from one placement to another that send the fewest bytes.

Dijkstra over placements. An edge is one collective over one axis or over the product of several, or
a step that stays on the device. Cost: wire bytes per device, then collectives, then steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshdsl.named.ir import TensorType
from meshdsl.placed import collectives as c
from meshdsl.placed.sbp import Mesh, Placement

Cost = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one placement to another, and what they send per device."""

    steps: tuple[c.Step, ...]
    wire_bytes: int

    @property
    def collectives(self) -> int:
        """How many of the steps send anything."""
        return sum(step.moves for step in self.steps)

    @property
    def reduces(self) -> bool:
        """Whether a partial value is reduced on the way."""
        return any(step.kind in ("all_reduce", "reduce_scatter") for step in self.steps)


@functools.lru_cache(maxsize=65536)
def route(
    type_: TensorType, source: Placement, target: Placement, mesh: Mesh, scatter: bool = True
) -> Route | None:
    """The cheapest route, or None when there is none (a partial sum cannot become a partial max).

    Axes that are `B` at both ends are left alone. Without `scatter` there is no reduce_scatter.
    """
    if source == target:
        return Route((), 0)
    best: dict[Placement, Cost] = {source: (0, 0, 0)}
    came: dict[Placement, c.Step] = {}
    order = itertools.count()
    queue: list[tuple[Cost, int, Placement]] = [((0, 0, 0), next(order), source)]
    space = _Space(type_, source, target, mesh, scatter)
    while queue:
        cost, _, here = heapq.heappop(queue)
        if here == target:
            return Route(_steps(came, source, target), cost[0])
        if cost > best[here]:
            continue
        for step in space.steps(here):
            wire = step.wire(type_, mesh)
            there = (cost[0] + wire, cost[1] + step.moves, cost[2] + 1)
            if step.after not in best or there < best[step.after]:
                best[step.after] = there
                came[step.after] = step
                heapq.heappush(queue, (there, next(order), step.after))
    return None


def _steps(
    came: dict[Placement, c.Step], source: Placement, target: Placement
) -> tuple[c.Step, ...]:
    found = []
    while target != source:
        found.append(came[target])
        target = came[target].before
    return _merged_slices(found[::-1])


def _merged_slices(steps: list[c.Step]) -> tuple[c.Step, ...]:
    """Slices of one dim that follow each other as one slice over all their axes, outer first."""
    found: list[c.Step] = []
    for step in steps:
        last = found[-1] if found else None
        if last is not None and last.kind == step.kind == "slice" and last.dim == step.dim:
            found[-1] = replace(last, axes=last.axes + step.axes, after=step.after)
        else:
            found.append(step)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Space:
    """The steps worth taking between two placements."""

    type_: TensorType
    source: Placement
    target: Placement
    mesh: Mesh
    scatter: bool

    def steps(self, p: Placement) -> Iterator[c.Step]:
        yield from self._local_steps(p)
        for dim, axes in p.splits:
            for suffix in self._suffixes(axes):
                yield c.all_gather(self.mesh, p, dim, suffix)
                for other in self._dims:
                    if other != dim and self._divides(p, other, suffix):
                        yield c.all_to_all(self.mesh, p, dim, other, suffix)
        yield from self._permutes(p)
        for axes in _subsets(p.partial):
            if not set(axes) <= set(self.target.partial) or p.op != self.target.op:
                yield c.all_reduce(self.mesh, p, axes)
                for dim in self._dims if self.scatter else ():
                    if self._divides(p, dim, axes):
                        yield c.reduce_scatter(self.mesh, p, dim, axes)

    def _permutes(self, p: Placement) -> Iterator[c.Step]:
        """Another order of the axes of one dim; two axes of one size in each other's place."""
        splits = dict(p.splits)
        for dim, axes in p.splits:
            for order in itertools.permutations(axes):
                if order != axes:
                    yield c.permute(self.mesh, p, splits | {dim: order})
        for a, b in itertools.combinations(self._active, 2):
            split = any(a in axes or b in axes for axes in splits.values())
            free = a not in p.partial and b not in p.partial
            together = any(a in axes and b in axes for axes in splits.values())
            if split and free and not together and self.mesh.size(a) == self.mesh.size(b):
                swap = {a: b, b: a}
                turned = {d: tuple(swap.get(x, x) for x in axes) for d, axes in p.splits}
                yield c.permute(self.mesh, p, turned)

    def _local_steps(self, p: Placement) -> Iterator[c.Step]:
        for axis in self._active:
            if axis in p.partial:
                continue
            inner = next((d for d, axes in p.splits if axes[-1] == axis), None)
            whole = not any(axis in axes for _, axes in p.splits)
            if whole:
                for dim in self._dims:
                    if self._divides(p, dim, (axis,)):
                        yield c.slice_(self.mesh, p, dim, axis)
            if axis in self.target.partial and p.op in (None, self.target.op):
                yield from self._fills(p, axis, inner, whole)

    def _fills(self, p: Placement, axis: str, inner: str | None, whole: bool) -> Iterator[c.Step]:
        op = self.target.op
        assert op is not None
        if whole and op != "prod":
            yield c.zero_fill(self.mesh, p, axis, op, None)
        elif inner is not None and op == "sum":
            yield c.zero_fill(self.mesh, p, axis, op, inner)

    @property
    def _dims(self) -> tuple[str, ...]:
        """Dims worth splitting: those split at one end; any, where partial values come or go."""
        if self.target.partial != self.source.partial:
            return self.type_.names
        return tuple(dict.fromkeys(d for d, _ in (*self.source.splits, *self.target.splits)))

    @property
    def _active(self) -> tuple[str, ...]:
        """Axes that are not `B` at both ends."""
        used = {a for p in (self.source, self.target) for _, axes in p.splits for a in axes}
        return self.mesh.sorted(used | set(self.source.partial) | set(self.target.partial))

    def _suffixes(self, axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Innermost axes of a split, as far as they follow each other in mesh order."""
        for start in range(len(axes) - 1, -1, -1):
            suffix = axes[start:]
            if suffix != self.mesh.sorted(set(suffix)):
                return
            yield suffix

    def _divides(self, p: Placement, dim: str, axes: tuple[str, ...]) -> bool:
        return self.type_.size(dim) % self.mesh.size(*p.axes_of(dim), *axes) == 0


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(len(axes), 0, -1):
        yield from itertools.combinations(axes, size)
