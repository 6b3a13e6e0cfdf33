"""Which values of a program depend on which: what a backward pass has to visit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshdsl.named.ir import Node, Op, Repeat, Value, results, walk
from meshdsl.ops.opdef import lookup

NOTHING: Mapping[Value, Value] = MappingProxyType({})


def active(
    nodes: Sequence[Node], seeds: set[Value], originals: Mapping[Value, Value] = NOTHING
) -> set[Value]:
    """Floats that depend on `seeds` in a differentiable way, those inside loops too.

    A copy that was made for a backward pass depends on what its original in `originals` does.
    """
    found = {v for v in seeds if v.type.dtype.kind == "float"}
    for node in nodes:
        if isinstance(node, Repeat):
            found |= _active_loop(node, found)
        elif is_differentiable(node) and not found.isdisjoint(node.ins):
            found.update(v for v in node.outs if v.type.dtype.kind == "float")
        found.update(v for v in results(node) if originals.get(v) in found)
    return found


def is_differentiable(op: Op) -> bool:
    """Whether the operator passes gradients on: by its own rule, or by those of its definition."""
    opdef = lookup(op.name)
    return opdef.gradient is not None or opdef.composite


def _active_loop(loop: Repeat, outside: set[Value]) -> set[Value]:
    found = outside | {s.inside for s in loop.stacked if s.outer in outside}
    found |= {c.inside for c in loop.carries if c.init in outside}
    while True:
        inner = active(loop.body, found)
        more = {c.inside for c in loop.carries if c.next in inner} - inner
        if not more:
            break
        found = inner | more
    inner |= {c.result for c in loop.carries if c.next in inner}
    return inner | {c.outer for c in loop.collected if c.inside in inner}


def feeding(nodes: Sequence[Node], needed: set[Value]) -> set[Value]:
    """Everything that the values `needed` are computed from in a block, and they themselves."""
    needed = set(needed)
    for node in reversed(nodes):
        if needed.isdisjoint(results(node)):
            continue
        if isinstance(node, Op):
            needed.update(node.ins)
            continue
        needed.update(v for c in node.carries for v in (c.init,))
        needed.update(s.outer for s in node.stacked)
        needed.update(v for op in walk(node.body) for v in op.ins)
    return needed
