"""Updates of several parameters as one: torch takes lists of them.

Updates with equal options are one where nothing else has to be done between them. What they read
is there by then, and none of it could have been freed for another's sake, but for the gradients
that earlier ones are done with: where those would be missed, the updates stay apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from meshdsl.device.aliases import copied_first
from meshdsl.device.ir import Compute, DeviceLoop, DeviceProgram, Move, Node, Pipeline, Var
from meshdsl.device.liveness import is_constant, overwrites
from meshdsl.device.memory import memory
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import reads_of
from meshdsl.ops.opdef import OpDef, lookup
from meshdsl.records import dataclass


def grouped_updates(program: DeviceProgram) -> DeviceProgram:
    """The program with one update for all parameters that are updated alike at one time.

    It needs no more memory than before.
    """
    if not program.updates:
        return program
    grouping = _Grouping(program)
    grouped = replace(program, body=grouping.block(program.body))
    if grouping.needs_room and memory(grouped)["peak"] > memory(program)["peak"]:
        return program
    return grouped if grouping.found else program


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
    """Groups the updates of a program; `needs_room` where gradients may be missed."""

    def __init__(self, program: DeviceProgram) -> None:
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
            if run.updates and not run.is_read_by(node) and _takes_no_memory(node):
                yield node
                continue
            if run.is_read_by(node) and isinstance(node, Compute) and node.name == "cast":
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

    def _inside(self, node: Node) -> Node:
        if not isinstance(node, DeviceLoop) or isinstance(node, Pipeline):
            return node
        body = self.block(node.body)
        return node if body == node.body else replace(node, body=body)

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
        given = tuple(self.numbers.get(v, v) for v in scalars)
        w, g = node.ins[:2]
        return node.name, node.attrs, given, w.local.dtype, g.local.dtype, g in self.numbers, w.on

    def _together(self, updates: list[Compute]) -> Compute:
        """One update in the place of several."""
        first, record = updates[0], lookup(updates[0].name)
        if len(updates) == 1:
            return first
        self.found = True
        self.needs_room = self.needs_room or self._misses_memory(updates, record)
        ins = tuple(v for node in updates for v in node.ins[: record.each])
        outs = tuple(v for node in updates for v in node.outs)
        cost = sum(node.flops for node in updates)
        return replace(first, ins=(*ins, *first.ins[record.each :]), outs=outs, flops=cost)

    def _misses_memory(self, updates: list[Compute], record: OpDef) -> bool:
        """Whether a later update copies more of its gradient than the first one."""
        copied = [self._scratch(node, record) for node in updates]
        return max(copied) > copied[0]

    def _scratch(self, node: Compute, record: OpDef) -> int:
        numbers: Mapping[int, Any] = {
            i: self.numbers[v] for i, v in enumerate(node.ins) if v in self.numbers
        }
        return record.scratch(node.local, numbers) if record.scratch else 0


def _takes_no_memory(node: Node) -> bool:
    """Whether a node may as well be before an update: a number, a scalar, a slice of a tensor."""
    if isinstance(node, Move):
        return node.step.kind == "slice"
    return isinstance(node, Compute) and all(not v.local.dims for v in node.outs)
