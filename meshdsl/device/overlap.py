"""Overlap: collectives are issued while the devices compute, and waited for where they are used.

A sharded parameter is prefetched: gathered one use ahead, during the computation with the one
before it; in a loop, one iteration ahead. So is one that is stored in another memory: loaded.
Reductions of updates and gradients are sent as soon as their operands exist; in a loop, the last
ones of an iteration arrive during the next one. No more is in flight at a time, since it takes
memory (`_Plans`). An all_to_all of equal blocks is waited for where its result is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.device import buckets
from meshdsl.device.aliases import shared
from meshdsl.device.buckets import KINDS
from meshdsl.device.ir import (
    Ahead,
    Bucket,
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StagePhase,
    Start,
    Var,
    Wait,
    arrives_in_place,
)
from meshdsl.device.issue_windows import BlockAccess
from meshdsl.device.liveness import uses
from meshdsl.device.names import Names, names_of
from meshdsl.ir.program import Leaf, every
from meshdsl.records import dataclass


def overlapped(program: DeviceProgram) -> DeviceProgram:
    """The program with collectives issued early.

    Without an update those are only gathers of parameters.
    """
    return replace(program, body=_Overlap(program).block(program.body, {}))


class _Overlap:
    def __init__(self, program: DeviceProgram) -> None:
        self.mesh = program.mesh
        self.names = Names(names_of(program))
        self.trains = bool(program.updates)
        self.owners = shared(program)
        self.uses = uses(program)
        # By loop, the statement behind which a stage of a pipeline sends.
        self.sending: dict[Node, Node] = {}
        # Parameters, slices of them, and what is loaded of those in another memory.
        self.stored = set(program.params)
        for node in every(program.body):
            if isinstance(node, Move) and node.step.kind == "load":
                self.stored.add(node.target)

    def block(
        self,
        nodes: tuple[Node, ...],
        ahead: dict[Collective, str],
        late: dict[Collective, str] | None = None,
    ) -> tuple[Node, ...]:
        """The nodes of a block.

        By `work`: `ahead` are collectives issued an iteration ahead, `late` are waited for in the
        next one.
        """
        nodes = tuple(self._inside(n) for n in nodes)
        return _Plans(self, nodes, ahead, late or {}).carried_out()

    def _inside(self, node: Node) -> Node:
        match node:
            case Pipeline():
                if node.sends_after is not None:
                    self.sending[node.loop(StagePhase.LOOP_BACKWARD)] = node.sends_after
                return node.with_body(lambda nodes: self.block(nodes, {}))
            case DeviceLoop():
                return self._loop(node)
        return node

    def _loop(self, node: DeviceLoop) -> DeviceLoop:
        """A loop; gathers of its slices of parameters are issued an iteration ahead."""
        slices = {s.inside: s for s in node.stacked if s.outer in self.stored or s.outer.away}
        self.stored.update(slices)
        gathers = [
            n
            for n in node.body
            if isinstance(n, Move | Bucket)
            and n.step.kind in FETCHING
            and all(m.source in slices for m in n.moves)
        ]
        works = {n: self.work(n) for n in gathers if node.dim.size > 1}
        # What a stage sends is not in flight while gradients of parameters are computed.
        sent = node.body.index(self.sending[node]) + 1 if node in self.sending else 0
        late = {} if sent else self._late(node)
        body = self.block(node.body[:sent], works) + self.block(node.body[sent:], works, late)
        ahead = tuple(
            Ahead(n, work, tuple(slices[m.source] for m in n.moves)) for n, work in works.items()
        )
        only = {s for a in ahead for s in a.slices if self.uses[s.inside] == 1}
        stacked = tuple(s for s in node.stacked if s not in only)
        return replace(node, body=body, ahead=ahead, stacked=stacked)

    def _late(self, node: DeviceLoop) -> dict[Collective, str]:
        """The reductions of an iteration that may arrive during the next one, by `work`.

        These are the last large reduce_scatter, the small ones after it, which take little memory,
        and large all_reduces, which take none.
        """
        if not self.trains or node.dim.size == 1:
            return {}
        scatters = _scatters(node.body)
        large = [i for i, scatter in enumerate(scatters) if _is_large(scatter)]
        last = scatters[large[-1] if large else 0 :]
        collectives = (n for n in node.body if isinstance(n, Move | Bucket))
        last += [n for n in collectives if self._adds_in_place(n)]
        return {n: self.work(n) for n in last if self._may_be_late(n, node)}

    def _adds_in_place(self, node: Collective) -> bool:
        """Whether a collective is a large all_reduce of what nothing else reads."""
        alone = all(self.uses[var] == 1 for var in node.reads)
        return node.step.kind == "all_reduce" and _is_large(node) and alone

    def _may_be_late(self, scatter: Collective, node: DeviceLoop) -> bool:
        """Whether its results are only collected, and no later iteration overwrites what it sends.

        All that shows the memory of its operands is made in one iteration then.
        """
        stacks = {c.inside for c in node.collected if not c.is_list and c.stack is None}
        made = {v for n in every(node.body) for v in n.makes}
        sent = {self.owners.get(v, v) for v in scatter.reads}
        showing = (v for v, owner in self.owners.items() if owner in sent)
        return (
            all(v in stacks and self.uses[v] == 1 for v in scatter.makes)
            and made.issuperset(sent)
            and made.issuperset(showing)
        )

    def sends(self, node: Node) -> bool:
        """Whether a node is a collective that can be waited for later."""
        if not isinstance(node, Move | Bucket):
            return False
        if isinstance(node, Move) and node.step.kind == "all_to_all":
            return node.rows is None and not node.step.is_uneven(node.source.type, self.mesh)
        return node.step.kind in KINDS or bool(node.step.tier)

    def work(self, node: Collective) -> str:
        """A variable that names a collective in flight."""
        return self.names.fresh(
            "bucket" if isinstance(node, Bucket) else f"{node.target.name}_work"
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The nodes of the block before which a collective is issued, and waited for.

    `after_waits`: it is issued after every wait in the same place.
    """

    start: int
    wait: int
    after_waits: bool = False


