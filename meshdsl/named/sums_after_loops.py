"""Sums that a backward loop adds up, made after it: one product in place of one for each iteration.

The gradient of a weight that all iterations of a loop share is a sum of products, such as that of a
recurrent cell. Where the loop has every operand in a stack already, a product of the stacks, over
the dim of the loop as well, is the sum. No memory is needed for it that the loop did not need, and
a matrix product is the faster the more it sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.program import every
from meshdsl.ir.rewrite import in_blocks, makers
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.named.over_iterations import addend_of

SUMMING = ("einsum", "sum")
"""The operators that can sum over one more dim."""


def sum_after_loops(program: NamedProgram) -> NamedProgram:
    """The program whose backward loops carry no sums of products of stacks."""
    for node in every(program.body):
        if isinstance(node, NamedLoop) and node.phase == "backward":
            return replace(program, body=in_blocks(program.body, _summed))
    return program


def _summed(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    zeros = {v for v, op in makers(nodes).items() if op.name == "zeros"}
    return tuple(out for n in nodes for out in _parted(n, zeros))


def _parted(node: Node, zeros: set[Value]) -> Iterator[Node]:
    """A loop without such sums, and the operators that make them."""
    if not isinstance(node, NamedLoop) or node.phase != "backward":
        yield node
        return
    stacks = {c.inside: c.outer for c in node.collected} | {s.inside: s.outer for s in node.stacked}
    made = makers(node.body)
    gone: set[Value] = set()
    sums: list[NamedOp] = []
    for carry in node.carries:
        addend = addend_of(node, carry)
        op = None if addend is None else _of_stacks(made.get(addend), node, stacks)
        if op is None or addend is None or _reads(node, addend) != 1:
            continue
        gone.update((addend, carry.next))
        if carry.init in zeros:
            sums.append(replace(op, outs=(carry.result,)))
            continue
        total = replace(carry.next)
        sums.append(replace(op, outs=(total,)))
        ins, outs = (carry.init, total), (carry.result,)
        sums.append(replace(op, name="add", ins=ins, outs=outs, attrs=()))
    yield replace(
        node,
        carries=tuple(c for c in node.carries if c.next not in gone),
        body=tuple(n for n in node.body if gone.isdisjoint(n.makes)),
    )
    yield from sums


def _reads(loop: NamedLoop, value: Value) -> int:
    """How many operands and results of a loop are the value."""
    inside = (v for n in loop.body for v in (*n.reads, *n.ends))
    return sum(v is value for v in (*inside, *loop.ends))


def _of_stacks(op: NamedOp | None, loop: NamedLoop, stacks: dict[Value, Value]) -> NamedOp | None:
    """The operator on stacks in place of slices, summed over the iterations, if there are stacks.

    An operand may also be the same in all iterations. One with the dim of the loop is of none.
    """
    if op is None or op.name not in SUMMING:
        return None
    inside = {*loop.enters, *(v for n in loop.body for v in n.makes)} - stacks.keys()
    ins = tuple(stacks.get(v, v) for v in op.ins)
    is_along = any(v.type.has(loop.dim.name) for v in (*op.ins, op.out))
    if is_along or ins == op.ins or not inside.isdisjoint(op.ins):
        return None
    dims = op.attr("dims") if op.name == "einsum" else (*op.attr("dims"), loop.dim)
    attrs = tuple((k, dims if k == "dims" else v) for k, v in op.attrs)
    return replace(op, ins=ins, attrs=attrs, block=None)
