"""Activity: the values that depend on others in a differentiable way.

(Griewank and Walther 2008, chapter 6: an operator without an active operand needs no adjoint.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from meshdsl.ir.rewrite import Visitor
from meshdsl.named.ir import NamedLoop, NamedOp, Node, Value
from meshdsl.ops.opdef import lookup

NOTHING: Mapping[Value, Value] = MappingProxyType({})


def active(
    nodes: Sequence[Node], seeds: set[Value], originals: Mapping[Value, Value] = NOTHING
) -> set[Value]:
    """Floats that depend on `seeds` in a differentiable way, those inside loops too.

    A rematerialised copy depends on the seeds as its original in `originals` does.
    """
    activity = _Activity(seeds)
    for node in nodes:
        activity.visit(node)
        activity.active.update(v for v in node.makes if originals.get(v) in activity.active)
    return activity.active


def reaching(nodes: Sequence[Node], target: Value) -> set[Value]:
    """Floats that `target` depends on in a differentiable way: `active`, read backwards.

    A gradient that is not written out yet counts as depending on all operands of its `grad`.
    """
    reached = _Reached(target)
    for node in reversed(nodes):
        reached.visit(node)
    return reached.values


def is_differentiable(op: NamedOp) -> bool:
    """Whether the operator has a gradient: its own rule, or those of its definition."""
    opdef = lookup(op.name)
    return opdef.gradient is not None or opdef.composite


class _Activity(Visitor):
    def __init__(self, seeds: Iterable[Value]) -> None:
        self.active = _floats(seeds)

    def op(self, op: NamedOp) -> None:
        if is_differentiable(op) and not self.active.isdisjoint(op.ins):
            self.active |= _floats(op.outs)

    def loop(self, loop: NamedLoop) -> None:
        """Follow iterations until no more of what is carried becomes active."""
        more = {s.inside for s in loop.stacked if s.outer in self.active}
        more |= {c.inside for c in loop.carries if c.init in self.active}
        while True:
            self.active |= more
            for node in loop.body:
                self.visit(node)
            more = {c.inside for c in loop.carries if c.next in self.active} - self.active
            if not more:
                break
        self.active |= {c.result for c in loop.carries if c.next in self.active}
        self.active |= {c.outer for c in loop.collected if c.inside in self.active}


class _Reached(Visitor):
    def __init__(self, target: Value) -> None:
        self.values = _floats((target,))

    def op(self, op: NamedOp) -> None:
        if self.values.isdisjoint(op.outs):
            return
        if op.name == "grad" or is_differentiable(op):
            self.values |= _floats(op.ins)

    def loop(self, loop: NamedLoop) -> None:
        """Follow iterations until no more of what is carried is reached."""
        more = {c.inside for c in loop.collected if c.outer in self.values}
        more |= {c.next for c in loop.carries if c.result in self.values}
        while more:
            self.values |= _floats(more)
            for node in reversed(loop.body):
                self.visit(node)
            more = {c.next for c in loop.carries if c.inside in self.values} - self.values
        self.values |= {c.init for c in loop.carries if c.inside in self.values}
        self.values |= {s.outer for s in loop.stacked if s.inside in self.values}


def _floats(values: Iterable[Value]) -> set[Value]:
    return {v for v in values if v.type.dtype.kind == "float"}
