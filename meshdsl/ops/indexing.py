"""Indexing by integer tensors: gather `table[vocab = ids]` and `one_hot[vocab](ids)`.

With the indexed dim split, each device serves the indices of its own rows: a gather yields zeros
for the others, so that the sum over devices is the row (Megatron's vocabulary-parallel embedding).
Indices are checked against the global size first.
"""

from __future__ import annotations

from meshdsl.backends.runtime.indices import check_index
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, zeros

# --- indices ---------------------------------------------------------------------------------


def need_indices(said: str, type_: kit.TensorType, dim: kit.Dim) -> None:
    """MD0211 unless `type_` is of integers, MD0205 if it has the dim that it indexes."""
    if type_.dtype.kind != "int":
        raise kit.OpError(
            "MD0211",
            f"`{said}` needs integer indices of `{dim}`, not {type_}",
            "declare them as `: i32`, or `cast(ids, i32)`",
            kit.Cast(type_, "i32"),
            also="or declare them as `: i32`",
        )
    if type_.has(dim.name):
        raise kit.OpError(
            "MD0205",
            f"the indices of `{dim}` have that dim themselves: {type_}",
            f"rename it first: `ids[{dim} -> other]`",
        )


def checked_numpy(
    call: kit.NumpyCall, index: int, array: kit.Array, dim: str, ignored: int | None = None
) -> kit.Array:
    """Operand `index` as i64 indices of `dim`, checked against its global size.

    The number `ignored` is allowed, too.
    """
    names = call.ins[index].names
    offsets = tuple(call.offset(n) for n in names)
    size = call.size(dim)
    return np.asarray(check_index(array, dim, size, call.place, names, offsets, ignored), np.int64)


def checked_text(call: kit.TorchCall, index: int, dim: str) -> str:
    """A variable with operand `index` as i64 indices of `dim`, checked at run time."""
    is_long = call.ins[index].dtype == kit.I64
    if call.seen(index, checked_as(dim, call.attrs)):
        if is_long or index in call.long:
            return call.long.get(index, call.args[index])
        return call.let_long(index, f"{call.tensor(index)}.long()")
    text = check_text(call, index, dim)
    if index in call.long:
        call.lines.append(text)
        return call.long[index]
    return call.let_long(index, text if is_long else f"{text}.long()")


def checked_number(call: kit.TorchCall, index: int, dim: str) -> str:
    """A variable with operand `index`, one number, as an index of `dim`, checked at run time.

    It is read on the host, as torch itself reads one to slice by it.
    """
    is_seen = call.seen(index, checked_as(dim, call.attrs))
    if index in call.numbers and not is_seen:
        call.lines.append(check_text(call, index, dim))
    if index in call.numbers:
        return call.numbers[index]
    text = call.tensor(index) if is_seen else check_text(call, index, dim)
    return call.let_number(index, f"int({text})")


def checked_as(dim: str, attrs: kit.Attrs) -> str:
    """What operands of an operator are once they are checked: indices of `dim`, or the ignored."""
    ignored = attrs.get("ignore_index")
    return dim if ignored is None else f"{dim} or {ignored}"


def check_text(call: kit.TorchCall, index: int, dim: str) -> str:
    """The check that operand `index` is of indices of `dim`, or of the ignored one."""
    names, ignored = call.ins[index].names, call.attrs.get("ignore_index")
    offsets = kit.tuple_text([call.offset(n) for n in names])
    shown = kit.tuple_text([repr(n) for n in names])
    args = [call.tensor(index), repr(dim), call.size(dim), call.place, shown, offsets]
    args += [] if ignored is None else [ignored]
    return f"{call.use('check_index')}({', '.join(map(str, args))})"


def local_text(call: kit.TorchCall, index: str, dim: str, outside: str = "") -> str:
    """`index` counted from the first local element of `dim`, or `outside`; whether it is inside."""
    args = [index, call.offset(dim), call.extent(dim), *([outside] if outside else [])]
    return f"{call.use('local_index')}({', '.join(args)})"


