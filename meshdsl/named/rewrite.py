"""Replacing values throughout a block of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshdsl.named.ir import Carry, Collected, Node, Op, Repeat, Stacked, Value


def substitute(nodes: Sequence[Node], new: Mapping[Value, Value]) -> list[Node]:
    """`nodes` with every mention of a value in `new`, its definition included, replaced."""
    return [_loop(n, new) if isinstance(n, Repeat) else _op(n, new) for n in nodes]


def _op(op: Op, new: Mapping[Value, Value]) -> Op:
    if new.keys().isdisjoint((*op.ins, *op.outs)):
        return op
    ins, outs = (tuple(new.get(v, v) for v in vs) for vs in (op.ins, op.outs))
    return replace(op, ins=ins, outs=outs)


def _loop(loop: Repeat, new: Mapping[Value, Value]) -> Repeat:
    def of(*values: Value) -> tuple[Value, ...]:
        return tuple(new.get(v, v) for v in values)

    return replace(
        loop,
        carries=tuple(Carry(*of(c.init, c.inside, c.next, c.result)) for c in loop.carries),
        stacked=tuple(Stacked(*of(s.outer, s.inside)) for s in loop.stacked),
        collected=tuple(Collected(*of(c.inside, c.outer)) for c in loop.collected),
        body=tuple(substitute(loop.body, new)),
    )
