"""A loop that carries nothing but sums as operators on all of its iterations at once.

Dims have names, so an operator on slices of stacks is the same operator on the stacks: the dim of
the loop is one more that it goes along. What iterations add to a sum is summed over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshdsl.ir.program import Carry
from meshdsl.ir.rewrite import reads_of, substitute
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, Value
from meshdsl.ops.opdef import OpError, Signature, lookup


def at_once(loop: NamedLoop) -> tuple[NamedOp, ...] | None:
    """The operators that make what a loop collects; None where it has to go step by step."""
    sums = [(c, addend) for c in loop.carries if (addend := addend_of(loop, c)) is not None]
    if len(sums) < len(loop.carries):
        return None
    totals = {carry.next for carry, _ in sums}
    stacks = {s.inside: s.outer for s in loop.stacked}
    ops: list[NamedOp] = []
    for node in loop.body:
        if isinstance(node, NamedOp) and node.outs[0] in totals:
            continue
        op = _widened(node, stacks, loop.dim) if isinstance(node, NamedOp) else None
        if op is None:
            return None
        if op is not node:
            stacks.update(zip(node.makes, op.outs, strict=True))
        ops.append(op)
    ops += [_collected(c.inside, c.outer, stacks, loop) for c in loop.collected]
    for carry, addend in sums:
        ops += _sum(carry, addend, stacks, loop)
    return substitute(ops, {}, origins=stacks)


def addend_of(loop: NamedLoop, carry: Carry[Value]) -> Value | None:
    """What each iteration adds to a carry that nothing else reads; None of another one."""
    readers = [n for n in loop.body if carry.inside in reads_of(n) or carry.next in reads_of(n)]
    if len(readers) != 1 or carry.inside in loop.ends:
        return None
    (add,) = readers
    if not isinstance(add, NamedOp) or add.name != "add" or add.out is not carry.next:
        return None
    if loop.ends.count(carry.next) > 1 or add.ins.count(carry.inside) != 1:
        return None
    (addend,) = (v for v in add.ins if v is not carry.inside)
    return addend if addend.type == carry.next.type else None


def _sum(
    carry: Carry[Value], addend: Value, stacks: dict[Value, Value], loop: NamedLoop
) -> tuple[NamedOp, ...]:
    """The operators that add up the addends of all iterations to a carry."""
    about: tuple[Any, ...] = (loop.span, loop.phase)
    stack, total = replace(carry.next, type=addend.type.along(loop.dim)), replace(carry.next)
    return (
        _collected(addend, stack, stacks, loop),
        NamedOp("sum", (stack,), (total,), (("dims", (loop.dim,)),), *about),
        NamedOp("add", (carry.init, total), (carry.result,), (), *about),
    )


def _collected(inside: Value, outer: Value, stacks: dict[Value, Value], loop: NamedLoop) -> NamedOp:
    """The operator that makes a collected value of the value of all iterations."""
    source = stacks.get(inside, inside)
    about: tuple[Any, ...] = (loop.span, loop.phase)
    if source.type.dims == outer.type.dims:
        return NamedOp("identity", (source,), (outer,), (), *about)
    name = "transpose" if inside in stacks else "broadcast"
    return NamedOp(name, (source,), (outer,), (("dims", outer.type.dims),), *about)


def _widened(op: NamedOp, stacks: dict[Value, Value], dim: Dim) -> NamedOp | None:
    """An operator on stacks in place of slices; None where it does not go along the dim."""
    ins = tuple(stacks.get(v, v) for v in op.ins)
    if ins == op.ins:
        return op
    if lookup(op.name).surface.seeded:
        return None
    for attrs in _attrs(op, dim):
        outs = _types(op, ins, attrs)
        if outs is not None and _goes_along(op, ins, outs, attrs, dim):
            values = tuple(replace(v, type=t) for v, t in zip(op.outs, outs, strict=True))
            return replace(op, ins=ins, outs=values, attrs=attrs)
    return None


def _attrs(op: NamedOp, dim: Dim) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The attributes as they are, and with one more dim of the result."""
    yield op.attrs
    dims = op.outs[0].type.dims
    yield tuple((k, (dim, *v)) if k == "dims" and v == dims else (k, v) for k, v in op.attrs)


def _types(
    op: NamedOp, ins: tuple[Value, ...], attrs: tuple[tuple[str, Any], ...]
) -> tuple[TensorType, ...] | None:
    try:
        return lookup(op.name).infer(tuple(v.type for v in ins), dict(attrs))
    except OpError:
        return None


def _goes_along(
    op: NamedOp,
    ins: tuple[Value, ...],
    outs: tuple[TensorType, ...],
    attrs: tuple[tuple[str, Any], ...],
    dim: Dim,
) -> bool:
    """Whether the results are those of each iteration, along the dim."""
    if any({*t.names} != {*v.type.names, dim.name} for t, v in zip(outs, op.outs, strict=True)):
        return False
    sig = Signature(tuple(v.type for v in ins), outs, dict(attrs))
    return lookup(op.name).is_alike_along(dim.name, sig)
