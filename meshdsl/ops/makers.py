"""Makers, which have no operands: `constant`, `iota`, `zeros`, `ones`.

Tensors are made on torch's default device, which the prologue of a program sets.
"""

from __future__ import annotations

import math

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit

# --- constant --------------------------------------------------------------------------------


def _constant_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    del ins
    if attrs["dtype"].kind == "int" and int(attrs["value"]) != attrs["value"]:
        message = f"{attrs['value']} is not an {attrs['dtype']}"
        raise kit.OpError("MD0213", message, "write an integer")
    return (kit.TensorType((), attrs["dtype"]),)


def _constant_text(call: kit.TorchCall) -> str:
    """A Python literal, not a tensor: torch takes it in any dtype of the same kind."""
    value, kind = call.attrs["value"], call.outs[0].dtype.kind
    if kind != "float":
        return repr(int(value) if kind == "int" else bool(value))
    return repr(float(value)) if math.isfinite(value) else f'float("{float(value)}")'


kit.operator(
    "constant",
    kit.Surface("view", (0, 0)),
    _constant_infer,
    kit.plain(),
    lambda call: np.array(call.attrs["value"], dtype=kit.numpy_dtype(call.outs[0].dtype)),
    _constant_text,
    kit.samples(
        "| value=2.5 dtype=f32",
        "| value=-1 dtype=f32",
        "| value=-inf dtype=f32",
        "| value=-7 dtype=i32",
        "| value=True dtype=bool",
    ),
    flops=kit.no_flops,
    meaning="One number, as a tensor without dims.",
)

# --- iota ------------------------------------------------------------------------------------


def _iota_numpy(call: kit.NumpyCall) -> kit.Array:
    dim = call.attrs["dim"].name
    return np.arange(call.extent(dim), dtype=np.int32) + np.int32(call.offset(dim))


kit.operator(
    "iota",
    kit.Surface("dim", (0, 0)),
    kit.index_type,
    kit.plain(),
    _iota_numpy,
    lambda call: kit.range_text(call, call.attrs["dim"].name, "torch.int32"),
    kit.samples("| dim=s", "| dim=h"),
    ordered="dim",
    below=lambda sig: sig.attrs["dim"].size,
    meaning="The indices 0, 1, 2, … along a dim, as i32.",
)

# --- iota in another order -------------------------------------------------------------------


def _in_order(attrs: kit.Attrs) -> kit.Array:
    """The indices along a dim whose blocks lie in an order.

    Sizes are those of the blocks as they lie; without, all but the last are of one.
    """
    size, order = attrs["dim"].size, attrs["order"]
    lying = attrs.get("sizes", (-(-size // len(order)),) * len(order))
    sizes = dict(zip(order, lying, strict=True))
    starts = np.cumsum([0, *(sizes[number] for number in range(len(order)))])
    every = np.arange(size, dtype=np.int32)
    return np.concatenate([every[starts[n] : starts[n + 1]] for n in order])


def _index_numpy(call: kit.NumpyCall) -> kit.Array:
    dim = call.attrs["dim"].name
    return kit.own_block(call, _in_order(call.attrs), dim)


def _index_text(call: kit.TorchCall) -> str:
    dim = call.attrs["dim"].name
    every = f"torch.tensor({_in_order(call.attrs).tolist()}, dtype=torch.int32)"
    return kit.block_text(call, every, dim)


kit.operator(
    "stage_index",
    kit.Surface("view", (0, 0)),
    kit.index_type,
    kit.plain(),
    _index_numpy,
    _index_text,
    kit.samples(
        "| dim=h order=(0 2 1 3)", "| dim=s order=(1 0)", "| dim=s order=(1 0) sizes=(3 1)"
    ),
    ordered="dim",
    meaning="The indices along a dim whose blocks lie in another order, as i32.",
)

# --- zeros and ones --------------------------------------------------------------------------


def _filled(name: str, value: int, *, meaning: str) -> None:
    """Register a maker of a tensor of the given dims, all `value`."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        del ins
        kit.need_distinct(name, attrs["dims"])
        return (kit.TensorType(attrs["dims"], attrs["dtype"]),)

    def numpy(call: kit.NumpyCall) -> kit.Array:
        dtype = kit.numpy_dtype(call.outs[0].dtype)
        return np.full(call.local(call.outs[0]).shape, value, dtype=dtype)

    def torch(call: kit.TorchCall) -> str:
        return f"torch.{name}({call.shape(0)}, dtype={call.outs[0].dtype.torch})"

    kit.operator(
        name,
        kit.Surface("maker", (0, 0), (("dtype", kit.F32),)),
        infer,
        kit.plain(),
        numpy,
        torch,
        kit.samples(
            "| dims=(b h) dtype=f32",
            "| dims=() dtype=f32",
            "| dims=(s b h) dtype=i64",
            "| dims=(s) dtype=bool",
        ),
        meaning=meaning,
    )


_filled("zeros", 0, meaning="A tensor of zeros with the dims in brackets.")
_filled("ones", 1, meaning="A tensor of ones with the dims in brackets.")
