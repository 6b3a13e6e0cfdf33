"""Views `x[…]`: rename, split, merge, transpose, broadcast. They relabel, or repeat by stride.

A placement follows a dim through a split or merge as long as the outer parts are whole blocks:
splitting `model -> (heads, key)`, the axes of `model` fall to `heads` until it is fully split, and
further ones to `key` (GSPMD's reshape rule, with names).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshdsl.ir.types import I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import passed, summed, with_dims
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factor,
    Factors,
    Gradient,
    NumpyCall,
    OpDef,
    OpError,
    Sample,
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
    Infer,
    align,
    listed,
    need_dims,
    need_distinct,
    no_flops,
    plain,
    sample,
    tensor,
)
from meshdsl.ops.torch_expressions import aligned_tensor, expanded, tuple_text

Splits = Mapping[str, int]
Legal = Callable[[Signature, Splits, Splits], bool]

_INTERNAL = Surface("view", (1, 1))


def view(
    name: str,
    infer: Infer,
    factors: Callable[[Signature], Factors],
    numpy: Callable[[NumpyCall, Array], Array],
    torch: Callable[[TorchCall], str],
    samples: tuple[Sample, ...],
    gradient: Gradient,
    legal: Legal | None = None,
    lazy: bool = False,
    *,
    meaning: str,
    surface: Surface = _INTERNAL,
    bind: Callable[[Attrs, tuple[TensorType, ...]], Attrs] | None = None,
) -> OpDef:
    """Register a view of one tensor; with a `surface` it is called by name."""
    return register(
        OpDef(
            name,
            surface,
            infer,
            factors,
            numpy,
            torch,
            samples,
            view=True,
            bind=bind,
            flops=no_flops,
            legal=legal,
            gradient=gradient,
            lazy=lazy,
            meaning=meaning,
        )
    )


def replaced(said: str, type_: TensorType, dim: Dim, into: Sequence[Dim]) -> TensorType:
    """`type_` with `into` where `dim` was; MD0205 when that makes a dim occur twice."""
    at = type_.index(dim.name)
    dims = (*type_.dims[:at], *into, *type_.dims[at + 1 :])
    need_distinct(said, dims)
    return TensorType(dims, type_.dtype)


def need_size(what: str, found: int, wanted: Dim) -> None:
    """MD0209 unless `found` is the size of `wanted`; `what` begins the message."""
    if found != wanted.size:
        raise OpError(
            "MD0209",
            f"{what} has {found} elements, and the dim `{wanted}` is of size {wanted.size}",
            f"declare `dim {wanted} = {found}`, or use a dim of that size",
        )


def _moved(sig: Signature, renames: Mapping[str, str]) -> Factors:
    """Loops that map every dim of the operand to its new name in the result."""
    pairs = [(n, renames.get(n, n)) for n in sig.ins[0].names]
    loops = tuple(Factor(old, (old,), (new,)) for old, new in pairs if sig.outs[0].has(new))
    return Factors(loops, (frozenset({0}),), (0,))


def _same(call: NumpyCall, x: Array) -> Array:
    del call
    return x


def _local_shape(call: NumpyCall, x: Array) -> Array:
    return x.reshape(call.local(call.outs[0]).shape)


# --- rename ----------------------------------------------------------------------------------


def _rename_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    pairs: tuple[tuple[Dim, Dim], ...] = attrs["pairs"]
    need_dims("rename", ins[0], [old for old, _ in pairs])
    for old, new in pairs:
        need_size(f"`{old}`", old.size, new)
    renames = {old.name: new for old, new in pairs}
    dims = tuple(renames.get(d.name, d) for d in ins[0].dims)
    need_distinct("rename", dims)
    return (TensorType(dims, ins[0].dtype),)


def _rename_gradient(call: Backward) -> Mapping[int, Value]:
    pairs = [(new, old) for old, new in call.attrs["pairs"] if call.grad.type.has(new.name)]
    return {0: call.emit("rename", call.grad, pairs=tuple(pairs)) if pairs else call.grad}


_MEM = Dim("m", SEQ.size)

view(
    "rename",
    _rename_infer,
    lambda sig: _moved(sig, {old.name: new.name for old, new in sig.attrs["pairs"]}),
    _same,
    lambda call: call.tensor(0),
    (
        sample(tensor(BATCH, SEQ), pairs=((SEQ, _MEM),)),
        sample(tensor(SEQ, BATCH, HIDDEN, dtype=I32), pairs=((SEQ, _MEM), (BATCH, Dim("c", 2)))),
    ),
    _rename_gradient,
    lazy=True,
    meaning="The tensor with other names for some of its dims.",
)

# --- split and merge -------------------------------------------------------------------------


def _blocks(parts: Sequence[Dim], splits: Splits) -> int | None:
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


def _split_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    dim, into = attrs["dim"], attrs["into"]
    need_dims("split", ins[0], (dim,))
    product = math.prod(d.size for d in into)
    if product != dim.size:
        sizes = " × ".join(str(d.size) for d in into)
        raise OpError(
            "MD0209",
            f"`{dim}` of size {dim.size} cannot become {listed([d.name for d in into])}: "
            f"{sizes} is {product}",
            "use dims whose sizes multiply to it",
        )
    return (replaced("split", ins[0], dim, into),)


def _parts_factors(sig: Signature, whole: Dim, parts: Sequence[Dim], splits: bool) -> Factors:
    """One loop for each part of `whole`, and those of the other dims."""
    others = tuple(f for f in _moved(sig, {}).loops if f.name != whole.name)
    others = tuple(f for f in others if f.name not in [p.name for p in parts])
    part_loops = tuple(
        Factor(p.name, (whole.name,), (p.name,))
        if splits
        else Factor(p.name, (p.name,), (whole.name,))
        for p in parts
    )
    return Factors((*others, *part_loops), (frozenset({0}),), (0,))


def _split_legal(sig: Signature, ins: Splits, outs: Splits) -> bool:
    dim, into = sig.attrs["dim"], sig.attrs["into"]
    return _blocks(into, outs) == ins.get(dim.name, 1)


def _split_text(call: TorchCall) -> str:
    into = [call.extent(d.name) for d in call.attrs["into"]]
    at = call.ins[0].index(call.attrs["dim"].name)
    return f"{call.tensor(0)}.unflatten({at}, {tuple_text(into)})"


def _split_gradient(call: Backward) -> Mapping[int, Value]:
    """The parts merged; where the cotangent has none of them it is constant along the whole."""
    dim, into = call.attrs["dim"], call.attrs["into"]
    if not any(call.grad.type.has(d.name) for d in into):
        return {0: call.grad}
    return {0: call.emit("merge", with_dims(call, *into), dims=into, into=dim)}


_HEADS, _KEY, _ROW = Dim("n", 4), Dim("k", 2), Dim("r", 2)

view(
    "split",
    _split_infer,
    lambda sig: _parts_factors(sig, sig.attrs["dim"], sig.attrs["into"], splits=True),
    _local_shape,
    _split_text,
    (
        sample(tensor(VOCAB), dim=VOCAB, into=(_HEADS, _KEY)),
        sample(tensor(BATCH, VOCAB, HIDDEN), dim=VOCAB, into=(_KEY, _HEADS)),
        sample(tensor(HIDDEN, VOCAB), dim=VOCAB, into=(_KEY, _ROW, BATCH)),
        sample(tensor(SEQ, dtype=I32), dim=SEQ, into=(Dim("one", 1), _HEADS)),
    ),
    _split_gradient,
    _split_legal,
    lazy=True,
    meaning="The tensor with one dim as several, the outer first.",
)


def _merge_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    dims, into = attrs["dims"], attrs["into"]
    need_dims("merge", ins[0], dims)
    said = listed([d.name for d in dims])
    need_size(f"the merge of {said}", math.prod(d.size for d in dims), into)
    order = _merge_order(ins[0], dims)
    unmerged = TensorType(order, ins[0].dtype).without(*(d.name for d in dims[1:]))
    return (replaced("merge", unmerged, dims[0], (into,)),)


def _merge_order(type_: TensorType, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """The dims with the merged ones side by side, as listed, where the first of them stands."""
    merged = [type_.dims[type_.index(d.name)] for d in dims]
    names = {d.name for d in dims}
    first = next(i for i, d in enumerate(type_.dims) if d.name in names)
    others = [d for d in type_.dims if d.name not in names]
    return (*others[:first], *merged, *others[first:])


def _merge_numpy(call: NumpyCall, x: Array) -> Array:
    order = _merge_order(call.ins[0], call.attrs["dims"])
    return _local_shape(call, x.transpose([call.ins[0].index(d.name) for d in order]))


def _merge_legal(sig: Signature, ins: Splits, outs: Splits) -> bool:
    dims, into = sig.attrs["dims"], sig.attrs["into"]
    return _blocks(dims, ins) == outs.get(into.name, 1)


def _merge_text(call: TorchCall) -> str:
    dims = call.attrs["dims"]
    order = _merge_order(call.ins[0], dims)
    first = [d.name for d in order].index(dims[0].name)
    text = aligned_tensor(call, 0, order)
    return f"{text}.flatten({first}, {first + len(dims) - 1})" if len(dims) > 1 else text


def _merge_gradient(call: Backward) -> Mapping[int, Value]:
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
    (
        sample(tensor(_HEADS, _KEY), dims=(_HEADS, _KEY), into=VOCAB),
        sample(tensor(_KEY, _HEADS, HIDDEN), dims=(_HEADS, _KEY), into=VOCAB),
        sample(tensor(_HEADS, HIDDEN, _KEY), dims=(_KEY, _HEADS), into=VOCAB),
        sample(tensor(_KEY, _ROW, BATCH, dtype=I32), dims=(_KEY, _ROW, BATCH), into=VOCAB),
    ),
    _merge_gradient,
    _merge_legal,
    lazy=True,
    meaning="The tensor with several dims as one, the first outermost.",
)

# --- transpose -------------------------------------------------------------------------------


def _transpose_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_dims("transpose", ins[0], attrs["dims"])
    missing = [n for n in ins[0].names if n not in [d.name for d in attrs["dims"]]]
    if missing:
        message = f"`transpose` leaves out {listed(missing)} of {ins[0]}"
        raise OpError("MD0214", message, "name every dim")
    return (TensorType(attrs["dims"], ins[0].dtype),)


view(
    "transpose",
    _transpose_infer,
    plain(linear=[(0,)], monotone=[0]),
    lambda call, x: x.transpose([call.ins[0].index(n) for n in call.outs[0].names]),
    lambda call: aligned_tensor(call, 0, call.outs[0].dims),
    (
        sample(tensor(SEQ, BATCH), dims=(BATCH, SEQ)),
        sample(tensor(SEQ, BATCH, HIDDEN), dims=(HIDDEN, SEQ, BATCH)),
        sample(tensor(BATCH, SEQ, HIDDEN), dims=(BATCH, HIDDEN, SEQ)),
        sample(tensor(), dims=()),
    ),
    passed,
    lazy=True,
    meaning="The tensor with its dims in another order.",
)

# --- broadcast -------------------------------------------------------------------------------


def _broadcast_bind(attrs: Attrs, ins: tuple[TensorType, ...]) -> Attrs:
    """All dims of the result: those in brackets, then the others of the tensor."""
    own = (d for d in ins[0].dims if d not in attrs["dims"])
    return {"dims": (*attrs["dims"], *own)}


def _broadcast_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_distinct("broadcast", attrs["dims"])
    out = TensorType(attrs["dims"], ins[0].dtype)
    need_dims("broadcast", out, ins[0].dims)
    return (out,)


def _broadcast_numpy(call: NumpyCall, x: Array) -> Array:
    shape = call.local(call.outs[0]).shape
    return np.broadcast_to(align(x, call.ins[0], call.outs[0].dims), shape)


view(
    "broadcast",
    _broadcast_infer,
    plain(linear=[(0,)], monotone=[0]),
    _broadcast_numpy,
    lambda call: expanded(call, 0, call.outs[0].dims),
    (
        sample(tensor(SEQ), dims=(BATCH, SEQ)),
        sample(tensor(SEQ), dims=(SEQ, BATCH)),
        sample(tensor(HIDDEN, BATCH), dims=(BATCH, SEQ, HIDDEN)),
        sample(tensor(), dims=(BATCH, SEQ)),
        sample(tensor(BATCH, SEQ, dtype=I32), dims=(SEQ, BATCH)),
    ),
    summed,
    meaning="The tensor with the dims in brackets as its first, repeated along those that it "
    "lacks. Other operators do so by themselves.",
    surface=Surface("dims", (1, 1)),
    bind=_broadcast_bind,
)
