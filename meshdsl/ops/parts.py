"""What each worker has by itself: parts of a sum as blocks of a dim, sparse and in single bits.

Compressions of gradients are written in these (`named/workers.py`); the language has no calls of
them.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from meshdsl.backends.runtime.values import block
from meshdsl.ir.types import F32, F64, I32, Dim, TensorType
from meshdsl.ops.opdef import (
    Attrs,
    Factors,
    NumpyCall,
    OpDef,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    VOCAB,
    Array,
    loops,
    need_kind,
    no_flops,
    numpy_dtype,
    sample,
    swapped,
    tensor,
)
from meshdsl.ops.torch_expressions import tuple_text

BITS = 32
"""The signs in one word of i32."""

# --- parts -------------------------------------------------------------------------------------


def _parts_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType((attrs["dim"], *ins[0].dims), ins[0].dtype),)


def _parts_factors(sig: Signature) -> Factors:
    """Without the loop over the parts: `placed/from_named.py` places those of a partial sum."""
    own = loops(sig, without=(sig.attrs["dim"].name,))
    return Factors(own, (frozenset({0}),), (0,))


def _parts_numpy(call: NumpyCall, x: Array) -> Array:
    out = np.zeros((call.extent(call.attrs["dim"].name), *x.shape), x.dtype)
    out[0] = x
    return out


def _parts_text(call: TorchCall) -> str:
    dim, x = call.attrs["dim"], f"{call.tensor(0)}.unsqueeze(0)"
    if dim.size == 1 or call.is_split(dim.name):
        return x
    widths = (*(0, 0) * len(call.ins[0].dims), 0, dim.size - 1)
    return f"torch.nn.functional.pad({x}, {tuple_text(widths)})"


_PARTS = Dim("part", 2)

register(
    OpDef(
        "parts",
        Surface("view", (1, 1)),
        _parts_infer,
        _parts_factors,
        _parts_numpy,
        _parts_text,
        (
            sample(tensor(BATCH, HIDDEN), dim=_PARTS),
            sample(tensor(), dim=_PARTS),
            sample(tensor(SEQ), dim=Dim("one", 1)),
        ),
        shows=lambda ins, attrs: True,
        flops=no_flops,
        meaning="The parts of a sum, each at its own index of a new dim: those that devices have "
        "of a partial sum, and of a whole tensor itself and zeros.",
    )
)

# --- scatter_parts -----------------------------------------------------------------------------


def _scatter_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    values, index = ins
    assert values.dims == index.dims, f"scatter_parts of {values} at {index}"
    return (TensorType((*values.dims[1:-1], attrs["dim"]), values.dtype),)


def _scatter_factors(sig: Signature) -> Factors:
    return Factors(loops(sig), (frozenset({0}),))


def _scatter_numpy(call: NumpyCall, values: Array, index: Array) -> Array:
    dim = call.attrs["dim"]
    out = np.zeros((*values.shape[1:-1], dim.size), values.dtype)
    for part, at in zip(values, index, strict=True):
        here = np.take_along_axis(out, at, -1)
        np.put_along_axis(out, at, here + part, -1)
    return out[..., call.offset(dim.name) :][..., : call.extent(dim.name)]


def _scatter_text(call: TorchCall) -> str:
    dim = call.attrs["dim"]
    every = f"{call.use('scatter_parts')}({call.tensor(0)}, {call.tensor(1)}, {dim.size})"
    if not call.is_split(dim.name):
        return every
    return f"{every}.narrow(-1, {call.offset(dim.name)}, {call.extent(dim.name)})"


_ONE = Dim("one", 1)

register(
    OpDef(
        "scatter_parts",
        Surface("view", (2, 2)),
        _scatter_infer,
        _scatter_factors,
        _scatter_numpy,
        _scatter_text,
        (
            sample(
                tensor(BATCH, SEQ, _ONE),
                tensor(BATCH, SEQ, _ONE, dtype=I32),
                values=("int", "index:v"),
                dim=VOCAB,
            ),
            sample(
                tensor(BATCH, _ONE),
                tensor(BATCH, _ONE, dtype=I32),
                values=("int", "index:v"),
                dim=VOCAB,
            ),
        ),
        flops=lambda sig: sig.ins[0].elements,
        true_rows=swapped(
            "every device reads what all have sent, which is less than a dense sum",
            "S(b), S(b) -> P",
        ),
        ordered="dim",
        meaning="The sum of sparse parts, one after the other: values at their indices of a dim, "
        "which inside of a part are distinct.",
    )
)

# --- signs -------------------------------------------------------------------------------------


def _pack_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_kind("pack_signs", "float", ins[0])
    assert ins[0].names[-1] == attrs["dim"].name, f"pack_signs of {ins[0]}"
    return (TensorType(ins[0].dims[:-1], I32),)


def _pack_numpy(call: NumpyCall, x: Array) -> Array:
    del call
    words = ((x >= 0).astype(np.int64) << np.arange(x.shape[-1])).sum(-1)
    return np.asarray(words.astype(np.uint32).view(np.int32))


def _unpack_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_kind("unpack_signs", "int", ins[0])
    return (TensorType((*ins[0].dims, attrs["dim"]), attrs["dtype"]),)


def _unpack_numpy(call: NumpyCall, words: Array) -> Array:
    bits = (words[..., None].astype(np.int64) >> np.arange(BITS)) & 1
    return np.asarray(2 * bits - 1, numpy_dtype(call.outs[0].dtype))


def _own_loops(sig: Signature) -> Factors:
    return Factors(loops(sig, without=(sig.attrs["dim"].name,)))


_BIT = Dim("bit", BITS)

register(
    OpDef(
        "pack_signs",
        Surface("view", (1, 1)),
        _pack_infer,
        _own_loops,
        _pack_numpy,
        lambda call: f"{call.use('pack_signs')}({call.tensor(0)})",
        (sample(tensor(BATCH, SEQ, _BIT), dim=_BIT), sample(tensor(_BIT, dtype=F64), dim=_BIT)),
        flops=lambda sig: sig.ins[0].elements,
        scratch=lambda sig, numbers: 2 * 4 * sig.ins[0].elements,  # bits as i32, before and shifted
        meaning="32 signs in a word of i32, the first in the lowest bit: 1 from zero on.",
    )
)

register(
    OpDef(
        "unpack_signs",
        Surface("view", (1, 1)),
        _unpack_infer,
        _own_loops,
        _unpack_numpy,
        lambda call: f"{call.use('unpack_signs')}({call.tensor(0)}, {call.outs[0].dtype.torch})",
        (
            sample(tensor(BATCH, SEQ, dtype=I32), dim=_BIT, dtype=F32),
            sample(tensor(dtype=I32), dim=_BIT, dtype=F64),
        ),
        flops=lambda sig: sig.outs[0].elements,
        scratch=lambda sig, numbers: 2 * 4 * sig.outs[0].elements,  # bits as i32
        meaning="The signs in words of `pack_signs`, as 1 and -1.",
    )
)

# --- block_index -------------------------------------------------------------------------------


def _index_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    del ins
    return (TensorType((attrs["dim"],), I32),)


def _block_sizes(attrs: Attrs) -> list[int]:
    ways, size = attrs["ways"], attrs["dim"].size
    return [block(size, ways, at)[1] for at in itertools.product(*map(range, ways))]


def _index_numpy(call: NumpyCall) -> Array:
    sizes, dim = _block_sizes(call.attrs), call.attrs["dim"].name
    numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return numbers[call.offset(dim) :][: call.extent(dim)]


def _index_text(call: TorchCall) -> str:
    sizes, dim = _block_sizes(call.attrs), call.attrs["dim"]
    numbers = f"torch.arange({math.prod(call.attrs['ways'])}, dtype=torch.int32)"
    every = f"{numbers}.repeat_interleave(torch.tensor({sizes}), output_size={dim.size})"
    if not call.is_split(dim.name):
        return every
    return f"{every}.narrow(0, {call.offset(dim.name)}, {call.extent(dim.name)})"


register(
    OpDef(
        "block_index",
        Surface("view", (0, 0)),
        _index_infer,
        lambda sig: Factors(loops(sig)),
        _index_numpy,
        _index_text,
        (sample(dim=SEQ, ways=(2,)), sample(dim=HIDDEN, ways=(2, 2)), sample(dim=SEQ, ways=(8,))),
        flops=no_flops,
        ordered="dim",
        meaning="For each index of a dim, as i32, the number of its block where the dim is split "
        "in so many ways, the outer first.",
    )
)
