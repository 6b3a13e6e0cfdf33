"""What each worker has by itself: parts of a sum as blocks of a dim, sparse, in bits and in bytes.

Compressions of gradients are written in these (`named/workers.py`); the language has no calls of
them.
"""

from __future__ import annotations

import itertools
import math

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.backends.runtime.values import block
from meshdsl.ops import kit

BITS = 32
"""The signs in one word of i32."""

LARGEST = 127
"""The largest multiple of a scale in a byte."""

# --- parts -------------------------------------------------------------------------------------


def _parts_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    out = np.zeros((call.extent(call.attrs["dim"].name), *x.shape), x.dtype)
    out[0] = x
    return out


def _parts_text(call: kit.TorchCall) -> str:
    dim, x = call.attrs["dim"], f"{call.tensor(0)}.unsqueeze(0)"
    if dim.size == 1 or call.is_split(dim.name):
        return x
    return kit.padded_at(x, len(call.ins[0].dims) + 1, 0, 0, dim.size - 1)


kit.operator(
    "parts",
    kit.Surface("view", (1, 1)),
    lambda ins, attrs: (kit.TensorType((attrs["dim"], *ins[0].dims), ins[0].dtype),),
    # The loop over the parts is left out: `placed/from_named.py` places those of a partial sum.
    kit.plain(linear=[(0,)], monotone=[0], whole=True),
    _parts_numpy,
    _parts_text,
    kit.samples("b h | dim=part=2", "() | dim=part=2", "s | dim=one=1"),
    shows=lambda ins, attrs: True,
    flops=kit.no_flops,
    meaning="The parts of a sum, each at its own index of a new dim: those that devices have "
    "of a partial sum, and of a whole tensor itself and zeros.",
)

# --- scatter_parts -----------------------------------------------------------------------------


def _scatter_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    values, index = ins
    assert values.dims == index.dims, f"scatter_parts of {values} at {index}"
    return (kit.TensorType((*values.dims[1:-1], attrs["dim"]), values.dtype),)


def _scatter_numpy(call: kit.NumpyCall, values: kit.Array, index: kit.Array) -> kit.Array:
    dim = call.attrs["dim"]
    out = np.zeros((*values.shape[1:-1], dim.size), values.dtype)
    for part, at in zip(values, index, strict=True):
        here = np.take_along_axis(out, at, -1)
        np.put_along_axis(out, at, here + part, -1)
    return kit.own_block(call, out, dim.name)


def _scatter_text(call: kit.TorchCall) -> str:
    dim = call.attrs["dim"]
    every = f"{call.use('scatter_parts')}({call.tensor(0)}, {call.tensor(1)}, {dim.size})"
    return kit.block_text(call, every, dim.name, -1)


kit.operator(
    "scatter_parts",
    kit.Surface("view", (2, 2)),
    _scatter_infer,
    kit.plain(linear=[(0,)]),
    _scatter_numpy,
    _scatter_text,
    kit.samples(
        "b s one=1; b s one: i32 | dim=v", "b one=1; b one: i32 | dim=v", values="int index:v"
    ),
    flops=lambda sig: sig.ins[0].elements,
    true_rows=kit.rows_with_reason(
        "every device reads what all have sent, which is less than a dense sum",
        "S(b), S(b) -> P",
    ),
    indices=1,
    ordered="dim",
    meaning="The sum of sparse parts, one after the other: values at their indices of a dim, "
    "which inside of a part are distinct.",
)

# --- signs -------------------------------------------------------------------------------------


def _pack_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("pack_signs", "float", ins[0])
    assert ins[0].names[-1] == attrs["dim"].name, f"pack_signs of {ins[0]}"
    return (kit.TensorType(ins[0].dims[:-1], kit.I32),)


def _pack_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    del call
    words = ((x >= 0).astype(np.int64) << np.arange(x.shape[-1])).sum(-1)
    return np.asarray(words.astype(np.uint32).view(np.int32))


def _unpack_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("unpack_signs", "int", ins[0])
    return (kit.TensorType((*ins[0].dims, attrs["dim"]), attrs["dtype"]),)


def _unpack_numpy(call: kit.NumpyCall, words: kit.Array) -> kit.Array:
    bits = (words[..., None].astype(np.int64) >> np.arange(BITS)) & 1
    return np.asarray(2 * bits - 1, kit.numpy_dtype(call.outs[0].dtype))


kit.operator(
    "pack_signs",
    kit.Surface("view", (1, 1)),
    _pack_infer,
    kit.plain(whole=True),
    _pack_numpy,
    lambda call: f"{call.use('pack_signs')}({call.tensor(0)})",
    kit.samples("b s bit=32 | dim=bit", "bit=32: f64 | dim=bit"),
    flops=lambda sig: sig.ins[0].elements,
    scratch=lambda sig, numbers: 2 * 4 * sig.ins[0].elements,  # bits as i32, before and shifted
    meaning="32 signs in a word of i32, the first in the lowest bit: 1 from zero on.",
)

