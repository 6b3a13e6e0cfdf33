"""Picking and slicing, `x[seq = 0]` and `x[seq = 0:128 -> prefix]`; `unpick` puts back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.ir.types import BOOL, I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.makers import range_text
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
    Reads,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    Array,
    loops,
    need_dims,
    need_distinct,
    no_flops,
    plain,
    reader,
    sample,
    tensor,
)
from meshdsl.ops.torch_expressions import indexed, tuple_text
from meshdsl.ops.views import need_size, replaced, view

# --- pick ------------------------------------------------------------------------------------


def _pick_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    dim, index = attrs["dim"], attrs["index"]
    need_dims("pick", ins[0], (dim,))
    if not 0 <= index < dim.size:
        raise OpError(
            "MD0210",
            f"index {index} is out of range for dim `{dim}` of size {dim.size}",
            f"indices of `{dim}` run from 0 to {dim.size - 1}",
        )
    return (ins[0].without(dim.name),)


def _pick_numpy(call: NumpyCall, x: Array) -> Array:
    at = call.ins[0].index(call.attrs["dim"].name)
    return np.asarray(np.take(x, call.attrs["index"], axis=at))


def _pick_text(call: TorchCall) -> str:
    at = call.ins[0].index(call.attrs["dim"].name)
    return indexed(call.tensor(0), at, call.attrs["index"])


def _pick_gradient(call: Backward) -> Mapping[int, Value]:
    dim = call.attrs["dim"]
    before = call.ins[0].dims[: call.ins[0].index(dim.name)]
    at = sum(call.grad.type.has(d.name) for d in before)
    attrs = {"dim": dim, "index": call.attrs["index"], "at": at}
    return {0: call.emit("unpick", call.grad, **attrs)}


view(
    "pick",
    _pick_infer,
    plain(linear=[(0,)], monotone=[0]),
    _pick_numpy,
    _pick_text,
    (
        sample(tensor(SEQ), dim=SEQ, index=1),
        sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ, index=0),
        sample(tensor(BATCH, HIDDEN, dtype=I32), dim=HIDDEN, index=5),
        sample(tensor(HIDDEN, BATCH, dtype=BOOL), values="bool", dim=HIDDEN, index=2),
    ),
    _pick_gradient,
    meaning="The part of a tensor at one index of a dim.",
)

# --- unpick: the gradient of a pick ------------------------------------------------------------


def _unpick_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    """`dim` at position `at`, zero but at `index`."""
    at, dims = attrs["at"], ins[0].dims
    widened = (*dims[:at], attrs["dim"], *dims[at:])
    need_distinct("unpick", widened)
    return (TensorType(widened, ins[0].dtype),)


def _unpick_numpy(call: NumpyCall, x: Array) -> Array:
    dim, at = call.attrs["dim"].name, call.attrs["at"]
    is_picked = np.arange(call.extent(dim)) + call.offset(dim) == call.attrs["index"]
    is_picked = is_picked.reshape(-1, *(1,) * (x.ndim - at))
    return np.where(is_picked, np.expand_dims(x, at), np.zeros((), x.dtype))


def _unpick_text(call: TorchCall) -> str:
    dim, at, index = (call.attrs[k] for k in ("dim", "at", "index"))
    x = f"{call.tensor(0)}.unsqueeze({at})"
    tail = len(call.ins[0].dims) - at
    if not call.is_split(dim.name):
        widths = [*(0, 0) * tail, index, dim.size - index - 1]
        return f"torch.nn.functional.pad({x}, {tuple_text(widths)})"
    is_picked = f"({range_text(call, dim.name, 'torch.int64')} == {index})"
    widened = f"{is_picked}[{', '.join([':', *['None'] * tail])}]" if tail else is_picked
    return f"torch.where({widened}, {x}, 0)"


def _unpick_gradient(call: Backward) -> Mapping[int, Value]:
    dim = call.attrs["dim"]
    if not call.grad.type.has(dim.name):
        return {0: call.grad}
    return {0: call.emit("pick", call.grad, dim=dim, index=call.attrs["index"])}


register(
    OpDef(
        "unpick",
        Surface("view", (1, 1)),
        _unpick_infer,
        plain(linear=[(0,)], monotone=[0]),
        _unpick_numpy,
        _unpick_text,
        (
            sample(tensor(), dim=SEQ, index=1, at=0),
            sample(tensor(BATCH, HIDDEN), dim=SEQ, index=0, at=1),
            sample(tensor(BATCH, HIDDEN), dim=SEQ, index=3, at=2),
            sample(tensor(HIDDEN), dim=SEQ, index=2, at=0),
        ),
        flops=no_flops,
        gradient=_unpick_gradient,
        ordered="dim",
        meaning="The gradient of `pick`: the cotangent at one index of a dim, zeros elsewhere.",
    )
)

# --- slice -----------------------------------------------------------------------------------


def _slice_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    dim, start, stop, target = (attrs[k] for k in ("dim", "start", "stop", "target"))
    need_dims("slice", ins[0], (dim,))
    if not 0 <= start < stop <= dim.size:
        raise OpError(
            "MD0210",
            f"the slice {start}:{stop} does not lie in dim `{dim}` of size {dim.size}",
            f"a slice holds at least one element, and 0 <= start < stop <= {dim.size}",
        )
    need_size(f"the slice {start}:{stop}", stop - start, target)
    return (replaced("slice", ins[0], dim, (target,)),)


def _slice_factors(sig: Signature) -> Factors:
    dim, start, target = (sig.attrs[k] for k in ("dim", "start", "target"))
    part = reader(target.name, [dim.name], Reads(lo=start, hi=start))
    return Factors((*loops(sig, without=(target.name,)), part), (frozenset({0}),), (0,))


def _slice_numpy(call: NumpyCall, x: Array) -> Array:
    at = call.ins[0].index(call.attrs["dim"].name)
    if call.is_split(call.attrs["target"].name):
        return x  # a window: the range itself
    return x[(*(slice(None),) * at, slice(call.attrs["start"], call.attrs["stop"]))]


def _slice_text(call: TorchCall) -> str:
    if call.is_split(call.attrs["target"].name):
        return call.tensor(0)
    at = call.ins[0].index(call.attrs["dim"].name)
    return indexed(call.tensor(0), at, f"{call.attrs['start'] or ''}:{call.attrs['stop']}")


def _slice_gradient(call: Backward) -> Mapping[int, Value]:
    dim, start, target = (call.attrs[k] for k in ("dim", "start", "target"))
    after = dim.size - start - target.size
    attrs = {"source": (target,), "target": (dim,), "before": start, "after": after, "value": 0}
    return {0: call.emit("pad", with_dims(call, target), **attrs)}


_PART = Dim("part", 2)

view(
    "slice",
    _slice_infer,
    _slice_factors,
    _slice_numpy,
    _slice_text,
    (
        sample(tensor(SEQ), dim=SEQ, start=1, stop=3, target=_PART),
        sample(tensor(BATCH, HIDDEN, SEQ), dim=HIDDEN, start=0, stop=2, target=_PART),
        sample(tensor(HIDDEN, SEQ, dtype=I32), dim=SEQ, start=2, stop=4, target=_PART),
    ),
    _slice_gradient,
    meaning="A range of indices of a dim, under a new name.",
)
