"""`scatter_add`, the gradient of a gather: each position's part added to the row it was taken from.

With the indexed dim split, each device sums the positions of its own rows; the parts of the
others go to one more row, which is cut off. Indices are checked here too: a program may have the
gradient alone, without the gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.ir.types import F32, I32, I64, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.indexing import checked_numpy, checked_text
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
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
    align,
    loop,
    loops,
    need_dims,
    need_distinct,
    sample,
    swapped,
    tensor,
)
from meshdsl.ops.torch_expressions import Names, aligned, atom, permuted, tuple_text


def _infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    """The type of the result: `dims` are `dim`, which is indexed, and any others of `dy`."""
    dy, ids = ins
    dims, dim = attrs["dims"], attrs["dim"]
    need_distinct("scatter_add", dims)
    need_dims("scatter_add", dy, ids.dims)
    need_dims("scatter_add", dy, [d for d in dims if d != dim])
    gone = [d for d in dy.dims if d not in dims]
    need_dims("scatter_add", ids, gone)
    assert dim in dims, f"scatter_add yields {dims}, without {dim}"
    return (TensorType(dims, dy.dtype),)


def _factors(sig: Signature) -> Factors:
    gone = [n for n in sig.ins[0].names if not sig.outs[0].has(n)]
    summed = tuple(loop(sig, n, "sum") for n in gone)
    return Factors((*loops(sig), *summed), (frozenset({0}),))


def _numpy(call: NumpyCall, dy: Array, ids: Array) -> Array:
    dim, dims = call.attrs["dim"].name, call.local(call.ins[0]).dims
    index = align(checked_numpy(call, 1, ids, dim) - call.offset(dim), call.ins[1], dims)
    inside = (index >= 0) & (index < call.extent(dim))
    key = []
    for name in call.outs[0].names:
        grid = (align(np.arange(d.size), TensorType((d,), I64), dims) for d in dims)
        local = np.where(inside, index, 0)
        key.append(local if name == dim else dict(zip(call.ins[0].names, grid, strict=True))[name])
    out = np.zeros(call.local(call.outs[0]).shape, dy.dtype)
    if not call.extent(dim):
        return out
    np.add.at(out, tuple(np.broadcast_arrays(*key, dy)[:-1]), np.where(inside, dy, 0))
    return out


# --- torch -----------------------------------------------------------------------------------


def _text(call: TorchCall) -> str:
    dy, ids, out = call.ins[0], call.ins[1], call.outs[0]
    dim = call.attrs["dim"].name
    at, rows = out.index(dim), call.extent(dim)
    positions = tuple(n for n in ids.names if not out.has(n))
    target = (*out.names[:at], *positions, *out.names[at + 1 :])
    parts = _joined(permuted(call.tensor(0), dy.names, target), at, len(positions))
    # A sum of many small numbers in half precision would stop growing.
    is_half = dy.dtype.bytes < F32.bytes
    parts = f"{parts}.float()" if is_half else parts
    parts = parts if parts.isidentifier() else call.let("parts", parts)
    spare = call.is_split(dim)
    shape = [_one_more(rows) if spare and n == dim else call.extent(n) for n in out.names]
    added = _added(call, f"{parts}.new_zeros({tuple_text(shape)})", parts, _rows(call), target)
    trimmed = f"{added}.narrow({at}, 0, {rows})" if spare else added
    return f"{trimmed}.to({dy.dtype.torch})" if is_half else trimmed


def _one_more(count: str) -> str:
    return str(int(count) + 1) if count.isdigit() else f"{count} + 1"


def _joined(text: str, at: int, count: int) -> str:
    """`text` with its `count` dims from `at` on made one."""
    if count == 1:
        return text
    return f"{text}.flatten({at}, {at + count - 1})" if count else f"{text}.unsqueeze({at})"


def _rows(call: TorchCall) -> str:
    """A variable with the local rows of the indices; past the end for rows of other devices."""
    dim = call.attrs["dim"].name
    index = checked_text(call, 1, dim)
    if not call.is_split(dim):
        return index
    local = call.let("local", f"{index} - {atom(call.offset(dim))}")
    rows = call.extent(dim)
    return call.let("index", f"{local}.where(({local} >= 0) & ({local} < {rows}), {rows})")


def _added(call: TorchCall, zeros: str, parts: str, index: str, target: Names) -> str:
    """`parts` added to `zeros` at the rows `index`; dims of both are paired."""
    ids, out, dim = call.ins[1].names, call.outs[0].names, call.attrs["dim"].name
    at = out.index(dim)
    positions = tuple(n for n in ids if n not in out)
    if len(positions) == len(ids):
        flat = index if len(ids) == 1 else f"{index}.reshape(-1)"
        return f"{zeros}.index_add_({at}, {flat}, {parts})"
    order = tuple(n for n in target if n in ids)
    start = len([n for n in out[:at] if n in ids])
    flat = _joined(permuted(index, ids, order), start, len(positions))
    names = (*order[:start], dim, *order[start + len(positions) :])
    wide = aligned(flat, names, out, full=True)
    return f"{zeros}.scatter_add_({at}, {wide}.expand_as({parts}), {parts})"


# --- gradient --------------------------------------------------------------------------------


def _gradient(call: Backward) -> Mapping[int, Value]:
    """The gradient by the parts: the cotangent gathered at their positions."""
    grad, dim = call.grad, call.attrs["dim"]
    if not grad.type.has(dim.name):
        return {0: grad}
    return {0: call.emit("gather", grad, call.operand(1), dim=dim)}


_IDS = tensor(BATCH, SEQ, dtype=I32)
_AT = ("int", "index:v")
_B, _S, _H, _V = BATCH, SEQ, HIDDEN, VOCAB


def _scratch(sig: Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of f32 copies for half precision: the parts, and the result before rounding."""
    del numbers
    is_half = sig.outs[0].dtype.bytes < F32.bytes
    elements = sig.ins[0].elements + sig.outs[0].elements
    return elements * F32.bytes if is_half else 0


register(
    OpDef(
        "scatter_add",
        Surface("view", (2, 2)),
        _infer,
        _factors,
        _numpy,
        _text,
        (
            sample(tensor(_B, _S, _H), _IDS, values=_AT, dim=_V, dims=(_V, _H)),
            sample(tensor(_H, _S), tensor(_S, dtype=I64), values=_AT, dim=_V, dims=(_H, _V)),
            sample(tensor(_H), tensor(dtype=I32), values=_AT, dim=_V, dims=(_V, _H)),
            sample(tensor(_B, _S), _IDS, values=_AT, dim=_V, dims=(_V,)),
            sample(tensor(_B, _S, _H), _IDS, values=_AT, dim=_V, dims=(_S, _V, _H)),
            sample(tensor(_S, _H, _B), _IDS, values=_AT, dim=_V, dims=(_H, _V, _B)),
            sample(tensor(_B, _S, _H), _IDS, values=_AT, dim=_V, dims=(_S, _B, _V, _H)),
        ),
        flops=lambda sig: sig.ins[0].elements,
        true_rows=swapped(
            "only where no two positions can mean one row",
            "P(max), B -> P(max)",
            "P(min), B -> P(min)",
        ),
        gradient=_gradient,
        scratch=_scratch,
        ordered="dim",
        meaning="The gradient of `gather`: rows added up at the indices they were read from.",
    )
)
