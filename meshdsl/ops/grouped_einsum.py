"""Products of rows with the matrix of their group, as of tokens with the weights of their experts.

`grouped_einsum(x, w, sizes -> [dims])` is `einsum` where rows lie group by group along a dim of x,
and `sizes` says how many rows each group has (`jax.lax.ragged_dot`; `grouped_mm` of torch; Gale et
al. 2022, MegaBlocks). Rows after those of the last group are padding: they are not multiplied, and
are 0 in the result. `mask_padding` sets them to 0. A size below 0 counts as 0, and rows for which
there is no room are cut off.

`rows` is a promise for the counts of FLOPs and bytes; results do not depend on it. A device checks
it for the sizes that it has: where blocks are split, for its own, and before an exchange of rows
for those of all blocks (`device/counted_exchanges.py`).

The dims have these roles. `row` is the dim of x that `sizes` and w lack, and the result has.
`group` is the dim of `sizes` that x lacks: it chooses the matrix of w. Without one all rows before
the padding are of one group. The other dims of `sizes` are batches, each with groups of its own;
those that w has, too, choose the matrix as well, as a block of experts does.
"""

from __future__ import annotations

import math

from meshdsl.backends.runtime.indices import check_rows
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class _Roles:
    """The dims of a grouped product by their roles: `batches` w lacks, `blocks` of w it has."""

    row: str
    group: kit.Names
    batches: kit.Names
    blocks: kit.Names
    summed: kit.Names
    free: kit.Names

    @property
    def x(self) -> tuple[kit.Names, ...]:
        """The dims of x in the order of the kernel."""
        return self.blocks, self.batches, (self.row,), self.summed

    @property
    def w(self) -> tuple[kit.Names, ...]:
        """The dims of w."""
        return self.blocks, self.group, self.summed, self.free

    @property
    def sizes(self) -> tuple[kit.Names, ...]:
        """The dims of the sizes."""
        return self.blocks, self.batches, self.group

    @property
    def out(self) -> tuple[kit.Names, ...]:
        """The dims of the product."""
        return self.blocks, self.batches, (self.row,), self.free


def _roles(ins: kit.Types, out: kit.Names) -> _Roles:
    """The roles of all dims; of a gradient's operands, too."""
    x, w, sizes = ins
    rows = [n for n in x.names if n in out and not w.has(n) and not sizes.has(n)]
    batches = tuple(n for n in sizes.names if x.has(n))
    return _Roles(
        rows[0],
        tuple(n for n in sizes.names if not x.has(n)),
        tuple(n for n in batches if not w.has(n)),
        tuple(n for n in batches if w.has(n)),
        tuple(n for n in x.names if w.has(n) and n not in batches),
        tuple(n for n in w.names if not x.has(n) and not sizes.has(n)),
    )


def _outer_roles(ins: kit.Types, out: kit.Names) -> _Roles:
    """The roles in the gradient of w, which is `out`."""
    x, y, sizes = ins
    batches = tuple(n for n in sizes.names if x.has(n))
    return _Roles(
        _outer_row_dim(ins, {}),
        tuple(n for n in sizes.names if not x.has(n)),
        tuple(n for n in batches if n not in out),
        tuple(n for n in batches if n in out),
        tuple(n for n in x.names if not y.has(n)),
        tuple(n for n in y.names if not x.has(n)),
    )


def _row_dim(ins: kit.Types, attrs: kit.Attrs) -> str:
    """The dim of a `grouped_einsum` along which rows lie."""
    return _roles(ins, tuple(d.name for d in attrs["dims"])).row


def _outer_row_dim(ins: kit.Types, attrs: kit.Attrs) -> str:
    """The dim of a `grouped_outer` along which rows lie."""
    del attrs
    x, y, sizes = ins
    (row,) = (n for n in x.names if y.has(n) and not sizes.has(n))
    return row


def _filled(ins: kit.Types, attrs: kit.Attrs) -> tuple[kit.Names, int]:
    """The dims of x, of the sizes and of w; over these and the rows, how many rows there are."""
    x, w, sizes = ins
    return tuple(n for n in sizes.names if x.has(n) and w.has(n)), attrs["rows"]


