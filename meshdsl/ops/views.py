"""Views `x[…]`: rename, split, merge, transpose, broadcast. They relabel, or repeat by stride.

A placement follows a dim through a split or merge as long as the outer parts are whole blocks:
splitting `model -> (heads, key)`, the axes of `model` fall to `heads` until it is fully split, and
further ones to `key` (GSPMD's reshape rule, with names).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, zeros

Splits = Mapping[str, int]
Legal = Callable[[kit.Signature, Splits, Splits], bool]

_INTERNAL = kit.Surface("view", (1, 1))


def view(
    name: str,
    infer: kit.Infer,
    factors: Callable[[kit.Signature], kit.Factors],
    numpy: Callable[[kit.NumpyCall, kit.Array], kit.Array],
    torch: Callable[[kit.TorchCall], str],
    samples: Sequence[kit.Sample],
    gradient: kit.Gradient,
    legal: Legal | None = None,
    lazy: bool = False,
    *,
    meaning: str,
    surface: kit.Surface = _INTERNAL,
    bind: kit.Bind | None = None,
    zero: kit.ZeroRule | None = None,
) -> kit.OpDef:
    """Register a view of one tensor; with a `surface` it is called by name."""
    return kit.operator(
        name,
        surface,
        infer,
        factors,
        numpy,
        torch,
        samples,
        view=True,
        bind=bind,
        flops=kit.no_flops,
        legal=legal,
        gradient=gradient,
        lazy=lazy,
        zeros=zero,
        meaning=meaning,
    )


def replaced(
    said: str, type_: kit.TensorType, dim: kit.Dim, into: Sequence[kit.Dim]
) -> kit.TensorType:
    """`type_` with `into` where `dim` was; MD0205 when that makes a dim occur twice."""
    at = type_.index(dim.name)
    dims = (*type_.dims[:at], *into, *type_.dims[at + 1 :])
    kit.need_distinct(said, dims)
    return kit.TensorType(dims, type_.dtype)


def need_size(what: str, size: int, wanted: kit.Dim) -> None:
    """MD0209 unless `size` is the size of `wanted`; `what` begins the message."""
    if size != wanted.size:
        raise kit.OpError(
            "MD0209",
            f"{what} has {size} elements, and the dim `{wanted}` is of size {wanted.size}",
            f"declare `dim {wanted} = {size}`, or use a dim of that size",
            kit.ResizeDim(wanted.name, size),
            also="or use a dim of that size",
        )


def _moved(sig: kit.Signature, renames: Mapping[str, str]) -> kit.Factors:
    """Loops that map every dim of the operand to its new name in the result."""
    pairs = [(n, renames.get(n, n)) for n in sig.ins[0].names]
    loops = tuple(kit.Factor(old, (old,), (new,)) for old, new in pairs if sig.outs[0].has(new))
    return kit.Factors(loops, (frozenset({0}),), (0,))


def _local_shape(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    return x.reshape(call.local(call.outs[0]).shape)


# --- rename ----------------------------------------------------------------------------------


def _rename_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    pairs: tuple[tuple[kit.Dim, kit.Dim], ...] = attrs["pairs"]
    kit.need_dims("rename", ins[0], [old for old, _ in pairs])
    for old, new in pairs:
        need_size(f"`{old}`", old.size, new)
    renames = {old.name: new for old, new in pairs}
    dims = tuple(renames.get(d.name, d) for d in ins[0].dims)
    kit.need_distinct("rename", dims)
    return (kit.TensorType(dims, ins[0].dtype),)


def _rename_gradient(call: kit.Backward) -> kit.Grads:
    pairs = [(new, old) for old, new in call.attrs["pairs"] if call.grad.type.has(new.name)]
    return {0: call.emit("rename", call.grad, pairs=tuple(pairs)) if pairs else call.grad}


view(
    "rename",
    _rename_infer,
    lambda sig: _moved(sig, {old.name: new.name for old, new in sig.attrs["pairs"]}),
    lambda call, x: x,
    lambda call: call.tensor(0),
    kit.samples("b s | pairs=((s m=4))", "s b h: i32 | pairs=((s m=4) (b c=2))"),
    _rename_gradient,
    lazy=True,
    zero=zeros.renamed(lambda sig: {old.name: new.name for old, new in sig.attrs["pairs"]}),
    meaning="The tensor with other names for some of its dims.",
)

# --- split and merge -------------------------------------------------------------------------


def _blocks(parts: Sequence[kit.Dim], splits: Splits) -> int | None:
    """The number of blocks that the parts (outer first) split their dim into, or None.

    Blocks of several sizes are blocks of the whole only where the parts further in are of size 1.
    """
    blocks, room = 1, True
    for number, part in enumerate(parts, 1):
        count = splits.get(part.name, 1)
        if part.size % count and any(inner.size > 1 for inner in parts[number:]):
            return None
        if count > 1 and not room:
            return None
        blocks, room = blocks * count, room and count == part.size
    return blocks


def _split_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dim, into = attrs["dim"], attrs["into"]
    kit.need_dims("split", ins[0], (dim,))
    product = math.prod(d.size for d in into)
    if product != dim.size:
        sizes = " × ".join(str(d.size) for d in into)
        raise kit.OpError(
            "MD0209",
            f"`{dim}` of size {dim.size} cannot become {kit.listed([d.name for d in into])}: "
            f"{sizes} is {product}",
            None,
            kit.ResizeDim(dim.name, product),
            *(
                kit.ResizeDim(part.name, part.size * dim.size // product)
                for part in into
                if part.size * dim.size % product == 0
            ),
            also=f"the sizes of the new dims must multiply to {dim.size}",
        )
    return (replaced("split", ins[0], dim, into),)


def _parts_factors(
    sig: kit.Signature, whole: kit.Dim, parts: Sequence[kit.Dim], splits: bool
) -> kit.Factors:
    """One loop for each part of `whole`, and those of the other dims."""
    others = tuple(f for f in _moved(sig, {}).loops if f.name != whole.name)
    others = tuple(f for f in others if f.name not in [p.name for p in parts])
    part_loops = tuple(
        kit.Factor(p.name, (whole.name,), (p.name,))
        if splits
        else kit.Factor(p.name, (p.name,), (whole.name,))
        for p in parts
    )
    return kit.Factors((*others, *part_loops), (frozenset({0}),), (0,))


def _split_text(call: kit.TorchCall) -> str:
    into = [call.extent(d.name) for d in call.attrs["into"]]
    at = kit.axis(call)
    return f"{call.tensor(0)}.unflatten({at}, {kit.tuple_text(into)})"


def _split_gradient(call: kit.Backward) -> kit.Grads:
    """The parts merged; where the cotangent has none of them it is constant along the whole."""
    dim, into = call.attrs["dim"], call.attrs["into"]
    if not any(call.grad.type.has(d.name) for d in into):
        return {0: call.grad}
    return {0: call.emit("merge", kit.with_dims(call, *into), dims=into, into=dim)}


view(
    "split",
    _split_infer,
    lambda sig: _parts_factors(sig, sig.attrs["dim"], sig.attrs["into"], splits=True),
    _local_shape,
    _split_text,
    kit.samples(
        "v | dim=v into=(n=4 k=2)",
        "b v h | dim=v into=(k=2 n=4)",
        "h v | dim=v into=(k=2 r=2 b)",
        "s: i32 | dim=s into=(one=1 n=4)",
    ),
    _split_gradient,
    lambda sig, ins, outs: _blocks(sig.attrs["into"], outs) == ins.get(sig.attrs["dim"].name, 1),
    lazy=True,
    zero=zeros.split,
    meaning="The tensor with one dim as several, the outer first.",
)


def _merge_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    dims, into = attrs["dims"], attrs["into"]
    kit.need_dims("merge", ins[0], dims)
    said = kit.listed([d.name for d in dims])
    need_size(f"the merge of {said}", math.prod(d.size for d in dims), into)
    order = _merge_order(ins[0], dims)
    unmerged = kit.TensorType(order, ins[0].dtype).without(*(d.name for d in dims[1:]))
    return (replaced("merge", unmerged, dims[0], (into,)),)


def _merge_order(type_: kit.TensorType, dims: Sequence[kit.Dim]) -> tuple[kit.Dim, ...]:
    """The dims with the merged ones side by side, as listed, where the first of them stands."""
    merged = [type_.dims[type_.index(d.name)] for d in dims]
    names = {d.name for d in dims}
    first = next(i for i, d in enumerate(type_.dims) if d.name in names)
    others = [d for d in type_.dims if d.name not in names]
    return (*others[:first], *merged, *others[first:])


def _merge_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    order = _merge_order(call.ins[0], call.attrs["dims"])
    return _local_shape(call, x.transpose([call.ins[0].index(d.name) for d in order]))


def _merge_text(call: kit.TorchCall) -> str:
    dims = call.attrs["dims"]
    order = _merge_order(call.ins[0], dims)
    first = [d.name for d in order].index(dims[0].name)
    text = kit.aligned_tensor(call, 0, order)
    return f"{text}.flatten({first}, {first + len(dims) - 1})" if len(dims) > 1 else text


def _merge_gradient(call: kit.Backward) -> kit.Grads:
    dims, into = call.attrs["dims"], call.attrs["into"]
    if not call.grad.type.has(into.name):
        return {0: call.grad}
    return {0: call.emit("split", call.grad, dim=into, into=dims)}


view(
    "merge",
    _merge_infer,
    lambda sig: _parts_factors(sig, sig.attrs["into"], sig.attrs["dims"], splits=False),
    _merge_numpy,
    _merge_text,
    kit.samples(
        "n=4 k=2 | dims=(n k) into=v",
        "k=2 n=4 h | dims=(n k) into=v",
        "n=4 h k=2 | dims=(k n) into=v",
        "k=2 r=2 b: i32 | dims=(k r b) into=v",
    ),
    _merge_gradient,
    lambda sig, ins, outs: _blocks(sig.attrs["dims"], ins) == outs.get(sig.attrs["into"].name, 1),
    lazy=True,
    zero=zeros.merged,
    meaning="The tensor with several dims as one, the first outermost.",
)

# --- transpose -------------------------------------------------------------------------------


def _transpose_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_dims("transpose", ins[0], attrs["dims"])
    missing = [n for n in ins[0].names if n not in [d.name for d in attrs["dims"]]]
    if missing:
        message = f"`transpose` leaves out {kit.listed(missing)} of {ins[0]}"
        raise kit.OpError("MD0214", message, "name every dim")
    return (kit.TensorType(attrs["dims"], ins[0].dtype),)


view(
    "transpose",
    _transpose_infer,
    kit.plain(linear=[(0,)], monotone=[0]),
    lambda call, x: x.transpose([call.ins[0].index(n) for n in call.outs[0].names]),
    lambda call: kit.aligned_tensor(call, 0, call.outs[0].dims),
    kit.samples("s b | dims=(b s)", "s b h | dims=(h s b)", "b s h | dims=(b h s)", "() | dims=()"),
    kit.passed,
    lazy=True,
    zero=zeros.passes(0),
    meaning="The tensor with its dims in another order.",
)

# --- broadcast -------------------------------------------------------------------------------


def _broadcast_bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """All dims of the result: those in brackets, then the others of the tensor."""
    own = (d for d in ins[0].dims if d not in attrs["dims"])
    return {"dims": (*attrs["dims"], *own)}


def _broadcast_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_distinct("broadcast", attrs["dims"])
    out = kit.TensorType(attrs["dims"], ins[0].dtype)
    kit.need_dims("broadcast", out, ins[0].dims)
    return (out,)


def _broadcast_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    shape = call.local(call.outs[0]).shape
    return np.broadcast_to(kit.align(x, call.ins[0], call.outs[0].dims), shape)


view(
    "broadcast",
    _broadcast_infer,
    kit.plain(linear=[(0,)], monotone=[0]),
    _broadcast_numpy,
    lambda call: kit.expanded(call, 0, call.outs[0].dims),
    kit.samples(
        "s | dims=(b s)",
        "s | dims=(s b)",
        "h b | dims=(b s h)",
        "() | dims=(b s)",
        "b s: i32 | dims=(s b)",
    ),
    kit.summed,
    zero=zeros.passes(0),
    meaning="The tensor with the dims in brackets as its first, repeated along those that it "
    "lacks. Other operators do so by themselves.",
    surface=kit.Surface("dims", (1, 1)),
    bind=_broadcast_bind,
)
