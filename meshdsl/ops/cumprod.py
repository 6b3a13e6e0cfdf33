"""`cumprod[d](x)`: the products of all elements of d up to each one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.ir.types import I32
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import number, with_dims, zero_like
from meshdsl.ops.opdef import (
    Backward,
    Factors,
    NumpyCall,
    OpDef,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.reduce import same_type
from meshdsl.ops.requirements import BATCH, HIDDEN, SEQ, Array, loops, sample, tensor


def _factors(sig: Signature) -> Factors:
    return Factors(loops(sig, without=(sig.attrs["dim"].name,)))


def _numpy(call: NumpyCall, x: Array) -> Array:
    return np.cumprod(x, axis=call.ins[0].index(call.attrs["dim"].name), dtype=x.dtype)


def _torch(call: TorchCall) -> str:
    dtype = ", dtype=torch.int32" if call.ins[0].dtype == I32 else ""
    return f"{call.tensor(0)}.cumprod({call.ins[0].index(call.attrs['dim'].name)}{dtype})"


def _gradient(call: Backward) -> Mapping[int, Value]:
    """The gradient by x[i]: sum over j >= i of dy[j] times the product up to j without x[i].

    In front of the first zero of its row that product is y[j] / x[i]. At the first zero it is the
    product of the others; behind it there is always a zero left. So one pass over the products
    without the first zero suffices. (Torch's formula for inputs with zeros, in operators.)
    """
    x, dim = call.operand(0), call.attrs["dim"]
    dtype, along = x.type.dtype, {"dim": dim, "exclusive": 0, "reverse": 0}
    one, grad = number(call, 1.0, dtype), with_dims(call, dim)
    is_zero = call.emit("eq", x, 0.0)
    zeros = call.emit("cumsum", call.emit("cast", is_zero, dtype=dtype), **along)
    is_before, is_one = call.emit("eq", zeros, 0.0), call.emit("eq", zeros, 1.0)
    is_first = call.emit("logical_and", is_zero, is_one)
    others = call.emit("cumprod", call.emit("where", is_first, one, x), dim=dim)
    sums = call.emit("mul", grad, others)
    nothing = zero_like(call, sums)

    def from_here_on(value: Value) -> Value:
        return call.emit("cumsum", value, **along | {"reverse": 1})

    before = from_here_on(call.emit("where", is_before, sums, nothing))
    before = call.emit("div", before, call.emit("where", is_zero, one, x))
    at_zero = from_here_on(call.emit("where", is_before, nothing, sums))
    beyond = call.emit("where", is_first, at_zero, nothing)
    return {0: call.emit("where", is_before, before, beyond)}


register(
    OpDef(
        "cumprod",
        Surface("dim", (1, 1)),
        same_type("cumprod", "number"),
        _factors,
        _numpy,
        _torch,
        (
            sample(tensor(SEQ), dim=SEQ),
            sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ),
            sample(tensor(HIDDEN, SEQ, dtype=I32), dim=HIDDEN),
        ),
        exact=False,
        gradient=_gradient,
        precision="f32",
        meaning="The running product along a dim: element i is the product of elements 0 to i.",
    )
)