def batch_dims(sizes: kit.TensorType, x: kit.TensorType) -> kit.Names:
    """The dims of the sizes along which x has groups of its own."""
    return tuple(n for n in sizes.names if x.has(n))


# --- shapes ----------------------------------------------------------------------------------

_NAME = "grouped_einsum"


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    x, w, sizes = ins
    kit.need_kind(_NAME, "float", x, w)
    dtype = kit.need_one_dtype(_NAME, x, w)
    kit.merged_dims(_NAME, *ins)
    kit.need_distinct(_NAME, attrs["dims"])
    _need_sizes(_NAME, sizes, x)
    out = tuple(d.name for d in attrs["dims"])
    _need_row(x, w, sizes, out)
    roles = _roles(ins, out)
    expected = {n for group in roles.out for n in group}
    lacks = [n for n in (*x.names, *w.names, *sizes.names) if n not in {*expected, *out}]
    gone = [n for n in lacks if n not in roles.summed and n not in roles.group]
    missing = [n for n in expected if n not in out]
    surplus = [n for n in out if n not in expected]
    if gone or missing or surplus or not set(roles.group) <= set(w.names):
        raise kit.OpError("MD0207", *_misfit(roles, w, missing + gone, surplus))
    return (kit.TensorType(attrs["dims"], dtype),)


def _need_sizes(said: str, sizes: kit.TensorType, x: kit.TensorType) -> None:
    """The sizes are integers, of one dim of groups at most."""
    if sizes.dtype.kind != "int":
        message = f"the sizes of `{said}` must be integers, not {sizes}"
        raise kit.OpError("MD0202", message, "convert them: `cast(sizes, i32)`")
    groups = [n for n in sizes.names if not x.has(n)]
    if len(groups) > 1:
        message = f"the sizes of `{said}` have {kit.listed(groups)}, which {x} lacks"
        names = ", ".join(groups)
        help = f"only one dim counts the groups: merge them, `sizes[({names}) -> groups]`"
        raise kit.OpError("MD0207", message, help)


def _need_row(x: kit.TensorType, w: kit.TensorType, sizes: kit.TensorType, out: kit.Names) -> None:
    """Exactly one dim of x has the rows of the groups."""
    rows = [n for n in x.names if n in out and not w.has(n) and not sizes.has(n)]
    if len(rows) != 1:
        which = f"{kit.listed(rows)} could each be" if rows else f"no dim of {x} can be"
        message = f"{which} the dim of the rows of `{_NAME}`"
        help = (
            "exactly one dim that x and the result share must be absent from w and the sizes; "
            "give the sizes every other dim that x and the result share"
        )
        raise kit.OpError("MD0207", message, help)


def _misfit(
    roles: _Roles, w: kit.TensorType, missing: list[str], surplus: list[str]
) -> tuple[str, str]:
    """What is wrong with the dims of a call, and what they should be."""
    help = f"its result may have {kit.listed([n for group in roles.out for n in group])}"
    if surplus:
        return f"the result of `{_NAME}` cannot have {kit.listed(surplus)}", help
    if missing:
        return f"`{_NAME}` cannot sum over {kit.listed(missing)}", help
    return (
        f"{w} lacks the dim {kit.listed(roles.group)} of the sizes",
        "each group has a matrix of its own: give w this dim",
    )


def _bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """With `of`, the positions that at most `rows` fill; 0 rows stand for all of them."""
    x, w, sizes = ins
    out = tuple(d.name for d in attrs["dims"])
    _need_row(x, w, sizes, out)
    roles = _roles(ins, out)
    of = math.prod(x.size(n) for n in (*roles.blocks, roles.row))
    rows = attrs["rows"] or of
    if not isinstance(rows, int) or isinstance(rows, bool) or not 0 < rows <= of:
        message = f"`rows` of `{_NAME}` is {rows}, and there are {of} positions"
        raise kit.OpError("MD0213", message, f"write a number from 1 to {of}, or leave it out")
    return {**attrs, "rows": rows, "of": of}


# --- placements ------------------------------------------------------------------------------


