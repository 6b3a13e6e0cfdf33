"""What the blocks of one backward pass share: what is collected, copied and saved for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshdsl.ir.program import Collected, Origin
from meshdsl.ir.rewrite import Rebuild
from meshdsl.named.builder import NO_FIELDS, Builder
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedLoop, NamedOp, Node, Value
from meshdsl.ops.opdef import lookup


class Tape:
    """State shared by the blocks of one backward pass.

    `inside` has the composite's result for each value of its definition, which the program does not
    have.
    """

    def __init__(self, builder: Builder, active: set[Value], wrt: frozenset[Value]) -> None:
        self.builder, self.active, self.wrt = builder, active, wrt
        self.numbers: dict[Value, float] = {}
        self.collected: dict[NamedLoop, dict[Value, Value]] = {}
        self.twins: dict[NamedLoop, NamedLoop] = {}
        self.again: dict[Value, Value] = {}
        self.inside: dict[Value, Value] = {}

    def origin(self, value: Value, is_copy: bool = False) -> Origin:
        """The origin of what is made for the gradient of a value, or to have it once more."""
        return Origin(self.inside.get(value, value), is_copy)

    def emitter(self, at: Value, target: Value | None = None) -> Emit:
        """What emits for the gradient of `at`, at its place in the source.

        Results are the gradient of `target`, where given.
        """
        fields = NO_FIELDS if target is None else target.as_gradient
        return Emit(self.builder, at.span, at, fields, self.origin(at), numbers=self.numbers)

    def collect(self, loop: NamedLoop, value: Value, depth: int) -> Value:
        """All iterations' `value` of a forward loop, as a tensor outside it, `depth` loops deep.

        A value that is collected anyway, as for an earlier gradient or by another name, is not
        stored twice.
        """
        loop = self.twins.get(loop, loop)
        collections = self.collected.setdefault(loop, _collections(loop))
        if value not in collections:
            collections[value] = value.alike(type=value.type.along(loop.dim))
        self.builder.place(collections[value], depth)
        return collections[value]

    def with_collected(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """`nodes` with the loops that collect the requested values."""
        return _Collecting(self.collected).nodes(nodes)


class _Collecting(Rebuild):
    """Loops that collect more: by loop, the values inside with those that have all iterations."""

    def __init__(self, collected: Mapping[NamedLoop, Mapping[Value, Value]]) -> None:
        super().__init__()
        self.collected = collected

    def op(self, op: NamedOp) -> tuple[NamedOp]:
        return (op,)

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        there = {c.outer for c in loop.collected}
        collections = self.collected.get(loop, {}).items()
        more = (Collected(inside, outer) for inside, outer in collections if outer not in there)
        collected = (*loop.collected, *more)
        return (replace(loop, body=self.nodes(loop.body), collected=collected),)


def _collections(loop: NamedLoop) -> dict[Value, Value]:
    """What a loop collects, by the value in an iteration; a copy of a value stands for it too."""
    collections = {c.inside: c.outer for c in loop.collected}
    for op in reversed(loop.body):
        if isinstance(op, NamedOp) and op.name == "identity" and op.out in collections:
            collections.setdefault(op.ins[0], collections[op.out])
    return collections


def saving(
    builder: Builder, nodes: tuple[Node, ...], alive: set[Value], depth: int
) -> tuple[Node, ...]:
    """`nodes` with operators in `alive` that also yield what their gradients read (`saving`)."""
    return _Saving(builder, alive, depth).nodes(nodes)


class _Saving(Rebuild):
    def __init__(self, builder: Builder, alive: set[Value], depth: int) -> None:
        super().__init__()
        self.builder, self.alive, self.depth = builder, alive, depth

    def op(self, op: NamedOp) -> tuple[NamedOp]:
        name = lookup(op.name).saving
        if name is None or self.alive.isdisjoint(op.outs):
            return (op,)
        saved = _saving(op, name)
        for value in saved.outs[1:]:
            self.builder.place(value, self.depth)
            self.alive.add(value)
        return (saved,)

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        inside = _Saving(self.builder, self.alive, self.depth + 1)
        return (replace(loop, body=inside.nodes(loop.body)),)


def _saving(op: NamedOp, name: str) -> NamedOp:
    (_, *types) = lookup(name).infer(tuple(v.type for v in op.ins), dict(op.attrs))
    plain: dict[str, Any] = {"name": None, "pins": (), "rules_from": None, "declared": None}
    saved = zip(types, lookup(name).saved, strict=True)
    values = (replace(op.out, type=type_, name_hint=hint, **plain) for type_, hint in saved)
    return replace(op, name=name, outs=(op.out, *values))
