"""`cumsum[d](x)`: the sums of all elements of d up to each one, or from each one on.

`exclusive=1` leaves the element itself out: 0 stands first. Nothing is subtracted for it, which
would round, and be NaN from the first infinity on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.ir.types import I32, TensorType
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
from meshdsl.ops.reduce import same_type
from meshdsl.ops.requirements import BATCH, HIDDEN, SEQ, Array, loops, sample, tensor
from meshdsl.ops.torch_expressions import shifted


def _infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    for name in ("exclusive", "reverse"):
        if attrs[name] not in (0, 1):
            message = f"`{name}` of `cumsum` is 0 or 1, not {attrs[name]}"
            raise OpError("MD0213", message, f"write `{name}=1`, or leave it out")
    return same_type("cumsum", "number")(ins, attrs)


def _factors(sig: Signature) -> Factors:
    return Factors(loops(sig, without=(sig.attrs["dim"].name,)), (frozenset({0}),))


def _numpy(call: NumpyCall, x: Array) -> Array:
    axis = call.ins[0].index(call.attrs["dim"].name)
    x = np.flip(x, axis) if call.attrs["reverse"] else x
    if call.attrs["exclusive"]:
        zero = np.zeros_like(x.take([0], axis))
        x = np.concatenate([zero, x], axis).take(range(x.shape[axis]), axis)
    sums = np.cumsum(x, axis=axis, dtype=x.dtype)
    return np.flip(sums, axis) if call.attrs["reverse"] else sums


def _torch(call: TorchCall) -> str:
    at, attrs = call.ins[0].index(call.attrs["dim"].name), call.attrs
    x = call.tensor(0)
    if attrs["exclusive"]:
        x = shifted(x, len(call.ins[0].dims), at, -1 if attrs["reverse"] else 1)
    dtype = ", dtype=torch.int32" if call.ins[0].dtype == I32 else ""
    if attrs["reverse"]:
        return f"{x}.flip({at}).cumsum({at}{dtype}).flip({at})"
    return f"{x}.cumsum({at}{dtype})"


def _gradient(call: Backward) -> Mapping[int, Value]:
    """An element is in the sums behind it, so its gradient is summed from the other end."""
    attrs = {**call.attrs, "reverse": 1 - call.attrs["reverse"]}
    return {0: call.emit("cumsum", with_dims(call, attrs["dim"]), **attrs)}


_X = tensor(BATCH, SEQ, HIDDEN)

register(
    OpDef(
        "cumsum",
        Surface("dim", (1, 1), (("exclusive", 0), ("reverse", 0))),
        _infer,
        _factors,
        _numpy,
        _torch,
        (
            sample(tensor(SEQ), dim=SEQ, exclusive=0, reverse=0),
            sample(_X, dim=SEQ, exclusive=0, reverse=0),
            sample(tensor(HIDDEN, SEQ, dtype=I32), dim=HIDDEN, exclusive=0, reverse=0),
            sample(_X, dim=SEQ, exclusive=1, reverse=0),
            sample(tensor(BATCH, HIDDEN), dim=HIDDEN, exclusive=0, reverse=1),
            sample(tensor(HIDDEN, SEQ, dtype=I32), dim=HIDDEN, exclusive=1, reverse=1),
        ),
        gradient=_gradient,
        precision="f32",
        meaning="The running sum along a dim: element i is the sum of elements 0 to i; with "
        "`exclusive=1` it is not of i itself, and `reverse=1` sums from the end.",
    )
)