def _factors(sig: kit.Signature) -> kit.Factors:
    """Every dim but that of groups is a loop: where a group's rows begin follows from all sizes."""
    roles = _roles(sig.ins, sig.outs[0].names)
    plain = (*roles.blocks, *roles.batches, roles.row, *roles.free)
    loops = [kit.loop(sig, name) for name in plain]
    loops += [kit.loop(sig, name, "sum") for name in roles.summed]
    return kit.Factors(tuple(loops), (frozenset({0}), frozenset({1})))


def _outer_factors(sig: kit.Signature) -> kit.Factors:
    roles = _outer_roles(sig.ins, sig.outs[0].names)
    loops = [kit.loop(sig, name) for name in (*roles.blocks, *roles.summed, *roles.free)]
    loops += [kit.loop(sig, name, "sum") for name in (*roles.batches, roles.row)]
    return kit.Factors(tuple(loops), (frozenset({0}), frozenset({1})))


def _mask_factors(sig: kit.Signature) -> kit.Factors:
    return kit.Factors(kit.loops(sig), (frozenset({0}),), (0,))


# --- numpy -----------------------------------------------------------------------------------


def _group_of_rows(call: kit.NumpyCall, sizes: kit.Array, roles: _Roles) -> kit.Array:
    """The group of each local row, over blocks, batches, row; the number of groups for padding."""
    names = call.ins[-1].names
    order = [names.index(n) for n in (*roles.blocks, *roles.batches, *roles.group)]
    sizes = sizes.transpose(order)
    if not roles.group:
        sizes = sizes[..., None]
    ends = np.cumsum(np.maximum(sizes, 0), axis=-1)
    rows = call.offset(roles.row) + np.arange(call.extent(roles.row))
    groups: kit.Array = (ends[..., None, :] <= rows[:, None]).sum(-1)
    return groups


def _check_rows(call: kit.NumpyCall, roles: _Roles, sizes: kit.Array) -> None:
    """Raises TooManyRows."""
    most, room = call.attrs["rows"], call.size(roles.row)
    if most < call.attrs["of"]:
        names = [n for dims in roles.sizes for n in dims]
        order = [call.ins[2].index(n) for n in names]
        extents = [math.prod(map(call.extent, dims)) for dims in roles.sizes]
        check_rows(sizes.transpose(order).reshape(extents), most, room, call.place)


def _numpy(call: kit.NumpyCall, x: kit.Array, w: kit.Array, sizes: kit.Array) -> kit.Array:
    roles = _roles(call.ins, call.outs[0].names)
    where = (*roles.blocks, *roles.batches, roles.row)
    _check_rows(call, roles, sizes)
    groups, out = _group_of_rows(call, sizes, roles), call.outs[0].names
    product = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    of_group = tuple(n for n in call.ins[1].names if n not in roles.group)
    for g in range(call.extent(roles.group[0]) if roles.group else 1):
        matrix = w.take(g, call.ins[1].index(roles.group[0])) if roles.group else w
        by_group = kit.einsum_by_name((x, call.ins[0].names), (matrix, of_group), to=out)
        # A sum would bring what is not finite in one matrix to the rows of all.
        product = np.where(kit.fitted(groups == g, where, out), by_group, product)
    return product


def _outer_numpy(call: kit.NumpyCall, x: kit.Array, y: kit.Array, sizes: kit.Array) -> kit.Array:
    roles = _outer_roles(call.ins, call.outs[0].names)
    where = (*roles.blocks, *roles.batches, roles.row)
    groups, out = _group_of_rows(call, sizes, roles), call.outs[0]
    of_group = tuple(n for n in out.names if n not in roles.group)
    parts = []
    for g in range(call.extent(roles.group[0]) if roles.group else 1):
        here = groups == g
        operands = (
            (np.where(kit.fitted(here, where, t.names), a, 0), t.names)
            for a, t in zip((x, y), call.ins[:2], strict=True)
        )
        parts.append(kit.einsum_by_name(*operands, to=of_group))
    return np.stack(parts, out.index(roles.group[0])) if roles.group else parts[0]


