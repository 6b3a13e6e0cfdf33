"""The FLOPs that a program needs, whatever computes it."""

from __future__ import annotations

from collections import Counter

from meshdsl.ir.program import counted
from meshdsl.named.ir import NamedOp, NamedProgram
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.strategies import flops


def model_flops(program: NamedProgram) -> dict[str, int]:
    """FLOPs of a named program on whole tensors by dtype, without rematerialised operators."""
    by_dtype: Counter[str] = Counter()
    for op, trips in counted(program.body):
        if not isinstance(op, NamedOp) or (op.origin is not None and op.origin.is_copy):
            continue
        ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
        local = Signature(ins, outs, dict(op.attrs))
        by_dtype[str((ins or outs)[0].dtype)] += trips * flops(lookup(op.name), local)
    return dict(by_dtype)
