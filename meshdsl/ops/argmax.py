"""argmax[d](x), the index of the first of the greatest elements over any dims.

Of several dims it is the row-major index in the order that the brackets name them, or of the tensor
where there are none: `argmax[a, b](x)` is `argmax` of `x[(a, b) -> c]`.
"""

from __future__ import annotations

import math

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, normalise, reduce

_LARGEST = 2**31 - 1


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    (out,) = kit.dropped("argmax", "number")(ins, attrs)
    if math.prod(d.size for d in attrs["dims"]) > _LARGEST:
        message = f"an index over the dims of {ins[0]} does not fit into i32"
        raise kit.OpError("MD0257", message, "take `max` over one of them first")
    return (kit.TensorType(out.dims, kit.I32),)


def _order(call: kit.NumpyCall | kit.TorchCall) -> tuple[str, ...]:
    """The dims of the operand, those that disappear last, in the order of the index."""
    own = tuple(d.name for d in call.attrs["dims"])
    return (*(n for n in call.ins[0].names if n not in own), *own)


def _numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    remaining = len(call.outs[0].dims)
    last = x.transpose([call.ins[0].index(n) for n in _order(call)])
    flat = last.reshape(*last.shape[:remaining], math.prod(last.shape[remaining:]))
    return np.asarray(flat.argmax(-1), dtype=np.int32)


def _text(call: kit.TorchCall) -> str:
    x, names, dims = call.tensor(0), call.ins[0].names, call.attrs["dims"]
    narrow = "" if call.leaves_long else ".to(torch.int32)"
    if len(dims) == 1:
        return f"{x}.argmax({names.index(dims[0].name)}){narrow}"
    last = kit.permuted(x, names, _order(call))
    remaining = len(names) - len(dims)
    flat = f"{last}.flatten({remaining}).argmax({remaining})" if remaining else f"{last}.argmax()"
    return f"{flat}{narrow}"


normalise.composite(
    "argmax",
    (1, 1),
    _infer,
    _numpy,
    _text,
    reduce.samples_over("number"),
    exact=True,
    cost=1,
    reduces=True,
    leaves_long=True,
    below=lambda sig: math.prod(d.size for d in sig.attrs["dims"]),
    meaning="The index of the largest element over the dims, the first of equals, as i32.",
)
