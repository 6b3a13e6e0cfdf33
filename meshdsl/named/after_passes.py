"""Operators taken out of passes that are repeated, to follow the last one.

Where they were in a loop, they are done for all of its iterations at once, or in a loop again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.ir.rewrite import makes_of, reads_of, substitute
from meshdsl.named.ir import NamedLoop, NamedOp, Node, Value
from meshdsl.named.over_iterations import at_once


class Parting:
    """Takes what is late out of the passes.

    `origins` are values of the passes in place of results that loops of these no longer have.
    """

    def __init__(self, late: set[Value]) -> None:
        self.late = late
        self.origins: dict[Value, Value] = {}

    def block(self, nodes: Iterable[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes of the passes, and those that follow them."""
        now: list[Node] = []
        later: list[Node] = []
        for node in nodes:
            if self.late.isdisjoint(makes_of(node)):
                now.append(node)
            elif isinstance(node, NamedOp):
                later.append(replace(node, phase="update"))
            else:
                remaining, following = self._loop(node)
                now += [remaining] if remaining.makes else []
                later += following
        return tuple(now), tuple(later)

    def _loop(self, loop: NamedLoop) -> tuple[NamedLoop, tuple[Node, ...]]:
        """A loop less what waits, and the nodes for that: all iterations at once, or a loop again.

        The first loop collects what these read of its iterations.
        """
        now, later = self.block(loop.body)
        later = _with_constants(now, later)
        carries = tuple(c for c in loop.carries if c.inside in self.late)
        ends = tuple(item for item in loop.collected if item.inside in self.late)
        read = {v for n in later for v in reads_of(n)} | {c.next for c in carries}
        slices = [s for s in loop.stacked if s.inside in read]
        first = {c.inside for c in loop.carries if c not in carries}
        # What an iteration begins with is collected as a copy.
        copies = {v: replace(v, name=None) for v in first if v in read}
        collected = {
            v: Collected(copies.get(v, v), v.alike(type=v.type.along(loop.dim)))
            for v in (*first, *(v for n in now for v in n.makes))
            if v in read
        }
        slices += [Stacked(item.outer, v) for v, item in collected.items()]
        earlier = replace(
            loop,
            carries=tuple(c for c in loop.carries if c not in carries),
            body=(*(NamedOp("identity", (v,), (c,), (), v.span) for v, c in copies.items()), *now),
            collected=(*(item for item in loop.collected if item not in ends), *collected.values()),
        )
        earlier = replace(earlier, stacked=_read(earlier))
        gone = set(loop.makes).difference(earlier.makes)
        self.origins.update(dict.fromkeys(gone, earlier.makes[0]) if earlier.makes else {})
        return earlier, _following(loop, carries, slices, later, ends)


def _with_constants(now: tuple[Node, ...], later: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes that follow, with copies of the constants that they read of the passes."""
    read = {v for n in later for v in reads_of(n)}
    shared = [n for n in now if isinstance(n, NamedOp) and not n.ins and n.out in read]
    new = {n.out: replace(n.out) for n in shared}
    copies = [replace(n, outs=(new[n.out],), phase="update") for n in shared]
    return (*copies, *substitute(later, new)) if new else later


def _following(
    loop: NamedLoop,
    carries: tuple[Carry[Value], ...],
    stacked: Sequence[Stacked[Value]],
    body: tuple[Node, ...],
    collected: tuple[Collected[Value], ...],
) -> tuple[Node, ...]:
    # A slice has a value of its own in each loop.
    inside = {s.inside: replace(s.inside) for s in stacked}
    part = NamedLoop(
        loop.dim,
        tuple(Carry(c.init, c.inside, inside.get(c.next, c.next), c.result) for c in carries),
        tuple(Stacked(s.outer, inside[s.inside]) for s in stacked),
        substitute(body, inside),
        loop.span,
        collected,
        loop.reverse,
        "update",
    )
    return at_once(part) or (part,)


def _read(loop: NamedLoop) -> tuple[Stacked[Value], ...]:
    """The stacks of which an iteration reads its slice."""
    read = {v for n in loop.body for v in reads_of(n)} | {*loop.ends}
    return tuple(s for s in loop.stacked if s.inside in read)
