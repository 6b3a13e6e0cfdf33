"""Operators of loops that write their results directly to a slice of a stack, without a copy.

For example, a loop over layers computes a gradient of each, and collects them in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from meshdsl.device.aliases import shared
from meshdsl.device.ir import (
    Compute,
    DeviceCollected,
    DeviceLoop,
    DeviceProgram,
    Node,
    Pipeline,
    Var,
)
from meshdsl.ir.rewrite import Visitor
from meshdsl.ops.opdef import lookup


def filled_stacks(program: DeviceProgram) -> DeviceProgram:
    """The program with `into_slice` for each collected result whose operator can write there.

    Nothing that an iteration hands on shows such a result: behind the loop, what is written over
    the stack would change it.
    """
    return replace(program, body=_FilledStacks(program).block(program.body))


class _FilledStacks(Visitor):
    def __init__(self, program: DeviceProgram) -> None:
        self.program = program

    @cached_property
    def owners(self) -> Mapping[Var, Var]:
        """The representative of each variable among those that may show the same memory."""
        return shared(self.program)

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(map(self.visit, nodes))

    def op(self, op: Node) -> Node:
        return op

    def loop(self, loop: DeviceLoop) -> DeviceLoop:
        loop = loop.with_body(self.block)
        if isinstance(loop, Pipeline):
            return loop
        makers = {var: node for node in loop.body for var in node.makes}
        # An all_reduce that comes late works where what it adds up is.
        late = (move for wait in loop.late for move in wait.collective.moves)
        parts = {m.target: m.source for m in late if m.step.kind == "all_reduce"}

        def goes_into_slice(item: DeviceCollected) -> bool:
            if item.is_list or item.stack is not None:
                return False
            part = parts.get(item.inside, item.inside)
            maker = makers.get(part)
            fills = isinstance(maker, Compute) and _fills(maker)
            return fills and not any(self._is_handed_on(v, loop) for v in {part, item.inside})

        each = (replace(c, into_slice=True) if goes_into_slice(c) else c for c in loop.collected)
        return replace(loop, collected=tuple(each))

    def _is_handed_on(self, var: Var, loop: DeviceLoop) -> bool:
        """Whether a carry, a list or a second stack has the memory of what an iteration makes."""
        if sum(item.inside is var for item in loop.collected) > 1:
            return True
        handed_on = [c.next for c in loop.carries]
        handed_on += [item.inside for item in loop.collected if item.is_list]
        owner = self.owners.get(var, var)
        return any(self.owners.get(other, other) is owner for other in handed_on)


def _fills(node: Compute) -> bool:
    """Whether an operator has one result, and can write it to existing memory."""
    record = lookup(node.name)
    if record.fills is None or len(node.outs) > 1 or node.onto is not None or node.into is not None:
        return False
    return record.fills_to is None or record.fills_to(node.local)
