"""The backward pass of a stage: what the stage before waits for comes first.

Each iteration makes the gradients of what it carries first, then those of parameters, for which
nobody waits: the last iteration sends in between. Where the schedule does these in two passes, the
loop is split into one of each (loop fission; B and W of zero-bubble schedules, Qi et al. 2023).
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.device.ir import (
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Var,
    renamed,
)
from meshdsl.device.liveness import is_constant
from meshdsl.device.names import Names
from meshdsl.ir.program import Stacked
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import Dim
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """The two loops; `lists` are what the first keeps for the second, slice by slice."""

    inputs: DeviceLoop
    weights: DeviceLoop
    lists: frozenset[Var]


def halves(
    loop: DeviceLoop, program: DeviceProgram, pipe: Piped, names: Names
) -> SplitBackward | None:
    """The halves of a loop; None where all of it is needed for what it carries."""
    first, needed = _for_carries(loop)
    later = [n for n in loop.body if n not in first]
    plain = all(isinstance(n, Compute | Move) for n in later)
    if loop.ahead or not plain or not any(isinstance(n, Compute) and n.flops for n in later):
        return None
    return _Fission(loop, program, pipe, names, first, needed).halves()


def carried_first(loop: DeviceLoop) -> DeviceLoop:
    """The loop with what it carries made first in each iteration."""
    first, _ = _for_carries(loop)
    return replace(loop, body=tuple(sorted(loop.body, key=lambda node: node not in first)))


def _for_carries(loop: DeviceLoop) -> tuple[set[Node], set[Var]]:
    """The statements by which a loop makes what it carries, and all values that these read."""
    needed = {c.next for c in loop.carries}
    first: set[Node] = set()
    for node in reversed(loop.body):
        if not needed.isdisjoint(node.makes):
            first.add(node)
            needed.update(reads_of(node))
    return first, needed


class _Fission:
    def __init__(
        self,
        loop: DeviceLoop,
        program: DeviceProgram,
        pipe: Piped,
        names: Names,
        first: set[Node],
        needed: set[Var],
    ) -> None:
        self.loop, self.program, self.pipe, self.names = loop, program, pipe, names
        self.first, self.needed = first, needed
        self.later = [n for n in loop.body if n not in first]
        self.slices = {s.inside: s for s in loop.stacked}
        # What the second loop reads under another name, and where it slices that from.
        self.new: dict[Var, Var] = {}
        self.stacked: list[Stacked[Var]] = []
        self.kept: list[DeviceCollected] = []
        self.numbers: list[Compute] = []

    def halves(self) -> SplitBackward:
        """Both loops."""
        in_first = {v for n in self.first if not is_constant(n) for v in n.makes}
        in_first |= {c.inside for c in self.loop.carries}
        numbers = {v: n for n in self.first if is_constant(n) for v in n.makes}
        ends = [c.inside for c in self.loop.collected if c.inside in self.slices]
        for var in dict.fromkeys([v for n in self.later for v in reads_of(n)] + ends):
            if var in in_first:
                self._keep(var)
            elif var in numbers:
                self._again(numbers[var])
            elif var in self.slices:
                self._slice(var)
        in_second = {v for n in self.later for v in n.makes} | {s.inside for s in self.stacked}
        loop, index = self.loop, self.names.fresh(self.loop.index)
        collected = [c for c in loop.collected if c.inside in in_second]
        inputs = replace(
            loop,
            body=tuple(n for n in loop.body if n in self.first),
            stacked=tuple(s for s in loop.stacked if s.inside in self.needed),
            collected=(*(c for c in loop.collected if c not in collected), *self.kept),
        )
        weights = replace(
            loop,
            carries=(),
            body=(*self.numbers, *(renamed(node, self.new) for node in self.later)),
            stacked=tuple(self.stacked),
            collected=tuple(collected),
            index=index,
        )
        return SplitBackward(inputs, weights, frozenset(c.outer for c in self.kept))

    def _again(self, node: Node) -> None:
        """A number of the first loop, made in the second one, too."""
        assert isinstance(node, Compute)
        (var,) = node.outs
        self.new[var] = replace(var, name=self.names.fresh(var.name))
        self.numbers.append(replace(node, outs=(self.new[var],)))

    def _slice(self, var: Var) -> None:
        """A slice of a stack in the second loop; of a list that both take from, a copy of it."""
        item = self.slices[var]
        if var not in self.needed:
            self.stacked.append(item)
        elif item.outer in self.program.lists:
            self._keep(var)
        else:
            self.new[var] = replace(var, name=self.names.fresh(var.name))
            self.stacked.append(Stacked(item.outer, self.new[var]))

    def _keep(self, var: Var) -> None:
        """Keep a value of each iteration of the first loop for the second."""
        mesh: Mesh = self.program.mesh
        size = sum(self.pipe.sizes) or self.loop.dim.size * self.pipe.stages(mesh)
        dim = Dim(self.pipe.dim, size)
        type_ = var.value.type.along(dim)
        splits = {**dict(var.placement.splits), self.pipe.dim: self.pipe.axes(mesh)}
        placed = replace(var.placement, splits=tuple(sorted(splits.items())))
        outer = replace(
            var,
            name=self.names.fresh(f"{var.name}_kept"),
            value=replace(var.value, type=type_),
            placement=placed,
            local=placed.local(type_, mesh),
            hint=f"{var.hint}_kept",
        )
        self.kept.append(DeviceCollected(var, outer, is_list=True))
        self.new[var] = replace(var, name=self.names.fresh(var.name))
        self.stacked.append(Stacked(outer, self.new[var]))
