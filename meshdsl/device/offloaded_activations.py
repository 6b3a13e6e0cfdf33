"""Activations in another memory: what a loop keeps for the backward pass is stored and loaded.

The forward loop stores each value as soon as it is there; the backward loop loads it one iteration
ahead (`overlap.py`). (Rhu et al. 2016, vDNN; Rajbhandari et al. 2021, ZeRO-Infinity.) What is kept
of a loop inside of another one, or outside of loops, stays in the memory of the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshdsl.device.ir import (
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Var,
    known_words,
)
from meshdsl.device.liveness import uses
from meshdsl.device.names import Names, names_of
from meshdsl.ir.program import Stacked
from meshdsl.ir.rewrite import Visitor
from meshdsl.placed import collectives


def offloaded_activations(program: DeviceProgram) -> DeviceProgram:
    """The program whose loops store what a layout has in another memory, and load it again."""
    rewrite = _Offload(program)
    body = rewrite.block(program.body)
    lists = frozenset(rewrite.stacks.get(var, var) for var in program.lists)
    return replace(program, body=body, lists=lists)


class _Offload(Visitor):
    """`stacks` are the lists of what is stored elsewhere, by those whose place they take."""

    def __init__(self, program: DeviceProgram) -> None:
        self.tiers, self.mesh = program.placed.kept, program.mesh
        self.names = Names(names_of(program))
        self.uses = uses(program)
        self.stacks: dict[Var, Var] = {}

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of a block."""
        sliced = Counter(
            item.outer for node in nodes if node.phase == "backward" for item in node.stacked
        )
        return tuple(self.visit(node, sliced) for node in nodes)

    def op(self, op: Node, _: Counter[Var]) -> Node:
        """An operator stays."""
        return op

    def loop(self, loop: DeviceLoop, sliced: Counter[Var]) -> DeviceLoop:
        """A loop; `sliced` counts the slices that backward loops of its block take of each list."""
        loop = loop.with_body(self.block)
        return self._loading(loop) if loop.phase == "backward" else self._storing(loop, sliced)

    def _storing(self, loop: DeviceLoop, sliced: Counter[Var]) -> DeviceLoop:
        """A loop of the forward pass: only the backward pass reads what it stores."""
        stores: dict[Var, Move] = {}
        collected: list[DeviceCollected] = []
        for item in loop.collected:
            tier = self.tiers.get(item.inside.value, "")
            only_read = sliced[item.outer] == self.uses[item.outer] > 0
            if not (tier and item.is_list and only_read):
                collected.append(item)
                continue
            if item.inside not in stores:
                stores[item.inside] = self._store(item.inside, tier, loop)
            outer = self.stacks[item.outer] = replace(item.outer, away=tier)
            collected.append(replace(item, inside=stores[item.inside].target, outer=outer))
        if not stores:
            return loop
        body_values = {v for node in loop.body for v in node.makes}
        body: list[Node] = [store for var, store in stores.items() if var not in body_values]
        for node in loop.body:
            body += [node, *(stores[v] for v in node.makes if v in stores)]
        return replace(loop, body=tuple(body), collected=tuple(collected))

    def _store(self, var: Var, tier: str, loop: DeviceLoop) -> Move:
        target = replace(var, name=self.names.fresh(f"{var.name}_{tier}"), away=tier)
        target = replace(target, hint=f"{var.hint}_{tier}")
        words = known_words(f"`{_word(var)}` is kept on the {tier}")
        step = collectives.store(var.placement, tier)
        move = Move(step, var, target, 0, 0, loop.span, words, loop.phase)
        return move.counted(self.mesh)

    def _loading(self, loop: DeviceLoop) -> DeviceLoop:
        """A loop of the backward pass that reads slices of what is stored."""
        loads: list[Node] = []
        stacked: list[Stacked[Var]] = []
        for item in loop.stacked:
            if item.outer not in self.stacks:
                stacked.append(item)
                continue
            outer, var = self.stacks[item.outer], item.inside
            row = replace(var, name=self.names.fresh(f"{var.name}_{outer.away}"), away=outer.away)
            stacked.append(Stacked(outer, row))
            words = known_words(f"`{_word(var)}` is kept on the {outer.away}")
            step = collectives.load(var.placement, outer.away)
            move = Move(step, row, var, 0, 0, loop.span, words, loop.phase)
            loads.append(move.counted(self.mesh))
        return replace(loop, stacked=tuple(stacked), body=(*loads, *loop.body))


def _word(var: Var) -> str:
    """The word that a reader knows a variable by."""
    return var.value.label if var.value.name else var.hint
