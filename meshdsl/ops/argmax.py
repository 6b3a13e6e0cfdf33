"""argmax[d](x), the index of the first of the greatest elements over any dims.

Of several dims it is the row-major index in the order that the brackets name them, or of the tensor
where there are none: `argmax[a, b](x)` is `argmax` of `x[(a, b) -> c]`.
"""

from __future__ import annotations

import math

import numpy as np

from meshdsl.ir.types import I32, TensorType
from meshdsl.ops.normalise import composite
from meshdsl.ops.opdef import Attrs, NumpyCall, OpError, TorchCall
from meshdsl.ops.reduce import dropped, samples_over
from meshdsl.ops.requirements import Array
from meshdsl.ops.torch_expressions import permuted

_LARGEST = 2**31 - 1


def _infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    (out,) = dropped("argmax", "number")(ins, attrs)
    if math.prod(d.size for d in attrs["dims"]) > _LARGEST:
        message = f"an index over the dims of {ins[0]} does not fit into i32"
        raise OpError("MD0257", message, "take `max` over one of them first")
    return (TensorType(out.dims, I32),)


def _order(call: NumpyCall | TorchCall) -> tuple[str, ...]:
    """The dims of the operand, those that disappear last, in the order of the index."""
    own = tuple(d.name for d in call.attrs["dims"])
    return (*(n for n in call.ins[0].names if n not in own), *own)


def _numpy(call: NumpyCall, x: Array) -> Array:
    remaining = len(call.outs[0].dims)
    last = x.transpose([call.ins[0].index(n) for n in _order(call)])
    flat = last.reshape(*last.shape[:remaining], math.prod(last.shape[remaining:]))
    return np.asarray(flat.argmax(-1), dtype=np.int32)


def _text(call: TorchCall) -> str:
    x, names, dims = call.tensor(0), call.ins[0].names, call.attrs["dims"]
    if len(dims) == 1:
        return f"{x}.argmax({names.index(dims[0].name)}).to(torch.int32)"
    last = permuted(x, names, _order(call))
    remaining = len(names) - len(dims)
    flat = f"{last}.flatten({remaining}).argmax({remaining})" if remaining else f"{last}.argmax()"
    return f"{flat}.to(torch.int32)"


composite(
    "argmax",
    (1, 1),
    _infer,
    _numpy,
    _text,
    samples_over("number"),
    exact=True,
    cost=1,
    reduces=True,
    meaning="The index of the largest element over the dims, the first of equals, as i32.",
)
