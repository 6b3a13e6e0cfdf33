"""Where a value may settle in the search for the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from meshdsl.named.ir import TensorType, Value
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.layout import Layout
from meshdsl.placed.sbp import Component, Partial, Placement, Split, placement

MOST_PLACEMENTS = 40
"""Placements of one value that are considered; where there are more, splits are left out."""


class Targets:
    """What rules demand, and on free axes whole, partial, or split along a dim that divides.

    `axes` are those that the search is about, `ops` those of partial values that arise; `sliced`
    tells along which dims loops slice a value: these stay whole. When `narrow`, splits are only
    those that some rule knows.
    """

    def __init__(
        self,
        layout: Layout,
        axes: tuple[str, ...],
        ops: set[ReduceOp],
        narrow: bool,
        sliced: Mapping[Value, set[str]],
    ) -> None:
        self.layout, self.mesh, self.axes = layout, layout.mesh, axes
        self.ops, self.narrow, self.sliced = ops, narrow, sliced
        self.known = {(rule.dim, axis) for rule in layout.rules for axis in rule.axes}

    def of(self, value: Value, base: Placement, yields: list[Placement]) -> list[Placement]:
        """The placements of a value that rules hold to `base` and that is made as `yields`."""
        free = [a for a in self.axes if all(a not in axes for _, axes in base.splits)]
        ops: set[ReduceOp] = {p.op for p in yields if p.op} or {"sum"}
        causes = self.layout.bind(value).causes
        # A rule to `none` speaks of every axis.
        loops = self.sliced.get(value, ())
        names = [d for d in value.type.names if d not in loops]
        splits = [Split(d) for d in names if d not in causes or causes[d].axes]
        found = list(dict.fromkeys(self._completed(value.type, base, free, ops, splits)))
        if len(found) > MOST_PLACEMENTS:
            found = list(self._completed(value.type, base, free, ops, []))
        return found

    def _completed(
        self,
        type_: TensorType,
        base: Placement,
        free: list[str],
        ops: set[ReduceOp],
        splits: list[Split],
    ) -> Iterator[Placement]:
        for op in sorted(ops):
            choices = [self._along(axis, op, splits) for axis in free]
            for picked in itertools.product(*choices):
                made = self._with(type_, base, dict(zip(free, picked, strict=True)), op)
                if made is not None:
                    yield made

    def _along(self, axis: str, op: ReduceOp, splits: list[Split]) -> list[Component | None]:
        """What a value may be along a free axis."""
        known = [s for s in splits if not self.narrow or (s.dim, axis) in self.known]
        return [None, Partial(op), *known]

    def _with(
        self, type_: TensorType, base: Placement, picked: dict[str, Component | None], op: ReduceOp
    ) -> Placement | None:
        splits = dict(base.splits)
        for axis, component in picked.items():
            if isinstance(component, Split):
                splits[component.dim] = (*splits.get(component.dim, ()), axis)
        partial = tuple(a for a, c in picked.items() if isinstance(c, Partial))
        if any(type_.size(d) % self.mesh.size(*axes) for d, axes in splits.items()):
            return None
        return placement(self.mesh, splits, partial, op)
