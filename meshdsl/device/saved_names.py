"""Names of activations: the backward pass reads each under the name of the forward pass.

A loop over layers saves its activations in lists, from which the loop of the backward pass takes
them. So does it gather each parameter again. The same tensor has one name in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Set
from dataclasses import replace

from meshdsl.device.ir import DeviceProgram, Move, Node, Pipeline, Var
from meshdsl.device.ir import renamed as with_others
from meshdsl.device.liveness import kept_after
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import makes_of, reads_of


def saved_names(program: DeviceProgram) -> DeviceProgram:
    """The program with one name for what one loop saves and another takes, where it is free."""
    live_after, finder = kept_after(program), _NameFinder(program)
    finder.block(program.body, live_after)
    pipeline = program.pipeline
    if pipeline is not None:
        finder.block(pipeline.body, live_after | {*pipeline.ends, *pipeline.enters})
    if not finder.new:
        return program
    return replace(program, body=tuple(with_others(node, finder.new) for node in program.body))


class _NameFinder:
    """`new` are the variables of loops with the names of those of earlier loops, by theirs."""

    def __init__(self, program: DeviceProgram) -> None:
        self.lists = program.lists
        self.new: dict[Var, Var] = {}

    def block(self, nodes: tuple[Node, ...], kept: Set[Var]) -> None:
        """Go through the loops of a block; what is `kept` is read after it."""
        first: dict[Hashable, Var] = {}
        for at, node in enumerate(nodes):
            if isinstance(node, Pipeline):
                continue
            same = [(key, var) for key, var in self._same(node) if key in first]
            alike = [(first[key], var) for key, var in same if first[key].local == var.local]
            if alike:
                self._name(alike, {v.name for v in (*kept, *_variables(nodes[at:]))})
            first.update({c.outer: c.inside for c in node.collected if c.is_list})
            first = dict(self._same(node)) | first

    def _name(self, alike: list[tuple[Var, Var]], taken: set[str]) -> None:
        """Name the second variables of pairs as the first ones, whose names are not `taken`."""
        for first, var in alike:
            old = self.new.get(first, first)
            if old.name not in taken:
                taken.add(old.name)
                self.new[var] = replace(var, name=old.name, hint=old.hint)

    def _same(self, node: Node) -> Iterator[tuple[Hashable, Var]]:
        """What a loop takes of lists, and gathers of stacks, by what it is of."""
        stack_of = {s.inside: s.outer for s in node.slices}
        yield from ((outer, inside) for inside, outer in stack_of.items() if outer in self.lists)
        for move in node.body:
            if isinstance(move, Move) and move.source in stack_of:
                yield (stack_of[move.source], move.step.kind, move.target.placement), move.target


def _variables(nodes: tuple[Node, ...]) -> Iterator[Var]:
    """All variables in statements."""
    for node in every(nodes):
        yield from (*reads_of(node), *makes_of(node), *node.enters, *node.ends)
        yield from (v for s in node.slices for v in (s.outer, s.inside))
