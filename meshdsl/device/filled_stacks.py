"""Stacks that loops fill: an operator writes its result to its slice of the stack, with no copy.

A loop over layers makes a gradient of each, and collects them in one tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, DeviceProgram, Node, Pipeline
from meshdsl.ir.rewrite import Visitor
from meshdsl.ops.opdef import lookup


def filled_stacks(program: DeviceProgram) -> DeviceProgram:
    """The program with results that are made in the stack that collects them, where one can be."""
    return replace(program, body=_FilledStacks().block(program.body))


class _FilledStacks(Visitor):
    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(map(self.visit, nodes))

    def op(self, op: Node) -> Node:
        return op

    def loop(self, loop: DeviceLoop) -> DeviceLoop:
        loop = loop.with_body(self.block)
        if isinstance(loop, Pipeline):
            return loop
        makers = {var: node for node in loop.body for var in node.makes}
        # What the next iteration goes on with, or two stacks collect, is a tensor of its own.
        ends = Counter(loop.ends)

        def is_made_there(item: DeviceCollected) -> bool:
            if item.is_list or item.stack is not None or ends[item.inside] != 1:
                return False
            maker = makers.get(item.inside)
            return isinstance(maker, Compute) and _fills(maker)

        each = (replace(c, made_there=True) if is_made_there(c) else c for c in loop.collected)
        return replace(loop, collected=tuple(each))


def _fills(node: Compute) -> bool:
    """Whether an operator can write its result, which is one, to memory that is there."""
    record = lookup(node.name)
    if record.fills is None or len(node.outs) > 1 or node.onto is not None or node.into is not None:
        return False
    return record.fills_to is None or record.fills_to(node.local)
