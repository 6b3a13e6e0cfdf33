"""Aliases: variables that may share memory, and those overwritten while others still show them.

Every text of an operator, a collective or a support function may assume of memory:

- A variable may be any view: its dims permuted, with gaps between elements and before the first,
  and after a broadcast with many elements in one place. Its values alone count.
- A result has memory of its own, in which no two elements share a place, unless the record of its
  operator says that it may show operand 0 (`OpDef.shows_operand`).
- Only dead variables are written to. Texts `in_place`, and an all_reduce in place, get an operand
  whose memory is its own, all of it; its dims may still be permuted, with gaps between. So does a
  parameter that `:=` assigns, written `onto`, and what is returned of it is copied. An operand
  that an operator `overwrites` is copied first where anything else shows it (`copied_first`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from meshdsl.device.ir import (
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    StageRows,
    Var,
    written_into,
)
from meshdsl.device.liveness import kept_after, overwrites, shows_operand
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import reads_of
from meshdsl.ops.opdef import lookup


def shared(program: DeviceProgram) -> Mapping[Var, Var]:
    """The representative of each variable among all that may show the same memory.

    Views, slices, carries, slices that are listed or written directly to their stack, values filled
    up with zeros on some devices only, and results of operators that overwrite. A variable that is
    missing has memory of its own.
    """
    roots: dict[Var, Var] = {}
    for node in every(program.body):
        for one, other in _pairs(node):
            one, other = _root(roots, one), _root(roots, other)
            if one is not other:
                roots[other] = one
    return {var: _root(roots, var) for var in roots}


def _root(found: Mapping[Var, Var], var: Var) -> Var:
    while var in found:
        var = found[var]
    return var


def _pairs(node: Node) -> Iterator[tuple[Var, Var]]:
    """Pairs of variables that may show the same memory after `node`."""
    yield from ((into, result) for result, into in written_into(node).items())
    match node:
        case Compute():
            yield from _of_operator(node)
        case Move() if not node.step.moves:
            yield node.source, node.target
        case DeviceLoop():
            yield from ((s.outer, s.inside) for s in node.slices)
            rows = (s for s in node.stacked if isinstance(s, StageRows))
            yield from ((s.other, s.inside) for s in rows if s.other is not None)
            for carry in node.carries:
                yield from ((carry.init, other) for other in (carry.inside, carry.next))
                yield carry.init, carry.result
            yield from ((c.inside, c.outer) for c in node.collected if c.is_list)
            yield from node.in_slices.items()
            yield from ((c.stack, c.outer) for c in node.collected if c.stack is not None)


def _of_operator(node: Compute) -> Iterator[tuple[Var, Var]]:
    if shows_operand(node):
        yield from ((node.ins[0], out) for out in node.outs)
    yield from zip((node.ins[i] for i in overwrites(node)), node.outs, strict=False)


def copied_first(program: DeviceProgram) -> frozenset[Var]:
    """The variables that an operator overwrites while a live variable shows them.

    That is another operand of it, or one made before and read later, by outputs too.
    """
    nodes = tuple(enumerate(every(program.body)))
    # What a loop makes is there behind the last statement of its body.
    made_at = {v: at + sum(1 for _ in every((node,))) - 1 for at, node in nodes for v in node.makes}
    last_read = {v: at for at, node in nodes for v in reads_of(node)}
    last_read |= dict.fromkeys(kept_after(program), len(nodes))
    owners = shared(program)
    showing: dict[Var, list[Var]] = {}
    for var in last_read:
        showing.setdefault(owners.get(var, var), []).append(var)

    def is_shown(at: int, reads: Counter[Var], var: Var) -> bool:
        return any(
            reads[other] > (other is var) or made_at.get(other, -1) < at < last_read[other]
            for other in showing[owners.get(var, var)]
        )

    return frozenset(
        var
        for at, node in nodes
        if isinstance(node, Compute)
        for reads in (Counter(node.ins),)
        for var in (node.ins[index] for index in lookup(node.name).overwritten(len(node.ins)))
        if is_shown(at, reads, var)
    )
