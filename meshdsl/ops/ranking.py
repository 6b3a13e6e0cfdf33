"""`top_k[n -> k](x)` and `sort[n](x)`: elements in order, and the indices they come from.

Both are stable: of equal elements the first comes first, so that no layout changes the answer
(`torch.topk` promises no order). NaN is greater than any number, as in numpy, torch and `argmax`.
Where the own dim of `top_k` is split, every device ranks its own elements, and only the best of
each are exchanged (`named/expand.py`); `sort` needs it whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.ir.types import I32, I64, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
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
    need_kind,
    sample,
    tensor,
)
from meshdsl.ops.views import replaced

# --- top_k -----------------------------------------------------------------------------------


def _top_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    if len(attrs["source"]) != 1 or len(attrs["target"]) != 1:
        message, help = "`top_k` takes one dim to another", "write `top_k[experts -> slots](x)`"
        raise OpError("MD0252", message, help)
    (source,), (target,) = attrs["source"], attrs["target"]
    need_dims("top_k", ins[0], (source,))
    need_kind("top_k", "number", ins[0])
    if target.size > source.size:
        raise OpError(
            "MD0235",
            f"`top_k` of {target.size} (`{target}`) among {source.size} elements (`{source}`)",
            f"`{target}` has {source.size} elements at most",
        )
    values = replaced("top_k", ins[0], source, (target,))
    return values, TensorType(values.dims, I32)


def _top_factors(sig: Signature) -> Factors:
    return Factors(loops(sig, without=(sig.attrs["target"][0].name,)))


def _top_numpy(call: NumpyCall, x: Array) -> tuple[Array, Array]:
    """From the back, so that the last of equals in ascending order is the first there is."""
    axis, n = _axis(call, call.attrs["source"][0]), call.attrs["target"][0].size
    order = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    index = x.shape[axis] - 1 - np.flip(order, axis).take(range(min(n, x.shape[axis])), axis)
    return np.take_along_axis(x, index, axis), index.astype(np.int32)


def _axis(call: NumpyCall | TorchCall, dim: Dim) -> int:
    return call.ins[0].index(dim.name)


def _top_torch(call: TorchCall) -> str:
    axis, target = _axis(call, call.attrs["source"][0]), call.attrs["target"][0]
    return f"{call.use('top_k')}({call.tensor(0)}, {axis}, {target.size})"


def _top_gradient(call: Backward) -> Mapping[int, Value]:
    """The cotangent of each value at the place that it comes from."""
    (source,), (target,) = call.attrs["source"], call.attrs["target"]
    return {0: _put_back(call, with_dims(call, target), call.result(1), source)}


def _put_back(call: Backward, grad: Value, index: Value, dim: Dim) -> Value:
    """`grad`, which may lack dims, added up at indices of `dim`, which have all of them.

    Places in the order that are a dim of the same name get another.
    """
    grad = call.full(grad, index.type.dims)
    if index.type.has(dim.name):
        places = Dim(f"{dim.name}.places", dim.size)  # a user's name cannot contain a dot
        pairs = ((dim, places),)
        grad, index = (call.emit("rename", v, pairs=pairs) for v in (grad, index))
    return call.emit("scatter_add", grad, index, dim=dim, dims=call.ins[0].dims)


_TOP = Dim("top", 2)
_ALL = Dim("top", 4)

register(
    OpDef(
        "top_k",
        Surface("arrow", (1, 1)),
        _top_infer,
        _top_factors,
        _top_numpy,
        _top_torch,
        (
            sample(tensor(BATCH, HIDDEN), source=(HIDDEN,), target=(_TOP,)),
            sample(tensor(SEQ), source=(SEQ,), target=(_ALL,)),
            sample(tensor(BATCH, SEQ, HIDDEN), source=(SEQ,), target=(_TOP,)),
            sample(tensor(HIDDEN, BATCH), source=(HIDDEN,), target=(HIDDEN,)),
            sample(tensor(HIDDEN, BATCH, dtype=I32), source=(HIDDEN,), target=(_ALL,)),
            sample(tensor(BATCH, HIDDEN, dtype=I64), source=(HIDDEN,), target=(_TOP,)),
        ),
        flops=lambda sig: sig.ins[0].elements,
        gradient=_top_gradient,
        scratch=lambda sig, numbers: 2 * I64.bytes * sig.ins[0].elements,  # keys, and bits before
        meaning="The greatest elements of a dim, as many as the new dim has, the greatest first, "
        "and their indices as i32; of equals, the first.",
    )
)

# --- sort ------------------------------------------------------------------------------------


def _sort_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_dims("sort", ins[0], (attrs["dim"],))
    need_kind("sort", "number", ins[0])
    return ins[0], TensorType(ins[0].dims, I32)


def _sort_factors(sig: Signature) -> Factors:
    return Factors(loops(sig, without=(sig.attrs["dim"].name,)))


def _sort_numpy(call: NumpyCall, x: Array) -> tuple[Array, Array]:
    axis = _axis(call, call.attrs["dim"])
    index = np.argsort(x, axis=axis, kind="stable")
    return np.take_along_axis(x, index, axis), index.astype(np.int32)


def _sort_torch(call: TorchCall) -> str:
    return f"{call.use('sort_along')}({call.tensor(0)}, {_axis(call, call.attrs['dim'])})"


def _sort_gradient(call: Backward) -> Mapping[int, Value]:
    """As of `top_k`, of which this is the case that the dim is whole."""
    grad = call.full(call.grad, call.outs[0].dims)
    return {0: _put_back(call, grad, call.result(1), call.attrs["dim"])}


register(
    OpDef(
        "sort",
        Surface("dim", (1, 1)),
        _sort_infer,
        _sort_factors,
        _sort_numpy,
        _sort_torch,
        (
            sample(tensor(BATCH, HIDDEN), dim=HIDDEN),
            sample(tensor(SEQ), dim=SEQ),
            sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ),
            sample(tensor(HIDDEN, BATCH, dtype=I32), dim=HIDDEN),
        ),
        flops=lambda sig: sig.ins[0].elements,
        gradient=_sort_gradient,
        scratch=lambda sig, numbers: I64.bytes * sig.ins[0].elements,
        meaning="The elements along a dim from the least on, NaN last, and their indices as i32; "
        "of equals, the first comes first.",
    )
)
