"""`scatter_add[rows = ids](x)`: elements added up at the indices that each position has.

It is the sum over segments, a histogram where `x` is 1, and the gradient of a gather. Dims of the
indices that the result has are paired by name, the others list positions and are summed. With the
indexed dim split, each device sums the positions of its own rows; the elements of the others go to
one more row, which is cut off. Indices are checked here too: a program may have it without a
gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import indexing, kit


def _bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """`dims` as stated, or else those of `x`, with `dim` in the place of the positions."""
    if attrs["dims"] is not None:
        return attrs
    x, ids = ins
    positions = [i for i, d in enumerate(x.dims) if ids.has(d.name)]
    at = positions[0] if positions else 0
    before, after = (
        tuple(d for d in part if not ids.has(d.name)) for part in (x.dims[:at], x.dims[at:])
    )
    return {**attrs, "dims": (*before, attrs["dim"], *after)}


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """The type of the result: `dims` are `dim`, which is indexed, and others of the operands."""
    x, ids = ins
    dims, dim = attrs["dims"], attrs["dim"]
    kit.need_kind("scatter_add", "number", x)
    indexing.need_indices("scatter_add", ids, dim)
    if x.has(dim.name):
        message = f"`scatter_add` adds the dim `{dim}`, which {x} already has"
        raise kit.OpError("MD0205", message, f"rename it first: `x[{dim} -> other]`")
    kit.need_distinct("scatter_add", dims)
    every = kit.merged_dims("scatter_add", x, ids)
    strange = [d.name for d in dims if d not in (*every, dim)]
    if strange or dim not in dims:
        lacks = f"neither {x} nor {ids} has {kit.listed(strange)}"
        message = lacks if strange else f"the result of `scatter_add` lacks its dim `{dim}`"
        result_dims = [d.name for d in (*every, dim) if d in dims or not ids.has(d.name)]
        raise kit.OpError("MD0204", message, f"write `-> [{', '.join(result_dims)}]`")
    gone = [d.name for d in x.dims if d not in dims and not ids.has(d.name)]
    if gone:
        message = f"`scatter_add` sums only over dims of the indices, which lack {kit.listed(gone)}"
        raise kit.OpError("MD0204", message, f"sum first: `sum[{', '.join(gone)}](x)`")
    return (kit.TensorType(dims, x.dtype),)


def _factors(sig: kit.Signature) -> kit.Factors:
    every = dict.fromkeys(n for t in sig.ins for n in t.names)
    summed = tuple(kit.loop(sig, n, "sum") for n in every if not sig.outs[0].has(n))
    return kit.Factors((*kit.loops(sig), *summed), (frozenset({0}),))


def _flops(sig: kit.Signature) -> int:
    """An addition for each position, and element there."""
    return math.prod(d.size for d in kit.merged_dims("scatter_add", *sig.ins))


def _numpy(call: kit.NumpyCall, x: kit.Array, ids: kit.Array) -> kit.Array:
    dim = call.attrs["dim"].name
    dims = kit.merged_dims("scatter_add", *(call.local(t) for t in call.ins))
    index, inside = (
        kit.align(a, call.ins[1], dims) for a in indexing.local_numpy(call, 1, ids, dim)
    )
    key = []
    for name in call.outs[0].names:
        along = [np.arange(d.size) for d in dims if d.name == name]
        grid = kit.fitted(along[0], [name], [d.name for d in dims]) if along else None
        key.append(np.where(inside, index, 0) if grid is None else grid)
    out = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    if not call.extent(dim):
        return out
    added = np.where(inside, kit.align(x, call.ins[0], dims), 0)
    shape = [d.size for d in dims]
    np.add.at(out, tuple(np.broadcast_to(k, shape) for k in key), np.broadcast_to(added, shape))
    return out


# --- torch -----------------------------------------------------------------------------------


def _text(call: kit.TorchCall) -> str:
    x, out, dim = call.ins[0], call.outs[0], call.attrs["dim"].name
    at, rows = out.index(dim), call.extent(dim)
    parts, target = _parts(call)
    # A sum of many small numbers in half precision would stop growing.
    is_half = x.dtype.bytes < kit.F32.bytes
    parts = f"{parts}.float()" if is_half else parts
    parts = parts if parts.isidentifier() else call.let("parts", parts)
    spare = call.is_split(dim)
    shape = [_one_more(rows) if spare and n == dim else call.extent(n) for n in out.names]
    added = _added(call, f"{parts}.new_zeros({kit.tuple_text(shape)})", parts, _rows(call), target)
    trimmed = f"{added}.narrow({at}, 0, {rows})" if spare else added
    return f"{trimmed}.to({x.dtype.torch})" if is_half else trimmed


def _adding_text(call: kit.TorchCall, total: str) -> str:
    """The parts added to an existing sum, which has all rows."""
    dim = call.attrs["dim"].name
    if call.may_be_empty(dim):
        return f"{total}.add_({_text(call)})"
    inside = ""
    if call.is_split(dim):
        index = indexing.local_text(call, indexing.checked_text(call, 1, dim), dim)
        rows, inside = call.let_all(("local", "inside"), index)
    else:
        rows = _rows(call)
    parts, target = _parts(call, inside)
    is_read_twice = any(call.outs[0].has(d.name) for d in call.ins[1].dims)
    parts = call.let("parts", parts) if is_read_twice and not parts.isidentifier() else parts
    return _added(call, total, parts, rows, target)


def _may_add(sig: kit.Signature, split: frozenset[str], gaps: frozenset[int]) -> bool:
    """Whether nothing is rounded between, and what is another device's is small beside the sum.

    That is added as zeros, for which it is copied: one element for each of many rows.
    """
    del gaps
    is_half = sig.outs[0].dtype.bytes < kit.F32.bytes
    is_one = all(sig.outs[0].has(d.name) for d in sig.ins[1].dims)
    return not is_half and (is_one or sig.attrs["dim"].name not in split)


def _parts(call: kit.TorchCall, inside: str = "") -> tuple[str, kit.Names]:
    """The parts in the order of the result, their positions joined in one dim; their dims.

    They are 0 where they are not `inside`, a variable with the dims of the indices.
    """
    out, dim = call.outs[0], call.attrs["dim"].name
    at = out.index(dim)
    positions = tuple(d for d in call.ins[1].dims if not out.has(d.name))
    target = (*out.dims[:at], *positions, *out.dims[at + 1 :])
    names = tuple(d.name for d in target)
    is_one_number = call.is_constant(0) and set(names) == set(call.ins[1].names)
    parts = call.tensor(0) if inside and is_one_number else kit.expanded(call, 0, target)
    if inside:
        parts = f"{parts}.where({kit.aligned(inside, call.ins[1].names, names)}, 0)"
    return kit.joined(parts, at, len(positions)), names


def _one_more(count: str) -> str:
    return str(int(count) + 1) if count.isdigit() else f"{count} + 1"


def _rows(call: kit.TorchCall) -> str:
    """A variable with the local rows of the indices; past the end for rows of other devices."""
    dim = call.attrs["dim"].name
    index = indexing.checked_text(call, 1, dim)
    if not call.is_split(dim):
        return index
    return call.let("index", f"{indexing.local_text(call, index, dim, call.extent(dim))}[0]")


def _added(call: kit.TorchCall, zeros: str, parts: str, index: str, target: kit.Names) -> str:
    """`parts` added to `zeros` at the rows `index`; dims of both are paired."""
    ids, out, dim = call.ins[1].names, call.outs[0].names, call.attrs["dim"].name
    at = out.index(dim)
    positions = tuple(n for n in ids if n not in out)
    if len(positions) == len(ids):
        flat = index if len(ids) == 1 else f"{index}.flatten()"
        return f"{zeros}.index_add_({at}, {flat}, {parts})"
    order = tuple(n for n in target if n in ids)
    start = len([n for n in out[:at] if n in ids])
    flat = kit.joined(kit.permuted(index, ids, order), start, len(positions))
    names = (*order[:start], dim, *order[start + len(positions) :])
    wide = kit.aligned(flat, names, out, full=True)
    # An index for each part as it is, else one for all of a row.
    wide += "" if set(names) == set(out) else f".expand_as({parts})"
    return f"{zeros}.scatter_add_({at}, {wide}, {parts})"


# --- gradient --------------------------------------------------------------------------------


def _gradient(call: kit.Backward) -> kit.Grads:
    """The gradient by `x`: the cotangent gathered at the indices, summed over what `x` lacks."""
    rows, dim, ids = call.grad, call.attrs["dim"], call.ins[1]
    if rows.type.has(dim.name):
        rows = call.emit("gather", rows, call.operand(1), dim=dim)
    lacking = [d for d in ids.dims if not call.ins[0].has(d.name)]
    repeats = math.prod(d.size for d in lacking if not rows.type.has(d.name))
    summed = tuple(d for d in lacking if rows.type.has(d.name))
    rows = call.emit("sum", rows, dims=summed) if summed else rows
    return {0: call.emit("mul", rows, float(repeats)) if repeats > 1 else rows}


def _scratch(sig: kit.Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of f32 copies for half precision: the parts, and the result before rounding."""
    del numbers
    is_half = sig.outs[0].dtype.bytes < kit.F32.bytes
    elements = _flops(sig) + sig.outs[0].elements
    return elements * kit.F32.bytes if is_half else 0


kit.operator(
    "scatter_add",
    kit.Surface("rows", (2, 2), indexed=True),
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
        "(); b s: i32 | dim=v dims=(v)",
        "h s: i32; b s: i32 | dim=v dims=(v b h)",
        values="int index:v",
    ),
    flops=_flops,
    bind=_bind,
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
    meaning="The elements added up at their indices of a dim: sums of segments, a histogram of "
    "`1`, and the gradient of `gather`. Dims of the indices that the result lacks are summed.",
)
