"""The FLOPs that a program needs, whatever computes it."""

from __future__ import annotations

from collections import Counter

from meshdsl.ir.program import counted
from meshdsl.named.ir import NamedOp, NamedProgram
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.strategies import flops


def model_flops(program: NamedProgram) -> dict[str, int]:
    """FLOPs of a named program on whole tensors by dtype, without those of `recompute`.

    What a backward pass computes again is an operator of a block: same name, place, attributes and
    results.
    """
    by_dtype: Counter[str] = Counter()
    once: Counter[tuple[object, ...]] = Counter()
    for op, trips in counted(program.body):
        if not isinstance(op, NamedOp):
            continue
        about = (op.name, op.span, op.attrs, tuple(v.type for v in op.outs))
        if op.phase == "forward" and op.block is not None:
            once[about] += 1
        elif op.phase == "backward" and once[about]:
            once[about] -= 1
            continue
        ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
        local = Signature(ins, outs, dict(op.attrs))
        by_dtype[str((ins or outs)[0].dtype)] += trips * flops(lookup(op.name), local)
    return dict(by_dtype)
