"""`scatter_add`, the gradient of a gather: each position's part added to the row it was taken from.

With the indexed dim split, each device sums the positions of its own rows; the parts of the
others go to one more row, which is cut off. Indices are checked here too: a program may have the
gradient alone, without the gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import indexing, kit


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """The type of the result: `dims` are `dim`, which is indexed, and any others of `dy`."""
    dy, ids = ins
    dims, dim = attrs["dims"], attrs["dim"]
    kit.need_distinct("scatter_add", dims)
    kit.need_dims("scatter_add", dy, ids.dims)
    kit.need_dims("scatter_add", dy, [d for d in dims if d != dim])
    gone = [d for d in dy.dims if d not in dims]
    kit.need_dims("scatter_add", ids, gone)
    assert dim in dims, f"scatter_add yields {dims}, without {dim}"
    return (kit.TensorType(dims, dy.dtype),)


def _factors(sig: kit.Signature) -> kit.Factors:
    gone = [n for n in sig.ins[0].names if not sig.outs[0].has(n)]
    summed = tuple(kit.loop(sig, n, "sum") for n in gone)
    return kit.Factors((*kit.loops(sig), *summed), (frozenset({0}),))


def _numpy(call: kit.NumpyCall, dy: kit.Array, ids: kit.Array) -> kit.Array:
    dim, dims = call.attrs["dim"].name, call.local(call.ins[0]).dims
    index, inside = (
        kit.align(a, call.ins[1], dims) for a in indexing.local_numpy(call, 1, ids, dim)
    )
    key = []
    for name in call.outs[0].names:
        grid = (kit.align(np.arange(d.size), kit.TensorType((d,), kit.I64), dims) for d in dims)
        local = np.where(inside, index, 0)
        key.append(local if name == dim else dict(zip(call.ins[0].names, grid, strict=True))[name])
    out = np.zeros(call.local(call.outs[0]).shape, dy.dtype)
    if not call.extent(dim):
        return out
    np.add.at(out, tuple(np.broadcast_arrays(*key, dy)[:-1]), np.where(inside, dy, 0))
    return out


# --- torch -----------------------------------------------------------------------------------


def _text(call: kit.TorchCall) -> str:
    dy, out, dim = call.ins[0], call.outs[0], call.attrs["dim"].name
    at, rows = out.index(dim), call.extent(dim)
    parts, target = _parts(call)
    # A sum of many small numbers in half precision would stop growing.
    is_half = dy.dtype.bytes < kit.F32.bytes
    parts = f"{parts}.float()" if is_half else parts
    parts = parts if parts.isidentifier() else call.let("parts", parts)
    spare = call.is_split(dim)
    shape = [_one_more(rows) if spare and n == dim else call.extent(n) for n in out.names]
    added = _added(call, f"{parts}.new_zeros({kit.tuple_text(shape)})", parts, _rows(call), target)
    trimmed = f"{added}.narrow({at}, 0, {rows})" if spare else added
    return f"{trimmed}.to({dy.dtype.torch})" if is_half else trimmed


def _adding_text(call: kit.TorchCall, total: str) -> str:
    """The parts added to an existing sum, which has all rows."""
    parts, target = _parts(call)
    parts = parts if parts.isidentifier() else call.let("parts", parts)
    return _added(call, total, parts, _rows(call), target)


def _may_add(sig: kit.Signature, split: frozenset[str], is_contiguous: bool) -> bool:
    """Whether no device has parts of others' rows, and nothing is rounded between."""
    del is_contiguous
    is_half = sig.outs[0].dtype.bytes < kit.F32.bytes
    return sig.attrs["dim"].name not in split and not is_half


def _parts(call: kit.TorchCall) -> tuple[str, kit.Names]:
    """The parts in the order of the result, their positions joined in one dim; their dims."""
    out, dim = call.outs[0], call.attrs["dim"].name
    at = out.index(dim)
    positions = tuple(n for n in call.ins[1].names if not out.has(n))
    target = (*out.names[:at], *positions, *out.names[at + 1 :])
    permuted = kit.permuted(call.tensor(0), call.ins[0].names, target)
    return kit.joined(permuted, at, len(positions)), target


def _one_more(count: str) -> str:
    return str(int(count) + 1) if count.isdigit() else f"{count} + 1"


def _rows(call: kit.TorchCall) -> str:
    """A variable with the local rows of the indices; past the end for rows of other devices."""
    dim = call.attrs["dim"].name
    index = indexing.checked_text(call, 1, dim)
    if not call.is_split(dim):
        return index
    local, inside = indexing.local_text(call, index, dim)
    return call.let("index", f"{local}.where({inside}, {call.extent(dim)})")


def _added(call: kit.TorchCall, zeros: str, parts: str, index: str, target: kit.Names) -> str:
    """`parts` added to `zeros` at the rows `index`; dims of both are paired."""
    ids, out, dim = call.ins[1].names, call.outs[0].names, call.attrs["dim"].name
    at = out.index(dim)
    positions = tuple(n for n in ids if n not in out)
    if len(positions) == len(ids):
        flat = index if len(ids) == 1 else f"{index}.reshape(-1)"
        return f"{zeros}.index_add_({at}, {flat}, {parts})"
    order = tuple(n for n in target if n in ids)
    start = len([n for n in out[:at] if n in ids])
    flat = kit.joined(kit.permuted(index, ids, order), start, len(positions))
    names = (*order[:start], dim, *order[start + len(positions) :])
    wide = kit.aligned(flat, names, out, full=True)
    return f"{zeros}.scatter_add_({at}, {wide}.expand_as({parts}), {parts})"


# --- gradient --------------------------------------------------------------------------------


def _gradient(call: kit.Backward) -> kit.Grads:
    """The gradient by the parts: the cotangent gathered at their positions."""
    grad, dim = call.grad, call.attrs["dim"]
    if not grad.type.has(dim.name):
        return {0: grad}
    return {0: call.emit("gather", grad, call.operand(1), dim=dim)}


def _scratch(sig: kit.Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of f32 copies for half precision: the parts, and the result before rounding."""
    del numbers
    is_half = sig.outs[0].dtype.bytes < kit.F32.bytes
    elements = sig.ins[0].elements + sig.outs[0].elements
    return elements * kit.F32.bytes if is_half else 0


kit.operator(
    "scatter_add",
    kit.Surface("view", (2, 2)),
    _infer,
    _factors,
    _numpy,
    _text,
    kit.samples(
        "b s h; b s: i32 | dim=v dims=(v h)",
        "h s; s: i64 | dim=v dims=(h v)",
        "h; (): i32 | dim=v dims=(v h)",
        "b s; b s: i32 | dim=v dims=(v)",
        "b s h; b s: i32 | dim=v dims=(s v h)",
        "s h b; b s: i32 | dim=v dims=(h v b)",
        "b s h; b s: i32 | dim=v dims=(s b v h)",
        values="int index:v",
    ),
    flops=lambda sig: sig.ins[0].elements,
    true_rows=kit.rows_with_reason(
        "only where no two positions can mean one row",
        "P(max), B -> P(max)",
        "P(min), B -> P(min)",
    ),
    gradient=_gradient,
    adds=_adding_text,
    adds_to=_may_add,
    scratch=_scratch,
    indices=1,
    ordered="dim",
    meaning="The gradient of `gather`: rows added up at the indices they were read from.",
)
