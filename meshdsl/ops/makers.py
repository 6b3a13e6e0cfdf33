"""Makers, which have no operands: `constant`, `iota`, `zeros`, `ones`.

Tensors are made on torch's default device, which the prologue of a program sets.
"""

from __future__ import annotations

import math

import numpy as np

from meshdsl.ir.types import BOOL, F32, I32, I64, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    NumpyCall,
    OpDef,
    OpError,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    Array,
    need_distinct,
    no_flops,
    numpy_dtype,
    plain,
    sample,
)
from meshdsl.ops.torch_expressions import atom

# --- constant --------------------------------------------------------------------------------


def _constant_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    del ins
    if attrs["dtype"].kind == "int" and int(attrs["value"]) != attrs["value"]:
        message = f"{attrs['value']} is not an {attrs['dtype']}"
        raise OpError("MD0213", message, "write an integer")
    return (TensorType((), attrs["dtype"]),)


def _constant_numpy(call: NumpyCall) -> Array:
    return np.array(call.attrs["value"], dtype=numpy_dtype(call.outs[0].dtype))


def _constant_text(call: TorchCall) -> str:
    """A Python literal, not a tensor: torch takes it in any dtype of the same kind."""
    value, kind = call.attrs["value"], call.outs[0].dtype.kind
    if kind != "float":
        return repr(int(value) if kind == "int" else bool(value))
    return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'


register(
    OpDef(
        "constant",
        Surface("view", (0, 0)),
        _constant_infer,
        plain(),
        _constant_numpy,
        _constant_text,
        (
            sample(value=2.5, dtype=F32),
            sample(value=-1, dtype=F32),
            sample(value=float("-inf"), dtype=F32),
            sample(value=-7, dtype=I32),
            sample(value=True, dtype=BOOL),
        ),
        flops=no_flops,
        meaning="One number, as a tensor without dims.",
    )
)

# --- iota ------------------------------------------------------------------------------------


def _iota_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    del ins
    return (TensorType((attrs["dim"],), I32),)


def _iota_numpy(call: NumpyCall) -> Array:
    dim = call.attrs["dim"].name
    return np.arange(call.extent(dim), dtype=np.int32) + np.int32(call.offset(dim))


def range_text(call: TorchCall, dim: str, dtype: str) -> str:
    """The global indices of the local elements of `dim`."""
    text = f"torch.arange({call.extent(dim)}, dtype={dtype})"
    return f"{text} + {atom(call.offset(dim))}" if call.is_split(dim) else text


register(
    OpDef(
        "iota",
        Surface("dim", (0, 0)),
        _iota_infer,
        plain(),
        _iota_numpy,
        lambda call: range_text(call, call.attrs["dim"].name, "torch.int32"),
        (sample(dim=SEQ), sample(dim=HIDDEN)),
        ordered="dim",
        meaning="The indices 0, 1, 2, … along a dim, as i32.",
    )
)

# --- iota in another order -------------------------------------------------------------------


def _in_order(attrs: Attrs) -> Array:
    """The indices along a dim whose blocks lie in an order.

    Sizes are those of the blocks as they lie; without, all but the last are of one.
    """
    size, order = attrs["dim"].size, attrs["order"]
    lying = attrs.get("sizes", (-(-size // len(order)),) * len(order))
    sizes = dict(zip(order, lying, strict=True))
    starts = np.cumsum([0, *(sizes[number] for number in range(len(order)))])
    every = np.arange(size, dtype=np.int32)
    return np.concatenate([every[starts[n] : starts[n + 1]] for n in order])


def _index_numpy(call: NumpyCall) -> Array:
    dim = call.attrs["dim"].name
    return _in_order(call.attrs)[call.offset(dim) :][: call.extent(dim)]


def _index_text(call: TorchCall) -> str:
    dim = call.attrs["dim"].name
    every = f"torch.tensor({_in_order(call.attrs).tolist()}, dtype=torch.int32)"
    if not call.is_split(dim):
        return every
    return f"{every}.narrow(0, {call.offset(dim)}, {call.extent(dim)})"


register(
    OpDef(
        "stage_index",
        Surface("view", (0, 0)),
        _iota_infer,
        plain(),
        _index_numpy,
        _index_text,
        (
            sample(dim=HIDDEN, order=(0, 2, 1, 3)),
            sample(dim=SEQ, order=(1, 0)),
            sample(dim=SEQ, order=(1, 0), sizes=(SEQ.size - 1, 1)),
        ),
        ordered="dim",
        meaning="The indices along a dim whose blocks lie in another order, as i32.",
    )
)

# --- zeros and ones --------------------------------------------------------------------------


def _filled(name: str, value: int, *, meaning: str) -> None:
    """Register a maker of a tensor of the given dims, all `value`."""

    def infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        del ins
        need_distinct(name, attrs["dims"])
        return (TensorType(attrs["dims"], attrs["dtype"]),)

    def numpy(call: NumpyCall) -> Array:
        dtype = numpy_dtype(call.outs[0].dtype)
        return np.full(call.local(call.outs[0]).shape, value, dtype=dtype)

    def torch(call: TorchCall) -> str:
        return f"torch.{name}({call.shape(0)}, dtype={call.outs[0].dtype.torch})"

    register(
        OpDef(
            name,
            Surface("maker", (0, 0), (("dtype", F32),)),
            infer,
            plain(),
            numpy,
            torch,
            (
                sample(dims=(BATCH, HIDDEN), dtype=F32),
                sample(dims=(), dtype=F32),
                sample(dims=(SEQ, BATCH, HIDDEN), dtype=I64),
                sample(dims=(SEQ,), dtype=BOOL),
            ),
            meaning=meaning,
        )
    )


_filled("zeros", 0, meaning="A tensor of zeros with the dims in brackets.")
_filled("ones", 1, meaning="A tensor of ones with the dims in brackets.")
