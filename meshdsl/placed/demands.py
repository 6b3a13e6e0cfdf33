"""What a layout or an `sbp` block demands of the values of a program, for the search for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.placed.layout import Layout
from meshdsl.placed.sbp import Mesh, Placement, placement

Pins = tuple[Placement | None, ...]


class Demands(Protocol):
    """Who asks for placements. `known` are the pairs (dim, axis) that some rule splits so."""

    mesh: Mesh
    known: frozenset[tuple[str, str]]

    def ruled(self, value: Value) -> Placement:
        """What is demanded of a value where it is made; on other axes it is free."""

    def stored(self, value: Value) -> Placement:
        """How a parameter or a state is kept, and its new value after it."""

    def is_settled(self, value: Value) -> bool:
        """Whether a value is to be just as it is ruled, on all axes."""

    def is_known(self, value: Value) -> bool:
        """Whether `ruled` tells along which dims a value is split wherever it is read."""

    def may_split(self, value: Value) -> tuple[str, ...]:
        """The dims of a value that may be split on axes no rule speaks of."""

    def summed(self, value: Value, op: Op) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """How rules split dims that a result of `op` has no more: those it reduces."""

    def waits(self, value: Value) -> bool:
        """Whether a value is a gradient that stays as it came about until the update asks."""

    def pins(self, op: Op) -> Pins:
        """Placements in which single operands of `op` must be read."""

    def output(self, value: Value) -> Placement:
        """How a returned value is left."""


class RuleDemands:
    """The demands of a layout: rules bind what has their dim."""

    def __init__(self, layout: Layout, program: named.Program) -> None:
        self.layout, self.mesh = layout, layout.mesh
        self.returned = {o.value for o in program.outputs}
        rules = (*layout.rules, *layout.extra.values())
        self.known = frozenset((rule.dim, axis) for rule in rules for axis in rule.axes)
        self._ruled: dict[Value, Placement] = {}

    def ruled(self, value: Value) -> Placement:
        """See `Demands`."""
        if value not in self._ruled:
            binding = self.layout.demand(value, value in self.returned)
            self._ruled[value] = binding.placement(self.mesh)
        return self._ruled[value]

    def stored(self, value: Value) -> Placement:
        """As it is ruled."""
        return self.ruled(value)

    def is_settled(self, value: Value) -> bool:
        """Parameters and what is returned have no freedom."""
        return value in self.returned or value.role == "param"

    def is_known(self, value: Value) -> bool:
        """Rules bind every value."""
        return True

    def may_split(self, value: Value) -> tuple[str, ...]:
        """A rule to `none` speaks of every axis."""
        causes = self.layout.bind(value).causes
        return tuple(d for d in value.type.names if d not in causes or causes[d].axes)

    def summed(self, value: Value, op: Op) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """See `Layout.summed`."""
        return self.layout.summed(value, op)

    def waits(self, value: Value) -> bool:
        """Gradients that are neither stored nor returned wait."""
        return value.role == "grad" and not self.layout.is_stored(value, value in self.returned)

    def pins(self, op: Op) -> Pins:
        """Rules do not tell readers apart."""
        return (None,) * len(op.ins)

    def output(self, value: Value) -> Placement:
        """As it is ruled."""
        return self.ruled(value)


class BlockDemands:
    """The demands of an `sbp` block: a tensor is just as annotated, or free on every axis.

    Inputs, parameters and states without an annotation are whole. `annotated` gives the placement
    of a value that has one, `pins` those for single readers, `returned` where the outputs lie:
    when to reduce does not change what is returned.
    """

    def __init__(
        self,
        layout: Layout,
        program: named.Program,
        annotated: Callable[[Value], Placement | None],
        pins: Callable[[Op], Pins],
        returned: Mapping[Value, Placement],
    ) -> None:
        self.mesh, self.rules = layout.mesh, RuleDemands(layout, program)
        self._of_block, self._pins, self.returned = annotated, pins, returned
        self.slices: dict[Value, Placement] = {}
        self._slice(program.body)
        ruled = [self.ruled(v) for v in _values(program)]
        ruled += [p for op in named.walk(program.body) for p in pins(op) if p is not None]
        splits = {(d, a) for p in ruled for d, axes in p.splits for a in axes}
        self.known = self.rules.known | splits

    def _slice(self, nodes: tuple[named.Node, ...]) -> None:
        """A slice of a stack is split as the stack is: positions count the dims of the stack."""
        for node in nodes:
            if isinstance(node, named.Loop):
                for item in node.stacked:
                    outer = self.ruled(item.outer)
                    self.slices[item.inside] = outer.without_dim(node.dim.name)
                self._slice(node.body)

    def ruled(self, value: Value) -> Placement:
        """See `Demands`."""
        if value in self.slices:
            return self.slices[value]
        found = self._annotated(value)
        return self.rules.ruled(value) if found is None else found

    def stored(self, value: Value) -> Placement:
        """What is read in parts is stored whole."""
        return placement(self.mesh, dict(self.ruled(value).splits))

    def _annotated(self, value: Value) -> Placement | None:
        return None if value in self.slices else self._of_block(value)

    def is_settled(self, value: Value) -> bool:
        """What is annotated or returned has no freedom."""
        return value in self.returned or self._annotated(value) is not None

    def is_known(self, value: Value) -> bool:
        """What is stored, annotated, or a slice of it."""
        stored = value.role in ("param", "state", "input")
        return stored or value in self.slices or self._annotated(value) is not None

    def may_split(self, value: Value) -> tuple[str, ...]:
        """Every dim."""
        return value.type.names

    def summed(self, value: Value, op: Op) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """A block says nothing of what is summed."""
        return ()

    def waits(self, value: Value) -> bool:
        """See `Demands`."""
        return self.rules.waits(value)

    def pins(self, op: Op) -> Pins:
        """What the block says of single readers."""
        return self._pins(op)

    def output(self, value: Value) -> Placement:
        """As the walk left it."""
        return self.returned[value]


def _values(program: named.Program) -> list[Value]:
    made = [v for op in named.walk(program.body) for v in op.outs]
    return [*program.inputs, *(p.value for p in program.params), *made]
