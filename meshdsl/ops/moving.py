"""Joining and moving along a dim: concat, pad, shift. Where it is split they read windows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from meshdsl.diagnostics import counted
from meshdsl.ir.types import BOOL, I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
    Reads,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.reduce import same_type
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    VOCAB,
    Array,
    align,
    listed,
    loops,
    need_dims,
    need_distinct,
    need_one_dtype,
    no_flops,
    reader,
    sample,
    swapped,
    tensor,
)
from meshdsl.ops.torch_expressions import aligned_tensor, tuple_text

# --- concat ----------------------------------------------------------------------------------


def _concat_bind(attrs: Attrs, ins: tuple[TensorType, ...]) -> Attrs:
    """The attributes of a join: `target`, and in `sources` the dim of each operand that it joins.

    `[(a, b) -> all]` names them, `[a -> all]` one for all operands; `[all]` infers them by name.
    """
    if "dim" in attrs:
        return {"target": attrs["dim"], "sources": _told_by_names(attrs["dim"], ins)}
    sources, targets = attrs["source"], attrs["target"]
    if len(targets) != 1:
        message, help = "`concat` joins into one dim", "write `concat[(a, b) -> all](x, y)`"
        raise OpError("MD0252", message, help)
    if len(sources) not in (1, len(ins)):
        message = f"`concat` names {len(sources)} dims for {counted(len(ins), 'tensor')}"
        help = "name one dim for each tensor, or one for all: `concat[(a, b) -> all](x, y)`"
        raise OpError("MD0252", message, help)
    return {"target": targets[0], "sources": sources if len(sources) > 1 else sources * len(ins)}


def sources_by_name(ins: Sequence[TensorType]) -> tuple[Dim, ...] | None:
    """The dims that `concat[all]` joins: of each operand the only one that not all have.

    Operands that all have one and the same dim, and no other, are joined along it. None where names
    do not decide. Sizes never do: another size would give the program another meaning.
    """
    if all(t.names == ins[0].names and len(t.dims) == 1 for t in ins):
        return (ins[0].dims[0],) * len(ins)
    unshared = [[d for d in t.dims if not all(o.has(d.name) for o in ins)] for t in ins]
    return tuple(dims[0] for dims in unshared) if all(len(dims) == 1 for dims in unshared) else None


def _told_by_names(target: Dim, ins: tuple[TensorType, ...]) -> tuple[Dim, ...]:
    sources = sources_by_name(ins)
    if sources is not None:
        return sources
    shown = listed([str(t) for t in ins])
    message = f"`concat[{target}]` cannot tell which dim of {shown} to join"
    raise OpError("MD0216", message, f"name the dim of each: `concat[{_arrow(target, ins)}](…)`")


def _arrow(target: Dim, ins: Sequence[TensorType]) -> str:
    """The bracket that was probably meant: a dim that not all have, or else one that fits."""
    shared = {n for n in ins[0].names if all(t.has(n) for t in ins)}
    fitting = [d for d in ins[0].dims if d.name in shared and d.size * len(ins) == target.size]
    alike = fitting[0].name if fitting else next(iter(ins[0].names), "a")
    unshared = ([n for n in t.names if n not in shared] for t in ins)
    names = [(o or [alike if t.has(alike) else "a"])[0] for o, t in zip(unshared, ins, strict=True)]
    return f"({', '.join(names)}) -> {target}"


def _concat_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    target, sources = attrs["target"], attrs["sources"]
    dtype = need_one_dtype("concat", *ins)
    for type_, source in zip(ins, sources, strict=True):
        need_dims("concat", type_, (source,))
    total = sum(s.size for s in sources)
    if total != target.size:
        sizes = " + ".join(f"{s.size} (`{s}`)" for s in sources)
        raise OpError(
            "MD0209",
            f"`concat` makes {sizes} = {total} elements, and `{target}` is of size {target.size}",
            f"declare `dim {target} = {' + '.join(s.name for s in sources)}`",
        )
    first = _joined(ins[0], sources[0], target)
    need_distinct("concat", first)
    for type_, source in zip(ins[1:], sources[1:], strict=True):
        _need_same(first, _joined(type_, source, target), ins[0], type_)
    return (TensorType(first, dtype),)


def _joined(type_: TensorType, source: Dim, target: Dim) -> tuple[Dim, ...]:
    return tuple(target if d.name == source.name else d for d in type_.dims)


def _need_same(first: Sequence[Dim], other: Sequence[Dim], a: TensorType, b: TensorType) -> None:
    if set(first) != set(other):
        raise OpError(
            "MD0214",
            f"`concat` of {a} and {b}: apart from the joined dim they must have the same dims",
            "rename the dims of one as the other's: `x[a -> b]`",
        )


def _concat_factors(sig: Signature) -> Factors:
    every, target, start = range(len(sig.ins)), sig.attrs["target"].name, 0
    reads = []
    for source in sig.attrs["sources"]:
        # A block reads what there is of each operand: windows that end at the borders are joined.
        reads.append(Reads(lo=-start, hi=-start, fill=None))
        start += source.size
    joined = reader(target, [s.name for s in sig.attrs["sources"]], *reads)
    factors = (*loops(sig, without=(target,)), joined)
    return Factors(factors, (frozenset(every),), tuple(every))


def _orders(call: NumpyCall | TorchCall) -> list[tuple[Dim, ...]]:
    """The dims of each operand in the order of the result."""
    target, sources = call.attrs["target"], call.attrs["sources"]
    return [
        tuple(source if d.name == target.name else d for d in call.outs[0].dims)
        for source in sources
    ]


def _concat_numpy(call: NumpyCall, *arrays: Array) -> Array:
    parts = zip(arrays, call.ins, _orders(call), strict=True)
    aligned = [align(a, t, dims) for a, t, dims in parts]
    return np.concatenate(aligned, axis=call.outs[0].index(call.attrs["target"].name))


def _concat_text(call: TorchCall) -> str:
    parts = [aligned_tensor(call, i, dims) for i, dims in enumerate(_orders(call))]
    return f"torch.cat({tuple_text(parts)}, {call.outs[0].index(call.attrs['target'].name)})"


def _concat_gradient(call: Backward) -> Mapping[int, Value]:
    """The slice of the cotangent for each operand."""
    target, start, grads = call.attrs["target"], 0, {}
    for i, source in enumerate(call.attrs["sources"]):
        stop = start + source.size
        if call.wanted(i):
            grads[i] = _part(call, target, start, stop, source)
        start = stop
    return grads


def _part(call: Backward, target: Dim, start: int, stop: int, source: Dim) -> Value:
    """A slice of the cotangent; without the dim, all slices are equal."""
    if not call.grad.type.has(target.name):
        return call.grad
    return call.emit("slice", call.grad, dim=target, start=start, stop=stop, target=source)


def _joint_extremes(most: int) -> list[str]:
    """Rows where two or more of up to `most` operands are partial maxima, or minima."""
    rows = []
    for count in range(2, most + 1):
        groups = [g for n in range(2, count + 1) for g in combinations(range(count), n)]
        for op in ("max", "min"):
            for group in groups:
                ins = ", ".join(f"P({op})" if i in group else "B" for i in range(count))
                rows.append(f"{ins} -> P({op})")
    return rows


_LEFT, _RIGHT = Dim("left", 2), Dim("right", 6)

register(
    OpDef(
        "concat",
        Surface("join", (1, None)),
        _concat_infer,
        _concat_factors,
        _concat_numpy,
        _concat_text,
        (
            sample(tensor(_LEFT), tensor(_RIGHT), target=VOCAB, sources=(_LEFT, _RIGHT)),
            sample(
                tensor(BATCH, _LEFT, HIDDEN),
                tensor(HIDDEN, BATCH, _RIGHT),
                target=VOCAB,
                sources=(_LEFT, _RIGHT),
            ),
            sample(
                tensor(BATCH, _LEFT, dtype=I32),
                tensor(BATCH, SEQ, dtype=I32),
                tensor(_LEFT, BATCH, dtype=I32),
                target=VOCAB,
                sources=(_LEFT, SEQ, _LEFT),
            ),
            sample(tensor(SEQ), tensor(SEQ), target=VOCAB, sources=(SEQ, SEQ)),
        ),
        flops=no_flops,
        bind=_concat_bind,
        true_rows=swapped(
            "several partial operands come from as many reductions; one is enough",
            *_joint_extremes(3),
        ),
        gradient=_concat_gradient,
        meaning="The tensors one after the other along a dim.",
    )
)

# --- pad -------------------------------------------------------------------------------------


def _pad_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    if len(attrs["source"]) != 1 or len(attrs["target"]) != 1:
        raise OpError("MD0214", "`pad` takes one dim to another", "write `pad[h -> hp](x, 1, 1)`")
    (source,), (target,) = attrs["source"], attrs["target"]
    before, after = attrs["before"], attrs["after"]
    need_dims("pad", ins[0], (source,))
    for count in (before, after):
        if not isinstance(count, int) or count < 0:
            raise OpError("MD0213", f"`pad` cannot add {count} elements", "give counts from 0 on")
    _check_fill(ins[0], attrs["value"])
    total = before + source.size + after
    if total != target.size:
        raise OpError(
            "MD0209",
            f"`pad` makes {before} + {source.size} + {after} = {total} elements, "
            f"and `{target}` is of size {target.size}",
            f"declare `dim {target} = {source} + {before + after}`",
        )
    dims = _joined(ins[0], source, target)
    need_distinct("pad", dims)
    return (TensorType(dims, ins[0].dtype),)


def _check_fill(type_: TensorType, value: float) -> None:
    if type_.dtype.kind != "float" and value != int(value):
        raise OpError("MD0213", f"{value} cannot fill {type_}", "give an integer")


def _pad_factors(sig: Signature) -> Factors:
    (source,), (target,), before = (sig.attrs[k] for k in ("source", "target", "before"))
    reads = Reads(lo=-before, hi=-before, fill=sig.attrs["value"])
    factors = (*loops(sig, without=(target.name,)), reader(target.name, [source.name], reads))
    return Factors(factors, () if sig.attrs["value"] else (frozenset({0}),), (0,))


def _pad_numpy(call: NumpyCall, x: Array) -> Array:
    if call.is_split(call.attrs["target"][0].name):
        return x  # a window: the fill is in it
    at = call.ins[0].index(call.attrs["source"][0].name)
    widths = [(0, 0)] * x.ndim
    widths[at] = (call.attrs["before"], call.attrs["after"])
    return np.pad(x, widths, constant_values=call.attrs["value"])


def _pad_text(call: TorchCall) -> str:
    if call.is_split(call.attrs["target"][0].name):
        return call.tensor(0)
    at = call.ins[0].index(call.attrs["source"][0].name)
    value = call.attrs["value"]
    fill = f", value={value!r}" if value else ""
    return _padded(call, at, call.attrs["before"], call.attrs["after"], fill)


def _padded(call: TorchCall, at: int, before: int, after: int, fill: str = "") -> str:
    """Write a pad; torch lists the widths from the last dim backwards."""
    widths = [0, 0] * (len(call.ins[0].dims) - 1 - at) + [before, after]
    return f"torch.nn.functional.pad({call.tensor(0)}, {tuple_text(widths)}{fill})"


def _pad_gradient(call: Backward) -> Mapping[int, Value]:
    (source,), (target,) = call.attrs["source"], call.attrs["target"]
    before = call.attrs["before"]
    return {0: _part(call, target, before, before + source.size, source)}


_OPTIONS = (("before", ...), ("after", ...), ("value", 0))
_WIDE = Dim("wide", 7)

register(
    OpDef(
        "pad",
        Surface("arrow", (1, 1), _OPTIONS),
        _pad_infer,
        _pad_factors,
        _pad_numpy,
        _pad_text,
        (
            sample(tensor(SEQ), source=(SEQ,), target=(_WIDE,), before=1, after=2, value=0),
            sample(
                tensor(BATCH, SEQ, HIDDEN),
                source=(SEQ,),
                target=(VOCAB,),
                before=4,
                after=0,
                value=-1.5,
            ),
            sample(
                tensor(HIDDEN, BATCH, dtype=I32),
                source=(HIDDEN,),
                target=(VOCAB,),
                before=0,
                after=2,
                value=0,
            ),
        ),
        flops=no_flops,
        passes=True,
        gradient=_pad_gradient,
        meaning="The tensor with `before` elements of `value` ahead of the others along a dim, and "
        "`after` behind them: `pad[h -> hp](x, 1, 2)` for an `hp` that is larger by 3.",
    )
)

# --- shift -----------------------------------------------------------------------------------


def _shift_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    if not isinstance(attrs["by"], int):
        raise OpError("MD0213", f"`shift` by {attrs['by']} elements", "give an integer")
    return same_type("shift", "any")(ins, attrs)


def _shift_factors(sig: Signature) -> Factors:
    dim, by = sig.attrs["dim"].name, sig.attrs["by"]
    own = (*loops(sig, without=(dim,)), reader(dim, [dim], Reads(lo=-by, hi=-by)))
    return Factors(own, (frozenset({0}),), (0,))


def _shift_numpy(call: NumpyCall, x: Array) -> Array:
    if call.is_split(call.attrs["dim"].name):
        return x  # a window: moved already
    at = call.ins[0].index(call.attrs["dim"].name)
    size = x.shape[at]
    by = max(-size, min(size, call.attrs["by"]))
    out = np.zeros_like(x)
    lead = (slice(None),) * at
    out[(*lead, slice(max(by, 0), size + min(by, 0)))] = x[
        (*lead, slice(max(-by, 0), size - max(by, 0)))
    ]
    return out


def _shift_text(call: TorchCall) -> str:
    dim = call.attrs["dim"]
    if call.is_split(dim.name):
        return call.tensor(0)
    by = max(-dim.size, min(dim.size, call.attrs["by"]))
    return _padded(call, call.ins[0].index(dim.name), by, -by)


def _shift_gradient(call: Backward) -> Mapping[int, Value]:
    dim = call.attrs["dim"]
    return {0: call.emit("shift", with_dims(call, dim), dim=dim, by=-call.attrs["by"])}


register(
    OpDef(
        "shift",
        Surface("dim", (1, 1), (("by", ...),)),
        _shift_infer,
        _shift_factors,
        _shift_numpy,
        _shift_text,
        (
            sample(tensor(SEQ), dim=SEQ, by=1),
            sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ, by=-2),
            sample(tensor(HIDDEN, BATCH, dtype=I32), dim=HIDDEN, by=5),
            sample(tensor(BATCH, SEQ, dtype=BOOL), values="bool", dim=SEQ, by=2),
        ),
        flops=no_flops,
        passes=True,
        gradient=_shift_gradient,
        relocates=True,
        meaning="The tensor moved `by` places along a dim, towards higher indices; zeros come in.",
    )
)
