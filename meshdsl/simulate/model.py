"""The FLOPs that a program needs, whatever computes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from meshdsl.ir.program import counted
from meshdsl.named.ir import NamedOp, NamedProgram
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.strategies import flops


def model_flops(program: NamedProgram) -> dict[str, int]:
    """FLOPs of a named program on whole tensors by dtype, without rematerialised operators."""
    return flops_by_dtype(_model_calls(program))


def _model_calls(program: NamedProgram) -> Iterator[tuple[Signature, int]]:
    for op, trips in counted(program.body):
        if not isinstance(op, NamedOp) or (op.origin is not None and op.origin.is_copy):
            continue
        ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
        sig = Signature(ins, outs, dict(op.attrs))
        yield sig, trips * flops(lookup(op.name), sig)


def flops_by_dtype(calls: Iterable[tuple[Signature, int]]) -> dict[str, int]:
    """The FLOPs of calls, summed by the dtype in which they compute: that of operand 0."""
    by_dtype: Counter[str] = Counter()
    for sig, count in calls:
        by_dtype[str((sig.ins or sig.outs)[0].dtype)] += count
    return dict(by_dtype)
