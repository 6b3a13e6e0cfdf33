"""Random numbers: `uniform`, `normal`, `dropout`.

A call draws from a stream of its own: that of its attribute `stream` (its name in the program), its
seed and the indices of the loops around it, which are its last operands. An element's number is
that of its index in the whole tensor, so no placement changes it, and the backward pass draws it
again. (`backends/runtime/splitmix.py`; Salmon et al. 2011.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.splitmix import keeping, normal_of, stream_key, uniform_of
from meshdsl.backends.runtime.values import splitmix64
from meshdsl.ops import kit


def stream_number(name: str) -> int:
    """The stream of a call as a signed number of 64 bits."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _drawn(
    call: kit.NumpyCall, numbers: Sequence[kit.Array], how: Callable[[kit.Array], kit.Array]
) -> kit.Array:
    """What `how` makes of the int32 words of this part; `numbers` are the seed and the indices."""
    dims: tuple[kit.Dim, ...] = call.attrs["dims"]
    rows = np.zeros((), np.int64)
    for dim in dims[:-1]:
        indices = np.arange(call.extent(dim.name)) + call.offset(dim.name)
        rows = rows[..., None] * dim.size + indices
    pairs = (dims[-1].size + 1) // 2 if dims else 1
    key = np.array(stream_key(stream_number(call.attrs["stream"]), *numbers)).astype(np.uint64)
    bits = splitmix64(key, rows[..., None] * pairs + np.arange(pairs))
    drawn = how(bits.astype("<u8").view("<i4"))
    if not dims:
        return np.asarray(drawn[0])
    first = call.offset(dims[-1].name)
    return np.asarray(drawn[..., first : first + call.extent(dims[-1].name)])


def _block_text(call: kit.TorchCall, numbers: Sequence[str]) -> str:
    """The arguments that tell a function of the runtime which numbers to draw."""
    dims: tuple[kit.Dim, ...] = call.attrs["dims"]
    stream = str(stream_number(call.attrs["stream"]))
    key = f"{call.use('stream_key')}({', '.join((stream, *numbers))})"
    starts = kit.tuple_text([call.offset(d.name) for d in dims])
    return f"{key}, {kit.tuple_text([d.size for d in dims])}, {starts}"


# --- uniform and normal --------------------------------------------------------------------------