def _mask_numpy(call: kit.NumpyCall, x: kit.Array, sizes: kit.Array) -> kit.Array:
    x_type, names = call.ins[0], call.ins[1].names
    gone = tuple(i for i, n in enumerate(names) if not x_type.has(n))
    ends = np.maximum(sizes, 0).sum(gone)
    row = call.attrs["dim"].name
    there = kit.fitted(ends, [n for n in names if x_type.has(n)], x_type.names)
    rows = call.offset(row) + np.arange(call.extent(row))
    return np.where(kit.fitted(rows, (row,), x_type.names) < there, x, 0)


# --- torch -----------------------------------------------------------------------------------


def _torch(call: kit.TorchCall) -> str:
    roles = _roles(call.ins, call.outs[0].names)
    grouped = (roles.x, roles.w, roles.sizes)
    operands = [
        kit.grouped(call.tensor(i), t.names, groups)
        for i, (t, groups) in enumerate(zip(call.ins, grouped, strict=True))
    ]
    most = call.attrs["rows"]
    if most < call.attrs["of"] and not call.seen(2, f"at most {most} rows"):
        check = f"{call.use('check_rows')}({operands[2]}, {most}, {call.size(roles.row)}"
        operands[2] = f"{check}, {call.place})"
    start = f", {call.offset(roles.row)}" if call.is_split(roles.row) else ""
    text = f"{call.use('grouped_product')}({', '.join(operands)}{start})"
    return kit.ungrouped(call, text, roles.out, call.outs[0].names)


def _outer_torch(call: kit.TorchCall) -> str:
    out = call.outs[0].names
    roles = _outer_roles(call.ins, out)
    grouped = (roles.x, (*roles.out[:3], roles.free), roles.sizes)
    operands = (
        kit.grouped(call.tensor(i), t.names, groups)
        for i, (t, groups) in enumerate(zip(call.ins, grouped, strict=True))
    )
    start = f", {call.offset(roles.row)}" if call.is_split(roles.row) else ""
    text = f"{call.use('grouped_outer')}({', '.join(operands)}{start})"
    return kit.ungrouped(call, text, roles.w, out)


def _mask_torch(call: kit.TorchCall) -> str:
    x, names, row = call.ins[0], call.ins[1].names, call.attrs["dim"].name
    gone = [i for i, n in enumerate(names) if not x.has(n)]
    sizes = f"{call.tensor(1)}.clamp(min=0)"
    ends = f"{sizes}.sum({kit.one_or_tuple(gone)})" if gone else sizes
    there = kit.aligned(f"{ends}", tuple(n for n in names if x.has(n)), x.names)
    rows = kit.aligned(f"({kit.range_text(call, row, 'torch.int64')})", (row,), x.names)
    return f"{call.tensor(0)}.where({rows} < {there}, 0)"


# --- gradients -------------------------------------------------------------------------------


def _gradient(call: kit.Backward) -> kit.Grads:
    """As of any product: the cotangent times the other operand, along the rows of each group."""
    filled = {"rows": call.attrs["rows"], "of": call.attrs["of"]}
    x, w, sizes = (call.operand(i) for i in range(3))
    return kit.by_operand(
        call,
        lambda: call.emit(_NAME, kit.full_grad(call), w, sizes, dims=call.ins[0].dims, **filled),
        lambda: call.emit(
            "grouped_outer", x, kit.full_grad(call), sizes, dims=call.ins[1].dims, **filled
        ),
    )


def _outer_gradient(call: kit.Backward) -> kit.Grads:
    filled = {"rows": call.attrs["rows"], "of": call.attrs["of"]}
    x, y, sizes = (call.operand(i) for i in range(3))
    return kit.by_operand(
        call,
        lambda: call.emit(_NAME, y, kit.full_grad(call), sizes, dims=call.ins[0].dims, **filled),
        lambda: call.emit(_NAME, x, kit.full_grad(call), sizes, dims=call.ins[1].dims, **filled),
    )


def _mask_gradient(call: kit.Backward) -> kit.Grads:
    dim = call.attrs["dim"]
    grad = kit.full_grad(call)
    return {0: call.emit("mask_padding", grad, call.operand(1), dim=dim)}