class _Plans:
    """Plans for the collectives of a block.

    Of parameters one gather at a time is in flight beside those an iteration ahead, and none during
    a loop. An all_reduce in place takes no memory: any number may be in flight. A reduce_scatter
    keeps its source alive: one at a time, and no longer than without overlap but for one use. The
    `late` ones of an iteration do so until the first large one of the next iteration. What is
    gathered in a buffer, to be copied to its place, takes memory like a reduce_scatter.
    """

    def __init__(
        self,
        overlap: _Overlap,
        nodes: tuple[Node, ...],
        ahead: dict[Collective, str],
        late: dict[Collective, str],
    ) -> None:
        self.overlap, self.nodes, self.ahead, self.late = overlap, nodes, ahead, late
        self.facts = BlockAccess(nodes, overlap.owners)
        self.loops = [i for i, node in enumerate(nodes) if not isinstance(node, Leaf)]
        # Before each node: what is issued, what is waited for, what is issued after that.
        self.before: tuple[dict[int, list[Node]], ...] = ({}, {}, {})

    def carried_out(self) -> tuple[Node, ...]:
        """The nodes, with collectives issued and waited for as planned."""
        plans = dict(self._early()) | dict(self._gathers())
        scattered = {n: w for n, w in self.late.items() if n.step.kind == "reduce_scatter"}
        if scattered:
            # Before anything large is scattered again.
            scatters = (n for n in _scatters(self.nodes) if n in self.late or _is_large(n))
            first = min(scatters, key=lambda n: plans[n].start)
            plans[first] = replace(plans[first], after_waits=True)
            waits: list[Node] = [Wait(n, work, late=True) for n, work in scattered.items()]
            self.before[1][plans[first].start] = waits
        for node, plan in plans.items():
            self._carry_out(node, plan)
        remaining = [() if n in plans else (n,) for n in self.nodes]
        return tuple(
            node
            for i, unmoved in enumerate((*remaining, ()))
            for nodes in (*(at.get(i, ()) for at in self.before), unmoved)
            for node in nodes
        )

    def _carry_out(self, node: Collective, plan: _Plan) -> None:
        starts = self.before[2 if plan.after_waits else 0].setdefault(plan.start, [])
        waits = self.before[1].setdefault(plan.wait, [])
        if node in self.ahead:
            work = self.ahead[node]
            waits += [Wait(node, work), Start(node, work, ahead=True)]
        elif node in self.late:
            if node.step.kind == "all_reduce":
                starts.append(Wait(node, self.late[node], late=True))
            starts.append(Start(node, self.late[node], late=True))
        elif self._computes(plan):
            work = self.overlap.work(node)
            starts.append(Start(node, work))
            waits.append(Wait(node, work))
        else:
            starts.append(node)

    def _computes(self, plan: _Plan) -> bool:
        """Whether the devices compute between start and wait."""
        return any(_computes(node) for node in self.nodes[plan.start : plan.wait])

    # --- gathers of parameters -----------------------------------------------------------------

    def _gathers(self) -> Iterator[tuple[Collective, _Plan]]:
        gathers = [
            (self.facts.window(i, n), n) for i, n in self._collectives() if self._is_stored(n)
        ]
        free = 0
        for window, node in sorted(gathers, key=lambda pair: pair[0].needed):
            after_loops = max((i + 1 for i in self.loops if i < window.needed), default=0)
            start = max(free, after_loops, window.ready + 1)
            plan = _Plan(start, window.needed, after_waits=True)
            free = window.needed
            if node in self.ahead or self._computes(plan):
                yield node, plan

    def _is_stored(self, node: Collective) -> bool:
        fetches = node.step.kind in FETCHING
        return fetches and all(m.source in self.overlap.stored for m in node.moves)

    # --- reductions, and results of an update --------------------------------------------------

    def _early(self) -> Iterator[tuple[Collective, _Plan]]:
        if not self.overlap.trains:
            return
        collectives = [(i, n) for i, n in self._collectives() if not self._is_stored(n)]
        scatters = [(i, n) for i, n in collectives if n.step.kind == "reduce_scatter"]
        copied = [(i, n) for i, n in collectives if self._is_copied(n)]
        held = dict((*self._one_at_a_time(scatters), *self._one_at_a_time(copied)))
        for i, node in collectives:
            if node in held:
                yield node, held[node]
            else:
                yield node, _Plan(self._earliest(i, node), self.facts.window(i, node).needed)

    def _is_copied(self, node: Collective) -> bool:
        """Whether the results of a gather are in a buffer until they go to their place."""
        mesh = self.overlap.mesh
        into = (m for m in node.moves if m.into is not None)
        return any(isinstance(node, Bucket) or not arrives_in_place(m, mesh) for m in into)

    def _one_at_a_time(
        self, collectives: list[tuple[int, Collective]]
    ) -> Iterator[tuple[Collective, _Plan]]:
        free = 0
        earliest = [self._earliest(i, n) for i, n in collectives]
        for number, (i, node) in enumerate(collectives):
            start = max(free, earliest[number])
            loops = (j for j in self.loops if j >= start)
            ends = (self.facts.window(i, node).needed, *loops, *earliest[number + 1 :][:1])
            after_waits = start == free
            free = max(start, min(ends), i if node.step.kind == "reduce_scatter" else 0)
            yield node, _Plan(start, free, after_waits)

    def _earliest(self, at: int, node: Collective) -> int:
        """The first position at which a collective may be issued, if it is to take no more memory.

        One whose source another collective makes stays behind that one.
        """
        if any(self._made_by_collective(m.source) for m in node.moves):
            return at + 1
        alone = all(self.overlap.uses[m.source] == 1 for m in node.moves)
        free = {"all_reduce": alone, "reduce_scatter": True, "store": True}.get(
            node.step.kind, node.phase == "update"
        )
        return self.facts.window(at, node).ready + 1 if free else at

    def _made_by_collective(self, var: Var) -> bool:
        maker = self.facts.made.get(var)
        return maker is not None and self.overlap.sends(self.nodes[maker])

    def _collectives(self) -> Iterator[tuple[int, Collective]]:
        for i, node in enumerate(self.nodes):
            if isinstance(node, Move | Bucket) and self.overlap.sends(node):
                yield i, node


def _scatters(nodes: tuple[Node, ...]) -> list[Collective]:
    collectives = (node for node in nodes if isinstance(node, Move | Bucket))
    return [node for node in collectives if node.step.kind == "reduce_scatter"]


def _is_large(node: Collective) -> bool:
    return node.payload >= buckets.SMALL


FETCHING = ("all_gather", "load")
"""What brings a stored parameter to where it is used."""


def _computes(node: Node) -> bool:
    """Whether a node is work: loops are, views and operators on single numbers are not."""
    if isinstance(node, Compute):
        return node.flops > 0 and any(v.local.shape for v in (*node.ins, *node.outs))
    return not isinstance(node, Leaf)
