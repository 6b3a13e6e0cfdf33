"""What an operator of a device costs."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.device.ir import Compute, DeviceProgram, Var
from meshdsl.ops.opdef import lookup
from meshdsl.placed.strategies import flops


def with_flops(op: Compute) -> Compute:
    """An operator with the FLOPs of its local blocks."""
    return replace(op, flops=flops(lookup(op.name), op.local))


def flops_in_all(node: Compute, times: int, program: DeviceProgram) -> int:
    """The FLOPs of an operator that is called so many times in a step.

    Where micro-batches are of several sizes, each has as many of the calls.
    """
    pipe = program.placed.pipe
    cut = None if pipe is None else pipe.cut
    operands = (*node.ins, *node.outs)
    if cut is None or not cut.sizes or not any(_is_cut(v, cut.axis) for v in operands):
        return node.flops * times
    in_all = 0
    for number in range(cut.micro):
        at = {cut.axis: number}
        ins, outs = (
            tuple(
                replace(v, local=v.placement.local_at(v.local, v.type, program.mesh, at))
                for v in vs
            )
            for vs in (node.ins, node.outs)
        )
        in_all += with_flops(replace(node, ins=ins, outs=outs)).flops if node.flops else 0
    return in_all * times // cut.micro


def _is_cut(var: Var, axis: str) -> bool:
    return any(axis in axes for _, axes in var.placement.splits)