def local_numpy(
    call: kit.NumpyCall, index: int, array: kit.Array, dim: str
) -> tuple[kit.Array, kit.Array]:
    """Operand `index` as `checked_numpy`, counted from the first local element; what is inside."""
    local = checked_numpy(call, index, array, dim) - call.offset(dim)
    return local, (local >= 0) & (local < call.extent(dim))


# --- gather ----------------------------------------------------------------------------------


def _gather_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    table, ids = ins
    dim = attrs["dim"]
    kit.need_dims("gather", table, (dim,))
    need_indices("gather", ids, dim)
    at = table.index(dim.name)
    new = tuple(d for d in ids.dims if not table.has(d.name))
    return (kit.TensorType((*table.dims[:at], *new, *table.dims[at + 1 :]), table.dtype),)


def _gather_factors(sig: kit.Signature) -> kit.Factors:
    # The parts of a boolean table do not add up, but "any" joins them.
    own = kit.loop(sig, sig.attrs["dim"].name, "max" if sig.ins[0].dtype == kit.BOOL else "sum")
    return kit.Factors((*kit.loops(sig), own), (frozenset({0}),), (0,))


def _gather_numpy(call: kit.NumpyCall, table: kit.Array, ids: kit.Array) -> kit.Array:
    dim = call.attrs["dim"].name
    index, inside = local_numpy(call, 1, ids, dim)
    if not call.extent(dim):  # an index is looked up before it is found to be another's
        table = np.zeros([max(n, 1) for n in table.shape], table.dtype)
    rows = _take(call, table, np.where(inside, index, 0))
    if not call.is_split(dim):
        return rows
    return np.where(
        kit.align(inside, call.ins[1], call.outs[0].dims), rows, np.zeros((), table.dtype)
    )


def _take(call: kit.NumpyCall, table: kit.Array, index: kit.Array) -> kit.Array:
    """The elements of `table` at local indices, for any dims that both have."""
    dims = call.outs[0].dims
    sizes = {d.name: n for t, a in zip(call.ins, (table, index), strict=True)
             for d, n in zip(t.dims, a.shape, strict=True)}  # fmt: skip
    key = []
    for name in call.ins[0].names:
        if name == call.attrs["dim"].name:
            key.append(kit.align(index, call.ins[1], dims))
        else:
            grid = kit.TensorType((kit.Dim(name, sizes[name]),), kit.I64)
            key.append(kit.align(np.arange(sizes[name]), grid, dims))
    return np.asarray(table[tuple(np.broadcast_arrays(*key))])


def _gather_text(call: kit.TorchCall) -> str:
    dim = call.attrs["dim"].name
    if not call.is_split(dim):
        checked = checked_text if call.ins[1].dims else checked_number
        return _taken_text(call, call.tensor(0), checked(call, 1, dim))
    index = checked_text(call, 1, dim)
    table = call.tensor(0)
    if call.may_be_empty(dim):  # an index is looked up before it is found to be another device's
        table = call.let("table", f"{call.use('with_row')}({table}, {call.ins[0].index(dim)})")
    local, inside = call.let_all(("local", "inside"), local_text(call, index, dim))
    rows = _taken_text(call, table, local)
    # The rows of others are replaced, not multiplied by zero: they might be NaN.
    zero = "False" if call.outs[0].dtype == kit.BOOL else "0"
    if not call.ins[1].dims:  # the row is a view of the table
        return f"torch.where({inside}, {rows}, {zero})"
    outside = kit.aligned(inside, call.ins[1].names, call.outs[0].names)
    return f"{rows}.masked_fill_(~{outside}, {zero})"


def _taken_text(call: kit.TorchCall, text: str, index: str) -> str:
    """The elements of the table `text` at `index`, a variable with the dims of the index tensor."""
    table, ids = call.ins
    dim = call.attrs["dim"].name
    at = table.index(dim)
    new = tuple(n for n in ids.names if not table.has(n))
    if len(new) == len(ids.names):
        return kit.indexed(text, at, index)
    if not new:
        return f"{_along(call, text, index, ids.names)}.squeeze({at})"
    if len(new) == 1:
        return _along(call, text, index, ids.names, new[0])
    shared = tuple(n for n in ids.names if n not in new)
    flat = f"{kit.permuted(index, ids.names, shared + new)}.flatten({len(shared)})"
    sizes = kit.tuple_text([call.extent(n) for n in new])
    return f"{_along(call, text, flat, (*shared, new[0]), new[0])}.unflatten({at}, {sizes})"