def _maker(
    name: str,
    how: Callable[[kit.Array, object], kit.Array],
    options: tuple[tuple[str, Any], ...],
    meaning: str,
) -> None:
    """Register a maker of random numbers, which `how` of the runtime makes of words."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        del ins
        kit.need_distinct(name, attrs["dims"])
        type_ = kit.TensorType(attrs["dims"], attrs["dtype"])
        if type_.dtype.kind != "float":
            help = f"leave the dtype out, and convert: `cast({name}[…](), {type_.dtype})`"
            message = f"`{name}` makes floats, not {type_.dtype}"
            way = kit.SetOption("dtype", "f32")
            raise kit.OpError("MD0202", message, help, way, also=f"or {help}")
        std = attrs.get("std", 1.0)
        if not (isinstance(std, int | float) and 0 <= std < math.inf):
            message = f"the standard deviation of `{name}` cannot be {std}"
            way, also = kit.SetOption("std", "0.02"), "`std` is a number from 0 on"
            raise kit.OpError("MD0213", message, None, way, also=also)
        return (type_,)

    def numpy(call: kit.NumpyCall, *numbers: kit.Array) -> kit.Array:
        deviates = _drawn(call, numbers, lambda words: how(words, np))
        return np.asarray(deviates * float(call.attrs.get("std", 1.0)))

    def torch(call: kit.TorchCall) -> str:
        numbers, out = _block_text(call, call.args), call.outs[0]
        drawn = (
            f"{call.use('random_numbers')}({call.use(how.__name__)}, {numbers}, {call.shape(0)})"
        )
        std = float(call.attrs.get("std", 1.0))
        scaled = drawn if std == 1 else f"{drawn} * {std!r}"
        return scaled if out.dtype == kit.F32 else f"({scaled}).to({out.dtype.torch})"

    shapes = (
        "(): i64 | dims=(b h)",
        "(): i64; (): i32 | dims=(s b h)",
        "(): i32 | dims=(s)",
        "(): i64 | dims=()",
    )
    attrs = " ".join(f"{k}={v}" for k, v in options if k != "seed")
    kit.operator(
        name,
        kit.Surface("maker", (0, 1), options, seeded=True),
        infer,
        kit.plain(),
        numpy,
        torch,
        kit.samples(*(f'{shape} {attrs} stream="{name}"' for shape in shapes)),
        exact=False,
        ordered="dims",
        meaning=meaning,
    )


_maker(
    "uniform",
    uniform_of,
    (("seed", None), ("dtype", kit.F32)),
    "Random numbers between 0 and 1, neither of them, with the dims in brackets. They depend on "
    "the seed, the call and the index, and on no layout; without a seed, on that of the run, in "
    "training also on the step.",
)
_maker(
    "normal",
    normal_of,
    (("seed", None), ("std", 1.0), ("dtype", kit.F32)),
    "Normal random numbers of mean 0 and standard deviation `std`, with the dims in brackets. They "
    "depend on the seed, the call and the index, as those of `uniform` do.",
)

# --- dropout -------------------------------------------------------------------------------------


def _dropout_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("dropout", "float", ins[0])
    kit.need_dims("dropout", ins[0], attrs["dims"])
    rate = attrs["rate"]
    if not (isinstance(rate, int | float) and 0 <= rate <= 1):
        help = "write the share that becomes 0: `dropout(x, 0.1)`"
        message = f"the rate of `dropout` is {rate}, and not from 0 to 1"
        way, also = kit.SetOption("rate", "0.1"), "the rate is the share that becomes 0"
        raise kit.OpError("MD0230", message, help, way, also=also)
    return (ins[0],)


def _dropout_numpy(call: kit.NumpyCall, x: kit.Array, *numbers: kit.Array) -> kit.Array:
    last, factor = keeping(call.attrs["rate"])
    factors = _drawn(call, numbers, lambda words: np.where(words <= last, factor, 0.0))
    type_ = kit.TensorType(call.attrs["dims"], call.ins[0].dtype)
    return np.asarray(x * kit.align(factors, type_, call.ins[0].dims))


def _dropout_text(call: kit.TorchCall) -> str:
    """`dropped` on the operand; where its dims are others, on ones that it is multiplied by."""
    x, dims, dtype = call.ins[0], call.attrs["dims"], call.ins[0].dtype
    numbers, rate = _block_text(call, call.args[1:]), float(call.attrs["rate"])
    names = tuple(d.name for d in dims)
    dropped = call.use("dropped")
    if names == x.names:
        return f"{dropped}({call.tensor(0)}, {rate}, {numbers})"
    wide = dtype if dtype.bytes > kit.F32.bytes else kit.F32
    ones = f"torch.ones({kit.tuple_text([call.extent(n) for n in names])}, dtype={wide.torch})"
    factors = call.let("factors", f"{dropped}({ones}, {rate}, {numbers})")
    product = f"{call.tensor(0)} * {kit.aligned(factors, names, x.names)}"
    return product if wide == dtype else f"({product}).to({dtype.torch})"


def _dropout_gradient(call: kit.Backward) -> kit.Grads:
    """The same elements of the cotangent, drawn again."""
    numbers = [call.operand(i) for i in range(1, len(call.ins))]
    grad = kit.with_dims(call, *call.attrs["dims"])
    return {0: call.emit("dropout", grad, *numbers, **call.attrs)}


kit.operator(
    "dropout",
    kit.Surface("dims?", (1, 2), (("rate", ...), ("seed", None)), seeded=True),
    _dropout_infer,
    kit.plain(linear=[[0]]),
    _dropout_numpy,
    _dropout_text,
    kit.samples(
        'b h; (): i64 | dims=(b h) rate=0.5 stream="dropout"',
        's b h; (): i64; (): i32 | dims=(h s) rate=0.25 stream="dropout"',
        's; (): i32 | dims=(s) rate=0.75 stream="dropout"',
    ),
    exact=False,
    true_rows=kit.rows_with_reason(
        "so for numbers; an infinity that is dropped becomes NaN, of a part as of the whole",
        *(f"P({op}), {seeds} -> P({op})" for op in ("max", "min") for seeds in ("B", "B, B")),
    ),
    gradient=_dropout_gradient,
    ordered="dims",
    meaning="Each element becomes 0 with probability `rate`, or else `1 / (1 - rate)` times "
    "itself (Srivastava et al. 2014). With dims in brackets, one decision is taken for each of "
    "their indices, for all of the others. Which become 0 depends on the seed, the call and "
    "the index, as the numbers of `uniform` do. As in torch, an infinity that is dropped is "
    "NaN.",
)
