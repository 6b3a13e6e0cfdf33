"""Updates of several parameters as one: torch takes lists of them.

Updates with equal options are one where nothing else has to be done between them. A collective that
reads none of their results is done before them; a large one in flight is not waited for, since they
hide it. What they read is there by then, and none of it could have been freed for another's sake,
but for the gradients that earlier ones are done with: where those would be missed, the updates stay
apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import field, replace
from itertools import product
from typing import Any

from meshdsl.device.aliases import copied_first
from meshdsl.device.ir import Bucket, Compute, DeviceProgram, Move, Node, Pipeline, Var, Wait
from meshdsl.device.liveness import is_constant, overwrites
from meshdsl.device.memory import memory
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import LARGE
from meshdsl.ops.opdef import lookup
from meshdsl.records import dataclass


def grouped_updates(program: DeviceProgram) -> DeviceProgram:
    """The program with one update for all parameters that are updated alike at one time.

    It needs no more memory than before. Gradients that are to be copied, as clipping by norm does,
    are so all at once, or else have the `room` of the largest.
    """
    for waits, is_narrow in product((True, False), (False, True)):
        grouping = _Grouping(program, is_narrow, waits)
        grouped = replace(program, body=grouping.block(program.body))
        if not grouping.needs_room or _takes_no_more(grouped, program):
            return grouped if grouping.found else program
    return program


def _takes_no_more(grouped: DeviceProgram, program: DeviceProgram) -> bool:
    """Whether updates in groups need no more memory; no, where it cannot be counted (MD0106)."""
    try:
        return memory(grouped)["peak"] <= memory(program)["peak"]
    except DiagnosticError:
        return False


@dataclass(slots=True)
class _Run:
    """Updates between which nothing else is done: by what has to be equal in those of a group.

    `behind` are statements that read their results, and wait for the last of them.
    """

    updates: dict[Hashable, list[Compute]] = field(default_factory=dict)
    behind: list[Node] = field(default_factory=list)
    made: set[Var] = field(default_factory=set)

    def is_read_by(self, node: Node) -> bool:
        """Whether a node reads what the updates or those behind them make."""
        return not self.made.isdisjoint(reads_of(node))

    def add(self, key: Hashable, update: Compute) -> None:
        """Add an update, which reads no result of the others."""
        self.updates.setdefault(key, []).append(update)
        self.made.update(update.makes)

    def delay(self, node: Node) -> None:
        """Add a statement that reads their results."""
        self.behind.append(node)
        self.made.update(node.makes)


class _Grouping:
    """Groups the updates of a program, with `is_narrow` room for copies of gradients.

    With `waits` an update is done after the collectives between it and the last one of its group.
    `needs_room` says that they may take more than before.
    """

    def __init__(self, program: DeviceProgram, is_narrow: bool, waits: bool) -> None:
        self.is_narrow, self.waits = is_narrow, waits
        self.copied, self.away = copied_first(program), program.away.keys()
        nodes = (node for node in every(program.body) if isinstance(node, Compute))
        self.numbers = {n.out: n.attr("value") for n in nodes if is_constant(n)}
        self.found = self.needs_room = False

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """A block with its updates in groups, and those of the loops in it."""
        return tuple(self._nodes(nodes))

    def _nodes(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        run = _Run()
        for node in nodes:
            if run.updates and not run.is_read_by(node) and self._may_be_before(node):
                yield node
                continue
            if run.is_read_by(node) and isinstance(node, Compute) and lookup(node.name).converts:
                run.delay(node)
                continue
            key = self._key(node)
            if key is None or run.is_read_by(node):
                yield from self._ended(run)
                run = _Run()
            if key is None:
                yield self._inside(node)
            else:
                assert isinstance(node, Compute), "an update is an operator"
                run.add(key, node)
        yield from self._ended(run)

    def _may_be_before(self, node: Node) -> bool:
        """Whether a node is done before the updates that it reads nothing of."""
        is_soon_there = isinstance(node, Move | Bucket) and node.step.moves
        if isinstance(node, Wait) and not node.late:
            is_soon_there = sum(v.local.bytes for v in node.collective.makes) < LARGE
        if self.waits and is_soon_there:
            self.needs_room = True
            return True
        return _takes_no_memory(node)

    def _inside(self, node: Node) -> Node:
        return node if isinstance(node, Pipeline) else node.with_body(self.block)

    def _ended(self, run: _Run) -> Iterator[Node]:
        for updates in run.updates.values():
            yield self._together(updates)
        yield from run.behind

    def _key(self, node: Node) -> Hashable | None:
        """What is equal in updates of one group; None of what is no update, or not of lists."""
        if not isinstance(node, Compute) or (record := lookup(node.name)).each < 2:
            return None
        scalars = node.ins[record.each :]
        written = {node.ins[i] for i in overwrites(node)}
        differ = any(v.local.dims for v in scalars)
        if differ or not written.isdisjoint(self.copied) or not self.away.isdisjoint(written):
            return None
        values = tuple(self.numbers.get(v, v) for v in scalars)
        w, g = node.ins[:2]
        return node.name, node.attrs, values, w.local.dtype, g.local.dtype, g in self.numbers, w.on

    def _together(self, updates: list[Compute]) -> Compute:
        """One update in the place of several."""
        first, record = updates[0], lookup(updates[0].name)
        if len(updates) == 1:
            return first
        self.found = True
        ins = tuple(v for node in updates for v in node.ins[: record.each])
        outs = tuple(v for node in updates for v in node.outs)
        ins = (*ins, *first.ins[record.each :])
        together = replace(first, ins=ins, outs=outs, flops=sum(node.flops for node in updates))
        copied = max(map(self._scratch, updates))
        if self.is_narrow and copied:
            room = ("room", copied // first.ins[0].local.dtype.bytes)
            together = replace(together, attrs=(*first.attrs, room))
        self.needs_room |= self._scratch(together) > self._scratch(first)
        return together

    def _scratch(self, node: Compute) -> int:
        """The bytes of the copies that an update makes of its gradients."""
        count = lookup(node.name).scratch
        numbers: Mapping[int, Any] = {
            i: self.numbers[v] for i, v in enumerate(node.ins) if v in self.numbers
        }
        return count(node.local, numbers) if count else 0


def _takes_no_memory(node: Node) -> bool:
    """Whether a node may as well be before an update: a number, a scalar, a slice of a tensor."""
    if isinstance(node, Move):
        return node.step.kind == "slice"
    return isinstance(node, Compute) and all(not v.local.dims for v in node.outs)
