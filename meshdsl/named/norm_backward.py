"""The gradients of a norm, one operator, in those by each operand: for a dim that is split."""

from __future__ import annotations

from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, Value

NORMS_BACKWARD = ("layer_norm_backward", "rms_norm_backward")


def norm_backward_parts(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> tuple[Value, ...]:
    """By the tensor, a composite of its own; by scale and shift, sums."""
    dy, x, _ = ins
    norm, attrs = op.name.removesuffix("_backward"), dict(op.attrs)
    by_tensor = emit(f"{norm}_grad", *ins, **attrs)
    dims = op.outs[1].type.dims
    by_scale = emit("einsum", dy, emit(norm, x, **attrs), dims=dims)
    if norm == "rms_norm":
        return by_tensor, by_scale
    others = tuple(d for d in dy.type.dims if d not in dims)
    return by_tensor, by_scale, emit("sum", dy, dims=others)
