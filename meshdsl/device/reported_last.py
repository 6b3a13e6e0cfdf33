"""Numbers that a step only reports are computed after its backward pass.

Their reductions join the buckets of the gradients, so that nothing waits for them before.
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.device.ir import Compute, DeviceProgram, Move, Node, Var
from meshdsl.device.liveness import is_constant
from meshdsl.ir.rewrite import reads_of


def reported_last(program: DeviceProgram) -> DeviceProgram:
    """The program with such numbers before the first update; of a step without stages.

    Their operators read and make nothing but numbers, so no memory is kept for them. The
    collectives between them follow by themselves: none is placed before it is needed.
    """
    stored = {*program.params, *program.states}
    needed, reported = {new for _, new in program.updates}, set[Node]()
    for node in reversed(program.body):
        if needed.isdisjoint(node.makes) and _is_of_numbers(node, stored):
            reported.add(node)
        else:
            needed.update(reads_of(node))
    updates = (at for at, node in enumerate(program.body) if _is_of_update(node))
    end = next(updates, len(program.body))
    moved = [node for node in program.body[:end] if node in reported]
    before = [node for node in program.body[:end] if node not in reported]
    return replace(program, body=(*before, *moved, *program.body[end:]))


def _is_of_update(node: Node) -> bool:
    return isinstance(node, Compute | Move) and node.phase == "update"


def _is_of_numbers(node: Node, stored: set[Var]) -> bool:
    """Whether an operator reads and makes numbers alone, none of them stored."""
    if not isinstance(node, Compute) or is_constant(node) or not stored.isdisjoint(node.ins):
        return False
    return not any(v.local.dims for v in (*node.ins, *node.outs))