def _along(
    call: kit.TorchCall, table: str, index: str, names: tuple[str, ...], new: str = ""
) -> str:
    """`take_along_dim`, which pairs dims that both have; `new` replaces the indexed dim."""
    dim = call.attrs["dim"].name
    target = tuple(new if n == dim else n for n in call.ins[0].names)
    text = kit.aligned(index, names, target, full=True)
    return f"torch.take_along_dim({table}, {text}, {call.ins[0].index(dim)})"


def _gather_gradient(call: kit.Backward) -> kit.Grads:
    """The gradient by the table: a scatter-add; dims of it that the cotangent lacks stay out."""
    table, ids = call.ins
    dim = call.attrs["dim"]
    grad = kit.with_dims(call, *ids.dims)
    dims = tuple(d for d in table.dims if d == dim or grad.type.has(d.name))
    return {0: call.emit("scatter_add", grad, call.operand(1), dim=dim, dims=dims)}


kit.operator(
    "gather",
    kit.Surface("view", (2, 2)),
    _gather_infer,
    _gather_factors,
    _gather_numpy,
    _gather_text,
    kit.samples(
        "v h; b s: i32 | dim=v",
        "h v; s: i64 | dim=v",
        "v; (): i32 | dim=v",
        "s v b; b s: i32 | dim=v",
        "v b h; b s: i32 | dim=v",
        "h v s; b s: i32 | dim=v",
        "h v; b h s: i32 | dim=v",
        "v s: i32; s: i32 | dim=v",
        "v: bool; b s: i32 | dim=v",
        values="int index:v",
    ),
    flops=kit.no_flops,
    gradient=_gather_gradient,
    indices=1,
    relocates=True,
    shows=lambda ins, attrs: not ins[1].dims,  # an index that is one number: torch slices
    ordered="dim",
    zeros=zeros.gathered,
    meaning="The elements of a table at the given indices of one of its dims.",
)

# --- one_hot ---------------------------------------------------------------------------------


def _one_hot_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    need_indices("one_hot", ins[0], attrs["dim"])
    if attrs["dtype"].kind == "bool":
        raise kit.OpError("MD0213", "`one_hot` yields numbers", "compare: `iota[v] == ids`")
    return (kit.TensorType((*ins[0].dims, attrs["dim"]), attrs["dtype"]),)


def _one_hot_numpy(call: kit.NumpyCall, ids: kit.Array) -> kit.Array:
    dim = call.attrs["dim"].name
    index = checked_numpy(call, 0, ids, dim)
    positions = np.arange(call.extent(dim)) + call.offset(dim)
    return np.asarray(index[..., None] == positions, dtype=kit.numpy_dtype(call.outs[0].dtype))


def _one_hot_text(call: kit.TorchCall) -> str:
    dim = call.attrs["dim"].name
    index = checked_text(call, 0, dim)
    positions = kit.range_text(call, dim, "torch.int64")
    return f"({index}[..., None] == {positions}).to({call.outs[0].dtype.torch})"


kit.operator(
    "one_hot",
    kit.Surface("dim", (1, 1), (("dtype", kit.F32),)),
    _one_hot_infer,
    kit.plain(),
    _one_hot_numpy,
    _one_hot_text,
    kit.samples(
        "b s: i32 | dim=v dtype=f32",
        "(): i64 | dim=v dtype=f32",
        "b s h: i32 | dim=v dtype=i32",
        values="index:v",
    ),
    flops=kit.no_flops,
    indices=0,
    ordered="dim",
    zeros=zeros.one_along,
    meaning="1 at the index along a new dim, 0 elsewhere.",
)