# --- costs -----------------------------------------------------------------------------------


def _share(loops: int, attrs: kit.Attrs) -> int:
    """Of the operations on all positions, those on rows: as many on each device as on others."""
    return -(-loops * int(attrs["rows"]) // int(attrs["of"]))


def _flops(sig: kit.Signature) -> int:
    roles = _roles(sig.ins, sig.outs[0].names)
    summed = math.prod(sig.ins[0].size(n) for n in roles.summed)
    return _share((2 if roles.summed else 1) * sig.outs[0].elements * summed, sig.attrs)


def _outer_flops(sig: kit.Signature) -> int:
    roles = _outer_roles(sig.ins, sig.outs[0].names)
    free = math.prod(sig.ins[1].size(n) for n in roles.free)
    return _share(2 * sig.ins[0].elements * free, sig.attrs)


def _mask_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    x, sizes = ins
    kit.need_kind("mask_padding", "number", x)
    kit.need_dims("mask_padding", x, (attrs["dim"],))
    kit.merged_dims("mask_padding", *ins)
    _need_sizes("mask_padding", sizes, x)
    if sizes.has(attrs["dim"].name):
        message = f"the sizes of `mask_padding` cannot have `{attrs['dim']}`, the dim of the rows"
        raise kit.OpError(
            "MD0207", message, f"give one count of rows along `{attrs['dim']}` for each group"
        )
    return (x,)


kit.operator(
    _NAME,
    kit.Surface("out", (3, 3), (("rows", 0),)),
    _infer,
    _factors,
    _numpy,
    _torch,
    kit.samples(
        "row=12 h; g=2 h m=2; g: i32 | dims=(row m) rows=12 of=12",
        "b row=12 h; g=2 h m=2; b g: i32 | dims=(b row m) rows=12 of=12",
        "b c=2 s h; c m=2 h; c b: i32 | dims=(c b s m) rows=8 of=8",
        "c=2 b row=12 h; c g=2 m=2 h; b c g: i32 | dims=(b m c row) rows=24 of=24",
        "s; m=2; (): i32 | dims=(s m) rows=4 of=4",
        values="int int index:v",
    ),
    flops=_flops,
    bind=_bind,
    gradient=_gradient,
    grouped=kit.GroupedRows(_row_dim, 2, (0,), True, _filled),
    precision="compute",
    meaning="The product of the rows along a dim of x with the matrices w of their groups: rows "
    "lie group by group, as many as `sizes` says, and are 0 after the last group.",
)

kit.operator(
    "grouped_outer",
    kit.Surface("view", (3, 3)),
    lambda ins, attrs: (kit.TensorType(attrs["dims"], ins[0].dtype),),
    _outer_factors,
    _outer_numpy,
    _outer_torch,
    kit.samples(
        "row=12 h; row m=2; g=2: i32 | dims=(g h m) rows=12 of=12",
        "b row=12 h; b row m=2; b g=2: i32 | dims=(g m h) rows=12 of=12",
        "b c=2 s h; c b s m=2; c b: i32 | dims=(c m h) rows=8 of=8",
        values="int int index:v",
    ),
    flops=_outer_flops,
    gradient=_outer_gradient,
    grouped=kit.GroupedRows(_outer_row_dim, 2, (0, 1), False),
    precision="compute",
    meaning="The gradient of the matrices of a `grouped_einsum`: of each group, the sum of the "
    "outer products of its rows.",
)

kit.operator(
    "mask_padding",
    kit.Surface("dim", (2, 2)),
    _mask_infer,
    _mask_factors,
    _mask_numpy,
    _mask_torch,
    kit.samples(
        "s h; s: i32 | dim=h",
        "b row=12 h; b g=2: i32 | dim=row",
        "b row=12; g=2: i32 | dim=row",
        "h s; (): i32 | dim=h",
        values="int index:v",
    ),
    gradient=_mask_gradient,
    grouped=kit.GroupedRows(lambda ins, attrs: attrs["dim"].name, 1, (0,), True),
    meaning="x with 0 in the padding: along a dim, after as many rows as `sizes` adds up to.",
)
