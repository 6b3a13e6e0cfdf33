"""`put[mem = pos](cache, new)`: a tensor with new elements at indices of one of its dims.

The indices are one number, or a tensor: dims of it that the tensor has are paired by name, one that
it lacks lists several positions. Of equal positions the last is written, in the order of that dim,
so that no layout changes the answer (the like of torch, JAX and XLA leave it open). With the
indexed dim split, each device writes what falls on its own block; nothing is sent.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import indexing, kit, zeros


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    x, new, ids = ins
    dim = attrs["dim"]
    kit.need_dims("put", x, (dim,))
    indexing.need_indices("put", ids, dim)
    kit.need_one_dtype("put", x, new)
    kit.merged_dims("put", *ins)
    places = _places(ins)
    if len(places) > 1:
        names = kit.listed([d.name for d in places])
        message = f"`put` writes along one dim of positions, and the indices have {names}"
        raise kit.OpError(
            "MD0236",
            message,
            "merge them first: `ids[(a, b) -> c]`, and the new values",
            kit.MergeDims((1, 2), tuple(d.name for d in places)),
        )
    extra = [d.name for d in new.dims if d == dim or not (x.has(d.name) or d in places)]
    if extra:
        message = (
            f"`put` writes {new} at indices of `{dim}` of {x}: no place for {kit.listed(extra)}"
        )
        help = f"new values have dims of the tensor but `{dim}`, and that of several positions"
        raise kit.OpError("MD0237", message, help)
    return (x,)


def _places(ins: kit.Types) -> tuple[kit.Dim, ...]:
    """The dims of the indices that list positions: those that the tensor lacks."""
    return tuple(d for d in ins[2].dims if not ins[0].has(d.name))


# --- numpy -----------------------------------------------------------------------------------


def _numpy(call: kit.NumpyCall, x: kit.Array, new: kit.Array, ids: kit.Array) -> kit.Array:
    dim, out, places = call.attrs["dim"], call.outs[0].dims, _places(call.ins)
    index = indexing.checked_numpy(call, 2, ids, dim.name) - call.offset(dim.name)
    hits = index[..., None] == np.arange(call.extent(dim.name))
    if not places:
        mask = kit.align(hits, kit.TensorType((*call.ins[2].dims, dim), kit.BOOL), out)
        return np.where(mask, kit.align(new, call.ins[1], out), x)
    (place,) = places
    at = call.ins[2].index(place.name)
    order = np.arange(index.shape[at]).reshape(-1, *(1,) * (hits.ndim - at - 1))
    last = np.where(hits, order, -1).max(at)
    last = kit.align(
        last, kit.TensorType((*call.ins[2].without(place.name).dims, dim), kit.I64), out
    )
    rows = kit.align(new, call.ins[1], tuple(place if d == dim else d for d in out))
    if call.ins[1].has(place.name):
        rows = np.take_along_axis(rows, last.clip(0), call.ins[0].index(dim.name))
    return np.where(last >= 0, rows, x)


# --- torch -----------------------------------------------------------------------------------


def _text(call: kit.TorchCall) -> str:
    dim, out = call.attrs["dim"].name, call.outs[0]
    ids = call.ins[2]
    checked = indexing.checked_text if ids.dims else indexing.checked_number
    index = call.args[2] if call.is_constant(2) else checked(call, 2, dim)
    if _places(call.ins):
        return _several(call, index)
    positions = kit.aligned(f"({kit.range_text(call, dim, 'torch.int64')})", (dim,), out.names)
    mask = f"{positions} == {kit.aligned(index, ids.names, out.names)}"
    return f"torch.where({mask}, {call.aligned(1, out.dims)}, {call.tensor(0)})"


def _over(call: kit.TorchCall) -> str:
    """Write at the indices alone; where several fall on a block, as on any other, in one pass."""
    dim, out, ids = call.attrs["dim"].name, call.outs[0].names, call.ins[2].names
    is_one_slice = not ids and len(call.ins[1].names) == len(out) - 1
    if is_one_slice and not call.is_split(dim) and not call.is_constant(2):
        at = indexing.checked_number(call, 2, dim)
        new = kit.permuted(call.args[1], call.ins[1].names, tuple(n for n in out if n != dim))
        call.lines.append(f"{kit.indexed(call.args[0], out.index(dim), at)} = {new}")
        return call.args[0]
    index = call.tensor(2) if call.is_constant(2) else indexing.checked_text(call, 2, dim)
    places = [d.name for d in _places(call.ins)]
    if places and call.is_split(dim):
        if call.is_constant(1):  # `torch.where` writes no literal over a tensor
            mask = _last(call, index)[1]
            return f"{call.args[0]}.masked_fill_({mask}, {call.args[1]})"
        return f"{_several(call, index)[:-1]}, out={call.args[0]})"
    target = tuple((places[0] if places else n) if n == dim else n for n in out)
    new = kit.aligned(call.tensor(1), call.ins[1].names, target, full=True)
    if places and call.ins[1].has(places[0]):
        shared = tuple(n for n in ids if n != places[0])
        order = kit.permuted(index, ids, (*shared, places[0]))
        last = f"{call.use('last_at')}({order}, {call.extent(dim)}).gather(-1, {order})"
        source = kit.aligned(call.let("last", last), (*shared, places[0]), target, full=True)
        new = f"torch.take_along_dim({new}, {source}, {out.index(dim)})"
    at = kit.aligned(index, ids, target, full=True)
    first = f", {call.offset(dim)}" if call.is_split(dim) else ""
    return f"{call.use('write_at')}({call.args[0]}, {out.index(dim)}, {at}, {new}{first})"


def _last(call: kit.TorchCall, index: str) -> tuple[str, str]:
    """The last position that names each row, -1 where there is none, and whether there is one."""
    dim, out, ids = call.attrs["dim"].name, call.outs[0].names, call.ins[2].names
    (place,) = (d.name for d in _places(call.ins))
    shared = tuple(n for n in ids if n != place)
    rows = call.extent(dim)
    if call.is_split(dim):
        index = call.let("local", f"{indexing.local_text(call, index, dim, rows)}[0]")
    text = f"{call.use('last_at')}({kit.permuted(index, ids, (*shared, place))}, {rows})"
    last = call.let("last", text)
    return last, kit.aligned(f"({last} >= 0)", (*shared, dim), out)


def _several(call: kit.TorchCall, index: str) -> str:
    """Each row from the last position that names it."""
    dim, out, ids = call.attrs["dim"].name, call.outs[0].names, call.ins[2].names
    (place,) = (d.name for d in _places(call.ins))
    shared = tuple(n for n in ids if n != place)
    last, mask = _last(call, index)
    if not call.ins[1].has(place):
        return f"torch.where({mask}, {call.aligned(1, call.outs[0].dims)}, {call.tensor(0)})"
    target = tuple(place if n == dim else n for n in out)
    new = kit.aligned(call.tensor(1), call.ins[1].names, target, full=True)
    source = kit.aligned(f"{last}.clamp(min=0)", (*shared, dim), out, full=True)
    rows = f"torch.take_along_dim({new}, {source}, {out.index(dim)})"
    return f"torch.where({mask}, {rows}, {call.tensor(0)})"


# --- gradient --------------------------------------------------------------------------------


def _gradient(call: kit.Backward) -> kit.Grads:
    """Of the tensor, zeros where it was written; of the new values, the rows that they became."""
    dim, grads, ids = call.attrs["dim"], dict[int, kit.Value](), call.operand(2)
    grad = kit.full_grad(call)
    if call.wanted(0):
        grads[0] = call.emit("put", grad, 0.0, ids, dim=dim)
    if call.wanted(1):
        rows = call.emit("gather", grad, ids, dim=dim)
        for place in _places(call.ins):
            shared = tuple(d for d in ids.type.dims if d != place)
            order = call.emit("iota", dim=place)
            nothing = call.emit("zeros", dims=(*shared, dim), dtype=kit.I32)
            last = call.emit("gather", call.emit("put", nothing, order, ids, dim=dim), ids, dim=dim)
            rows = call.emit("where", call.emit("eq", last, order), rows, kit.zero_like(call, grad))
        gone = tuple(d for d in rows.type.dims if not call.ins[1].has(d.name))
        rows = call.emit("sum", rows, dims=gone) if gone else rows
        grads[1] = rows
    return grads


_BOTH = "two partial operands at once come from two different reductions; one is enough"

kit.operator(
    "put",
    kit.Surface("dim", (3, 3), indexed=True),
    _infer,
    kit.plain(linear=[(0, 1)], monotone=[0, 1]),
    _numpy,
    _text,
    kit.samples(
        "b v h; b h; (): i32 | dim=v",
        "v b h; h b; b: i64 | dim=v",
        "v; (); (): i32 | dim=v",
        "h v; r=6 h; r: i32 | dim=v",
        "b v h; r=6; b r: i32 | dim=v",
        "b v; b; r=6 b: i32 | dim=v",
        "v b: bool; b: bool; (): i32 | dim=v",
        values="int int index:v",
    ),
    flops=kit.no_flops,
    in_place={0: _over},
    gradient=_gradient,
    true_rows=kit.rows_with_reason(
        _BOTH, "P(max), P(max), B -> P(max)", "P(min), P(min), B -> P(min)"
    ),
    indices=2,
    ordered="dim",
    zeros=zeros.written,
    meaning="The tensor with new values at an index of one of its dims, or at several; of "
    "equal indices the last is written.",
)
