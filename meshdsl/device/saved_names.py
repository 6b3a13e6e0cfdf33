"""Names of activations: the backward pass reads each under the name of the forward pass.

A loop over layers saves its activations in lists, from which the loop of the backward pass takes
them. So does it gather each parameter again. The same tensor has one name in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from meshdsl.device.ir import DeviceLoop, DeviceProgram, Move, Node, Pipeline, Var
from meshdsl.device.ir import renamed as with_others
from meshdsl.device.liveness import kept_after
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import makes_of, reads_of


def saved_names(program: DeviceProgram) -> DeviceProgram:
    """The program with one name for what one loop saves and another takes, where it is free."""
    kept = {v.name for v in kept_after(program)}
    lists = program.lists
    new = dict(_renamed(program.body, kept, lists))
    pipeline = program.pipeline
    if pipeline is not None:
        kept |= {v.name for v in (*pipeline.ends, *pipeline.enters)}
        new |= _renamed(pipeline.body, kept, lists)
    if not new:
        return program
    return replace(program, body=tuple(with_others(node, new) for node in program.body))


def _renamed(
    nodes: tuple[Node, ...], kept: set[str], lists: frozenset[Var]
) -> Iterator[tuple[Var, Var]]:
    """By variable of a loop of a block, the one with the name of an earlier loop of the block."""
    first: dict[Hashable, Var] = {}
    for at, node in enumerate(nodes):
        if not isinstance(node, DeviceLoop) or isinstance(node, Pipeline):
            continue
        taken: set[str] | None = None
        for key, var in _same(node, lists):
            before = first.get(key)
            if before is None or before.name == var.name or before.local != var.local:
                continue
            taken = kept | _names(nodes[at:]) if taken is None else taken
            if before.name not in taken:
                taken.add(before.name)
                yield var, replace(var, name=before.name, hint=before.hint)
        first.update({c.outer: c.inside for c in node.collected if c.is_list})
        first.update((key, var) for key, var in _same(node, lists) if key not in first)


def _same(node: DeviceLoop, lists: frozenset[Var]) -> Iterator[tuple[Hashable, Var]]:
    """What a loop takes of lists, and gathers of stacks, by what it is of."""
    stack_of: Mapping[Var, Var] = {s.inside: s.outer for s in node.slices}
    yield from ((outer, inside) for inside, outer in stack_of.items() if outer in lists)
    for move in node.body:
        if isinstance(move, Move) and move.source in stack_of:
            yield (stack_of[move.source], move.step.kind, move.target.placement), move.target


def _names(nodes: tuple[Node, ...]) -> set[str]:
    """The names of all variables in statements."""
    names: set[str] = set()
    for node in every(nodes):
        names.update(v.name for v in (*reads_of(node), *makes_of(node)))
        if isinstance(node, DeviceLoop):
            names.update(v.name for v in (*node.enters, *node.ends))
            names.update(v.name for s in node.slices for v in (s.outer, s.inside))
    return names