kit.operator(
    "unpack_signs",
    kit.Surface("view", (1, 1)),
    _unpack_infer,
    kit.plain(whole=True),
    _unpack_numpy,
    lambda call: f"{call.use('unpack_signs')}({call.tensor(0)}, {call.outs[0].dtype.torch})",
    kit.samples("b s: i32 | dim=bit=32 dtype=f32", "(): i32 | dim=bit=32 dtype=f64"),
    flops=lambda sig: sig.outs[0].elements,
    scratch=lambda sig, numbers: 2 * 4 * sig.outs[0].elements,  # bits as i32
    meaning="The signs in words of `pack_signs`, as 1 and -1.",
)

# --- bytes -------------------------------------------------------------------------------------


def _replaced_last(type_: kit.TensorType, attrs: kit.Attrs, dtype: kit.DType) -> kit.Types:
    old, new = attrs["dims"]
    assert type_.names[-1] == old.name, f"{type_} by {old}"
    return (kit.TensorType((*type_.dims[:-1], new), dtype),)


def _pack_int8_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("pack_int8", "float", ins[0])
    return _replaced_last(ins[0], attrs, kit.I32)


def _pack_int8_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    del call
    wide = np.promote_types(x.dtype, np.float32)
    scale = (np.abs(x).max(-1, keepdims=True).astype(wide) / LARGEST).astype(np.float32)
    with np.errstate(invalid="ignore"):  # of NaN and infinities: their scale says what they are
        multiples = np.rint(x / np.where(scale == 0, np.float32(1), scale))
    multiples = np.nan_to_num(multiples, nan=0.0, posinf=0.0, neginf=0.0)
    missing = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)]
    words = np.pad(multiples.astype(np.int8), missing).view(np.int32)
    return np.concatenate([words, scale.view(np.int32)], -1)


def _unpack_int8_numpy(call: kit.NumpyCall, words: kit.Array) -> kit.Array:
    words = np.ascontiguousarray(words)
    scale = np.ascontiguousarray(words[..., -1:]).view(np.float32)
    multiples = np.ascontiguousarray(words[..., :-1]).view(np.int8)
    return np.asarray(multiples * scale.astype(np.float64), kit.numpy_dtype(call.outs[0].dtype))


def _unpack_int8_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("unpack_int8", "int", ins[0])
    return _replaced_last(ins[0], attrs, attrs["dtype"])


kit.operator(
    "pack_int8",
    kit.Surface("view", (1, 1)),
    _pack_int8_infer,
    kit.plain(whole=True),
    _pack_int8_numpy,
    lambda call: f"{call.use('pack_int8')}({call.tensor(0)})",
    kit.samples("b s number=8 | dims=(number word=3)", "number=4: f64 | dims=(number word=2)"),
    flops=lambda sig: 3 * sig.ins[0].elements,
    scratch=lambda sig, numbers: (sig.ins[0].dtype.bytes + 1) * sig.ins[0].elements,
    meaning="Numbers as multiples of a scale, -127 to 127, four in a word of i32; the last word "
    "has the bits of the scale, in f32: the greatest magnitude over 127.",
)

kit.operator(
    "unpack_int8",
    kit.Surface("view", (1, 1)),
    _unpack_int8_infer,
    kit.plain(whole=True),
    _unpack_int8_numpy,
    lambda call: f"{call.use('unpack_int8')}({call.tensor(0)}, {call.outs[0].dtype.torch})",
    kit.samples(
        "b s word=3: i32 | dims=(word number=8) dtype=f32",
        "word=2: i32 | dims=(word number=4) dtype=f64",
    ),
    flops=lambda sig: sig.outs[0].elements,
    scratch=lambda sig, numbers: (sig.outs[0].dtype.bytes + 1) * sig.outs[0].elements,
    true_rows=kit.rows_with_reason(
        "small integers are the bits of scales next to 0",
        "P(min) -> P",
        "P(min) -> P(min)",
        "P(min) -> P(max)",
    ),
    meaning="The numbers in words of `pack_int8`.",
)

# --- block_index -------------------------------------------------------------------------------


def _block_sizes(attrs: kit.Attrs) -> list[int]:
    ways, size = attrs["ways"], attrs["dim"].size
    return [block(size, ways, at)[1] for at in itertools.product(*map(range, ways))]


def _index_numpy(call: kit.NumpyCall) -> kit.Array:
    sizes, dim = _block_sizes(call.attrs), call.attrs["dim"].name
    numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return kit.own_block(call, numbers, dim)


def _index_text(call: kit.TorchCall) -> str:
    sizes, dim = _block_sizes(call.attrs), call.attrs["dim"]
    numbers = f"torch.arange({math.prod(call.attrs['ways'])}, dtype=torch.int32)"
    every = f"{numbers}.repeat_interleave(torch.tensor({sizes}), output_size={dim.size})"
    return kit.block_text(call, every, dim.name)


kit.operator(
    "block_index",
    kit.Surface("view", (0, 0)),
    kit.index_type,
    kit.plain(),
    _index_numpy,
    _index_text,
    kit.samples("| dim=s ways=(2)", "| dim=h ways=(2 2)", "| dim=s ways=(8)"),
    flops=kit.no_flops,
    ordered="dim",
    meaning="For each index of a dim, as i32, the number of its block where the dim is split "
    "in so many ways, the outer first.",
)
