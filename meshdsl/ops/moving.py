"""Joining and moving along a dim: concat, pad, shift. Where it is split they read windows of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.diagnostics import counted
from meshdsl.ops import kit, views

# --- concat ----------------------------------------------------------------------------------


def _concat_bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """The attributes of a join: `target`, and in `sources` the dim of each operand that it joins.

    `[(a, b) -> all]` names them, `[a -> all]` one for all operands; `[all]` infers them by name.
    """
    if "dim" in attrs:
        return {"target": attrs["dim"], "sources": _told_by_names(attrs["dim"], ins)}
    sources, targets = attrs["source"], attrs["target"]
    if len(targets) != 1:
        message, help = "`concat` joins into one dim", "write `concat[(a, b) -> all](x, y)`"
        raise kit.OpError("MD0252", message, help)
    if len(sources) not in (1, len(ins)):
        message = f"`concat` names {len(sources)} dims for {counted(len(ins), 'tensor')}"
        help = "name one dim for each tensor, or one for all: `concat[(a, b) -> all](x, y)`"
        raise kit.OpError("MD0252", message, help)
    return {"target": targets[0], "sources": sources if len(sources) > 1 else sources * len(ins)}


def sources_by_name(ins: Sequence[kit.TensorType]) -> tuple[kit.Dim, ...] | None:
    """The dims that `concat[all]` joins: of each operand the only one that not all have.

    Operands that all have one and the same dim, and no other, are joined along it. None where names
    do not decide. Sizes never do: another size would give the program another meaning.
    """
    if all(t.names == ins[0].names and len(t.dims) == 1 for t in ins):
        return (ins[0].dims[0],) * len(ins)
    unshared = [[d for d in t.dims if not all(o.has(d.name) for o in ins)] for t in ins]
    return tuple(dims[0] for dims in unshared) if all(len(dims) == 1 for dims in unshared) else None


def _told_by_names(target: kit.Dim, ins: kit.Types) -> tuple[kit.Dim, ...]:
    sources = sources_by_name(ins)
    if sources is not None:
        return sources
    shown = kit.listed([str(t) for t in ins])
    message = f"`concat[{target}]` cannot tell which dim of {shown} to join"
    arrow = _arrow(target, ins)
    help = f"name the dim of each: `concat[{arrow}](…)`"
    raise kit.OpError("MD0216", message, help, kit.Brackets(arrow), also="it names the dim of each")


def _arrow(target: kit.Dim, ins: Sequence[kit.TensorType]) -> str:
    """The bracket that was probably meant: a dim that not all have, or else one that fits."""
    shared = {n for n in ins[0].names if all(t.has(n) for t in ins)}
    fitting = [d for d in ins[0].dims if d.name in shared and d.size * len(ins) == target.size]
    alike = fitting[0].name if fitting else next(iter(ins[0].names), "a")
    unshared = ([n for n in t.names if n not in shared] for t in ins)
    names = [(o or [alike if t.has(alike) else "a"])[0] for o, t in zip(unshared, ins, strict=True)]
    return f"({', '.join(names)}) -> {target}"


def _concat_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    target, sources = attrs["target"], attrs["sources"]
    dtype = kit.need_one_dtype("concat", *ins)
    for type_, source in zip(ins, sources, strict=True):
        kit.need_dims("concat", type_, (source,))
    total = sum(s.size for s in sources)
    if total != target.size:
        sizes = " + ".join(f"{s.size} (`{s}`)" for s in sources)
        raise kit.OpError(
            "MD0209",
            f"`concat` makes {sizes} = {total} elements, and `{target}` is of size {target.size}",
            f"declare `dim {target} = {' + '.join(s.name for s in sources)}`",
            kit.ResizeDim(target.name, total),
            also=f"that is `{' + '.join(s.name for s in sources)}`",
        )
    joined = [
        views.replaced("concat", type_, source, (target,))
        for type_, source in zip(ins, sources, strict=True)
    ]
    for type_, other in zip(ins[1:], joined[1:], strict=True):
        if set(other.dims) != set(joined[0].dims):
            raise kit.OpError(
                "MD0214",
                f"`concat` of {ins[0]} and {type_}: apart from the joined dim they must have the "
                "same dims",
                "rename the dims of one as the other's: `x[a -> b]`",
            )
    return (kit.TensorType(joined[0].dims, dtype),)


def _concat_factors(sig: kit.Signature) -> kit.Factors:
    sources = sig.attrs["sources"]
    starts = itertools.accumulate((s.size for s in sources), initial=0)
    # A block reads what there is of each operand: windows that end at the borders are joined.
    reads = (
        kit.Reads(lo=-start, hi=-start, fill=None)
        for start, _ in zip(starts, sources, strict=False)
    )
    return kit.moving(sig, sig.attrs["target"], sources, *reads)


def _orders(call: kit.NumpyCall | kit.TorchCall) -> list[tuple[kit.Dim, ...]]:
    """The dims of each operand in the order of the result."""
    target, sources = call.attrs["target"], call.attrs["sources"]
    return [
        tuple(source if d.name == target.name else d for d in call.outs[0].dims)
        for source in sources
    ]


def _concat_numpy(call: kit.NumpyCall, *arrays: kit.Array) -> kit.Array:
    parts = zip(arrays, call.ins, _orders(call), strict=True)
    aligned = [kit.align(a, t, dims) for a, t, dims in parts]
    return np.concatenate(aligned, axis=call.outs[0].index(call.attrs["target"].name))


def _concat_text(call: kit.TorchCall) -> str:
    parts = [kit.aligned_tensor(call, i, dims) for i, dims in enumerate(_orders(call))]
    return f"torch.cat({kit.tuple_text(parts)}, {call.outs[0].index(call.attrs['target'].name)})"


def _concat_gradient(call: kit.Backward) -> kit.Grads:
    """The slice of the cotangent for each operand."""
    target, start, grads = call.attrs["target"], 0, {}
    for i, source in enumerate(call.attrs["sources"]):
        stop = start + source.size
        if call.wanted(i):
            grads[i] = _part(call, target, start, stop, source)
        start = stop
    return grads


def _part(call: kit.Backward, target: kit.Dim, start: int, stop: int, source: kit.Dim) -> kit.Value:
    """A slice of the cotangent; without the dim, all slices are equal."""
    if not call.grad.type.has(target.name):
        return call.grad
    return call.emit("slice", call.grad, dim=target, start=start, stop=stop, target=source)


def joint_extremes(most: int) -> list[str]:
    """Rows where two or more of up to `most` operands are partial maxima, or minima."""
    rows = []
    for count in range(2, most + 1):
        groups = [g for n in range(2, count + 1) for g in itertools.combinations(range(count), n)]
        for op in ("max", "min"):
            for group in groups:
                ins = ", ".join(f"P({op})" if i in group else "B" for i in range(count))
                rows.append(f"{ins} -> P({op})")
    return rows


kit.operator(
    "concat",
    kit.Surface("join", (1, None)),
    _concat_infer,
    _concat_factors,
    _concat_numpy,
    _concat_text,
    kit.samples(
        "left=2; right=6 | target=v sources=(left right)",
        "b left=2 h; h b right=6 | target=v sources=(left right)",
        "b left=2: i32; b s: i32; left b: i32 | target=v sources=(left s left)",
        "s; s | target=v sources=(s s)",
    ),
    flops=kit.no_flops,
    bind=_concat_bind,
    true_rows=kit.rows_with_reason(
        "several partial operands come from as many reductions; one is enough",
        *joint_extremes(3),
    ),
    gradient=_concat_gradient,
    meaning="The tensors one after the other along a dim.",
)

# --- pad -------------------------------------------------------------------------------------


def _pad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    if len(attrs["source"]) != 1 or len(attrs["target"]) != 1:
        raise kit.OpError(
            "MD0214", "`pad` takes one dim to another", "write `pad[h -> hp](x, 1, 1)`"
        )
    (source,), (target,) = attrs["source"], attrs["target"]
    before, after = attrs["before"], attrs["after"]
    kit.need_dims("pad", ins[0], (source,))
    for count in (before, after):
        if not isinstance(count, int) or count < 0:
            raise kit.OpError(
                "MD0213",
                f"`pad` cannot add {count} elements",
                None,
                kit.SetOption("before" if count is before else "after", "0"),
                also="counts are whole numbers from 0 on",
            )
    _check_fill(ins[0], attrs["value"])
    total = before + source.size + after
    if total != target.size:
        raise kit.OpError(
            "MD0209",
            f"`pad` makes {before} + {source.size} + {after} = {total} elements, "
            f"and `{target}` is of size {target.size}",
            f"declare `dim {target} = {source} + {before + after}`",
            kit.ResizeDim(target.name, total),
            also=f"that is `{source} + {before + after}`",
        )
    return (views.replaced("pad", ins[0], source, (target,)),)


def _check_fill(type_: kit.TensorType, value: float) -> None:
    if type_.dtype.kind != "float" and value != int(value):
        way = kit.SetOption("value", str(round(value)))
        message = f"{value} cannot fill {type_}"
        raise kit.OpError("MD0213", message, None, way, also="`value` is an integer here")


def _pad_factors(sig: kit.Signature) -> kit.Factors:
    (source,), (target,), before = (sig.attrs[k] for k in ("source", "target", "before"))
    reads = kit.Reads(lo=-before, hi=-before, fill=sig.attrs["value"])
    return kit.moving(sig, target, [source], reads, linear=not sig.attrs["value"])


def _pad_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    if call.is_split(call.attrs["target"][0].name):
        return x  # a window: the fill is in it
    at = call.ins[0].index(call.attrs["source"][0].name)
    before, after, value = (call.attrs[k] for k in ("before", "after", "value"))
    return kit.numpy_padded(x, at, before, after, value)


def _pad_text(call: kit.TorchCall) -> str:
    if call.is_split(call.attrs["target"][0].name):
        return call.tensor(0)
    at = call.ins[0].index(call.attrs["source"][0].name)
    value = call.attrs["value"]
    fill = f", value={value!r}" if value else ""
    before, after = call.attrs["before"], call.attrs["after"]
    return kit.padded_at(call.tensor(0), len(call.ins[0].dims), at, before, after, fill)


def _pad_gradient(call: kit.Backward) -> kit.Grads:
    (source,), (target,) = call.attrs["source"], call.attrs["target"]
    before = call.attrs["before"]
    return {0: _part(call, target, before, before + source.size, source)}


_OPTIONS = (("before", ...), ("after", ...), ("value", 0))

kit.operator(
    "pad",
    kit.Surface("arrow", (1, 1), _OPTIONS),
    _pad_infer,
    _pad_factors,
    _pad_numpy,
    _pad_text,
    kit.samples(
        "s | source=(s) target=(wide=7) before=1 after=2 value=0",
        "b s h | source=(s) target=(v) before=4 after=0 value=-1.5",
        "h b: i32 | source=(h) target=(v) before=0 after=2 value=0",
    ),
    flops=kit.no_flops,
    passes=True,
    gradient=_pad_gradient,
    meaning="The tensor with `before` elements of `value` ahead of the others along a dim, and "
    "`after` behind them: `pad[h -> hp](x, 1, 2)` for an `hp` that is larger by 3.",
)

# --- shift -----------------------------------------------------------------------------------


def _shift_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    if not isinstance(attrs["by"], int):
        message = f"`shift` by {attrs['by']} elements"
        way = kit.SetOption("by", "1")
        raise kit.OpError("MD0213", message, None, way, also="`by` is an integer")
    return kit.same_type("shift", "any")(ins, attrs)


def _shift_factors(sig: kit.Signature) -> kit.Factors:
    dim, by = sig.attrs["dim"], sig.attrs["by"]
    return kit.moving(sig, dim, [dim], kit.Reads(lo=-by, hi=-by))


def _shift_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    if call.is_split(call.attrs["dim"].name):
        return x  # a window: moved already
    at = kit.axis(call)
    size = x.shape[at]
    by = max(-size, min(size, call.attrs["by"]))
    out = np.zeros_like(x)
    lead = (slice(None),) * at
    out[(*lead, slice(max(by, 0), size + min(by, 0)))] = x[
        (*lead, slice(max(-by, 0), size - max(by, 0)))
    ]
    return out


def _shift_text(call: kit.TorchCall) -> str:
    dim = call.attrs["dim"]
    if call.is_split(dim.name):
        return call.tensor(0)
    by = max(-dim.size, min(dim.size, call.attrs["by"]))
    return kit.padded_at(call.tensor(0), len(call.ins[0].dims), kit.axis(call), by, -by)


def _shift_gradient(call: kit.Backward) -> kit.Grads:
    dim = call.attrs["dim"]
    return {0: call.emit("shift", kit.with_dims(call, dim), dim=dim, by=-call.attrs["by"])}


kit.operator(
    "shift",
    kit.Surface("dim", (1, 1), (("by", ...),)),
    _shift_infer,
    _shift_factors,
    _shift_numpy,
    _shift_text,
    kit.samples(
        "s | dim=s by=1", "b s h | dim=s by=-2", "h b: i32 | dim=h by=5", "b s: bool | dim=s by=2"
    ),
    flops=kit.no_flops,
    passes=True,
    gradient=_shift_gradient,
    relocates=True,
    meaning="The tensor moved `by` places along a dim, towards higher indices; zeros come in.",
)
