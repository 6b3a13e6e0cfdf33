"""Pooling: the maximum or the mean of every window that slides along dims.

The gradient of a maximum goes to the first of equals, in row-major order of the taps: whatever the
layout, `max_pool_at` finds the same tap. `max_pool_grad` adds up what belongs to each element tap
by tap, `max_pool_take` takes it from there; they are each other's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshdsl.ir.types import F32, I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import number
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factor,
    Factors,
    NumpyCall,
    OpDef,
    Sample,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    Array,
    loops,
    need_dims,
    need_distinct,
    need_kind,
    sample,
    swapped,
    tensor,
)
from meshdsl.ops.sliding import (
    Slide,
    Tap,
    check_sizes,
    check_windows,
    equal_or_tuple,
    grouped,
    guarded,
    is_part,
    margins,
    padded,
    positions,
    replaced_dims,
    slides,
    spread_back,
    tapped,
    taps,
    ungrouped,
    widened,
)
from meshdsl.ops.torch_expressions import Names, tuple_text

LEAST = -math.inf


def _found(attrs: Attrs, *, back: bool = False) -> tuple[Slide, ...]:
    return slides(attrs, attrs["size"], back=back)


# --- shapes and factors ------------------------------------------------------------------------


def _infer(
    name: str, *, back: bool = False, indices: bool = False
) -> Callable[[tuple[TensorType, ...], Attrs], tuple[TensorType, ...]]:
    """The shape rule along windows; with `back` from positions to elements."""

    def infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        need_dims(name, ins[0], attrs["source"])
        need_kind(name, "float", ins[0])
        check_windows(name, attrs, attrs["size"])
        dims = replaced_dims(ins[0], attrs)
        need_distinct(name, dims)
        check_sizes(name, _found(attrs, back=back), attrs, back=back)
        return (TensorType(dims, I32 if indices else ins[0].dtype),)

    return infer


def _factors(sig: Signature, fill: float, linear: bool) -> Factors:
    """The loops of what reads elements and yields one number for each position."""
    sliding = _found(sig.attrs)
    every = [*loops(sig, without=[s.coarse.name for s in sliding])]
    for slide in sliding:
        reads, indexed = slide.reads(fill), len(sig.ins) > 1
        ins = (slide.fine.name, *([slide.coarse.name] if indexed else []))
        windows = (reads, *([None] if indexed else [])) if reads else ()
        every.append(Factor(slide.coarse.name, ins, (slide.coarse.name,), reads=windows))
    # Where there are indices, elements are only picked.
    picked = (0,) if len(sig.ins) > 1 else ()
    return Factors(tuple(every), (frozenset({0}),) if linear else (), picked)


def _back_factors(sig: Signature) -> Factors:
    """The loops of what reads the positions that an element went into."""
    sliding = _found(sig.attrs, back=True)
    every = [*loops(sig, without=[s.fine.name for s in sliding])]
    for slide in sliding:
        reads = slide.read_back()
        ins = (slide.coarse.name,) * len(sig.ins)
        windows = (reads,) * len(sig.ins) if reads else ()
        every.append(Factor(slide.fine.name, ins, (slide.fine.name,), reads=windows))
    return Factors(tuple(every), (frozenset({0}),))


def _cost(sig: Signature) -> int:
    return math.prod(sig.attrs["size"]) * min(t.elements for t in (*sig.ins, *sig.outs))


# --- numpy -----------------------------------------------------------------------------------


def _number(tap: Tap, attrs: Attrs) -> int:
    """The row-major number of a tap."""
    return int(np.ravel_multi_index(tap, attrs["size"]))


def _parts(call: NumpyCall, x: Array, fill: float) -> Iterator[tuple[Tap, Array]]:
    """What each tap of every local position is."""
    sliding, names = _found(call.attrs), call.ins[0].names
    wide = widened(call, x, sliding, fill)
    for tap in taps(sliding):
        yield tap, wide[tapped(call, tap, sliding, names)]


def _max_numpy(call: NumpyCall, x: Array) -> Array:
    out = np.full(call.local(call.outs[0]).shape, LEAST, x.dtype)
    for _, part in _parts(call, x, LEAST):
        out = np.maximum(out, part)
    return out


def _at_numpy(call: NumpyCall, x: Array) -> Array:
    shape = call.local(call.outs[0]).shape
    best, at = np.full(shape, LEAST, x.dtype), np.zeros(shape, np.int32)
    for tap, part in _parts(call, x, LEAST):
        larger = (part > best) | np.isnan(part)  # as torch: the last of NaN
        best, at = np.where(larger, part, best), np.where(larger, _number(tap, call.attrs), at)
    return at.astype(np.int32)


def _take_numpy(call: NumpyCall, x: Array, at: Array) -> Array:
    out = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    best_taps = at.transpose([call.ins[1].index(n) for n in call.outs[0].names])
    for tap, part in _parts(call, x, 0.0):
        out += np.where(best_taps == _number(tap, call.attrs), part, 0)
    return out


def _grad_numpy(call: NumpyCall, dy: Array, at: Array) -> Array:
    sliding = _found(call.attrs, back=True)
    best_taps = at.transpose([call.ins[1].index(n) for n in call.ins[0].names])
    parts = ((t, np.where(best_taps == _number(t, call.attrs), dy, 0)) for t in taps(sliding))
    return spread_back(call, sliding, parts, dy.dtype)


def _mean_numpy(call: NumpyCall, x: Array) -> Array:
    total = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    for _, part in _parts(call, x, 0.0):
        total += part
    return np.asarray(total / math.prod(call.attrs["size"]), dtype=x.dtype)


# --- torch -----------------------------------------------------------------------------------


def _groups(names: Names, own: tuple[Dim, ...]) -> tuple[Names, ...]:
    """The dims as torch pools them: others, at most two of them apart, and those of windows."""
    along = [d.name for d in own]
    others = tuple(n for n in names if n not in along)
    split = [others[:-1], others[-1:]] if len(others) > 1 else [others]
    return (*split, *((n,) for n in along))


def _pool_text(call: TorchCall, function: str, fill: float, more: str = "", cast: str = "") -> str:
    """A pooling of torch on operand 0, before its dims are put in order."""
    sliding = _found(call.attrs)
    x = grouped(call.tensor(0), call.ins[0].names, _groups(call.ins[0].names, call.attrs["source"]))
    padding = _padding(call, sliding) if not more else None
    if padding is None:
        x = padded(x, [margins(call, s) for s in sliding], fill)
    x += cast
    options = [equal_or_tuple([s.size for s in sliding])]
    strides = [s.stride for s in sliding]
    if strides != [s.size for s in sliding]:
        options.append(f"stride={equal_or_tuple(strides)}")
    if padding is not None and any(padding):
        options.append(f"padding={equal_or_tuple(padding)}")
    name = f"torch.nn.functional.{function}{len(sliding)}d"
    return f"{name}({x}, {', '.join(options)}{more})"


def _padding(call: TorchCall, found: tuple[Slide, ...]) -> tuple[int, ...] | None:
    """The padding that torch can add itself: equal on both sides, at most half a window."""
    windowed = [call.is_window(0, s.fine.name) or s.is_identity for s in found]
    widths = tuple(0 if o else s.before for s, o in zip(found, windowed, strict=True))
    fits = all(
        o
        or (
            positions(s, s.before) == s.coarse.size
            and 2 * s.before <= s.size <= s.fine.size  # torch minds the tensor without padding
        )
        for s, o in zip(found, windowed, strict=True)
    )
    return widths if fits else None


def _in_order(call: TorchCall, text: str) -> str:
    names = call.outs[0].names
    return guarded(call, ungrouped(call, text, _groups(names, call.attrs["target"]), names))


def _max_text(call: TorchCall) -> str:
    return _in_order(call, _pool_text(call, "max_pool", LEAST))


def _mean_text(call: TorchCall) -> str:
    """In f32 where torch has no kernel of a narrower dtype for CPUs."""
    dtype = call.ins[0].dtype
    if len(call.attrs["source"]) < 3 or dtype.bytes >= F32.bytes:
        return _in_order(call, _pool_text(call, "avg_pool", 0.0))
    wide = _pool_text(call, "avg_pool", 0.0, cast=".float()")
    return _in_order(call, f"{wide}.to({dtype.torch})")


def _at_text(call: TorchCall) -> str:
    """The number of the tap, from the index into the padded tensor that torch gives."""
    index = _pool_text(call, "max_pool", LEAST, ", return_indices=True")
    sliding = _found(call.attrs)
    windows = tuple_text([s.size for s in sliding])
    strides = tuple_text([s.stride for s in sliding])
    widths = tuple_text([_width(call, s) for s in sliding])
    return _in_order(call, f"{call.use('tap_of')}({index}[1], {widths}, {windows}, {strides})")


def _width(call: TorchCall, slide: Slide) -> str:
    """The text of the elements along a dim, padded."""
    if call.is_window(0, slide.fine.name):
        return f"{call.tensor(0)}.shape[{call.ins[0].index(slide.fine.name)}]"
    return f"{call.extent(slide.fine.name)} + {sum(margins(call, slide))}"


def _pair(call: TorchCall, along: tuple[Dim, ...], second: tuple[Dim, ...]) -> tuple[str, str]:
    """Both operands with the dims of the first in the order of torch."""
    names = call.ins[0].names
    others = tuple(n for n in names if n not in [d.name for d in along])
    first = grouped(call.tensor(0), names, [(n,) for n in (*others, *(d.name for d in along))])
    order = [(n,) for n in (*others, *(d.name for d in second))]
    return first, grouped(call.tensor(1), call.ins[1].names, order)


def _ordered(call: TorchCall, text: str) -> str:
    """`text`, whose last dims are those of windows, in the order of the result."""
    target_dims = [d.name for d in call.attrs["target"]]
    others = [n for n in call.outs[0].names if n not in target_dims]
    return ungrouped(call, text, [(n,) for n in (*others, *target_dims)], call.outs[0].names)


def _take_text(call: TorchCall) -> str:
    sliding = _found(call.attrs)
    x, at = _pair(call, call.attrs["source"], call.attrs["target"])
    x = padded(x, [margins(call, s) for s in sliding])
    windows = tuple_text([s.size for s in sliding])
    strides = tuple_text([s.stride for s in sliding])
    return _ordered(call, f"{call.use('taken')}({x}, {at}, {windows}, {strides})")


def _grad_text(call: TorchCall) -> str:
    sliding = _found(call.attrs, back=True)
    dy, at = _pair(call, call.attrs["source"], call.attrs["source"])
    windows = tuple_text([s.size for s in sliding])
    strides = tuple_text([s.stride for s in sliding])
    starts = []
    for slide in sliding:
        fine, coarse = slide.fine.name, slide.coarse.name
        if is_part(call, slide):
            first = f"({call.start(0, coarse)}) * {slide.stride} - {slide.before}"
            starts.append(f"{call.offset(fine)} - ({first})")
        else:
            starts.append(str(slide.before))
    sizes = tuple_text([call.extent(s.fine.name) for s in sliding])
    options = f"{windows}, {strides}, {tuple_text(starts)}, {sizes}"
    return _ordered(call, f"{call.use('put_back')}({dy}, {at}, {options})")


# --- gradients -------------------------------------------------------------------------------


def _turned(attrs: Attrs) -> dict[str, Any]:
    return {**attrs, "source": attrs["target"], "target": attrs["source"]}


def _max_gradient(call: Backward) -> Mapping[int, Value]:
    """The cotangent of each position to the first of the largest in its window."""
    at = call.emit("max_pool_at", call.operand(0), **call.attrs)
    grad = call.full(call.grad, call.outs[0].dims)
    return {0: call.emit("max_pool_grad", grad, at, **_turned(call.attrs))}


def _grad_gradient(call: Backward) -> Mapping[int, Value]:
    grad = call.full(call.grad, call.outs[0].dims)
    return {0: call.emit("max_pool_take", grad, call.operand(1), **_turned(call.attrs))}


def _take_gradient(call: Backward) -> Mapping[int, Value]:
    grad = call.full(call.grad, call.outs[0].dims)
    return {0: call.emit("max_pool_grad", grad, call.operand(1), **_turned(call.attrs))}


def _mean_gradient(call: Backward) -> Mapping[int, Value]:
    """The transposed convolution of the cotangent with a kernel of equal numbers."""
    attrs, sliding = call.attrs, _found(call.attrs)
    # A user's name cannot contain a dot.
    windows = tuple(Dim(f"{s.fine.name}.window", s.size) for s in sliding)
    share = number(call, 1.0 / math.prod(attrs["size"]), call.ins[0].dtype)
    grad, kernel = call.full(call.grad, call.outs[0].dims), call.full(share, windows)
    strides = tuple(s.stride for s in sliding)
    options = {"stride": strides if len(set(strides)) > 1 else strides[0], "pad": attrs["pad"]}
    along = {"source": attrs["target"], "window": windows, "target": attrs["source"]}
    dims = call.ins[0].dims
    return {0: call.emit("upconv", grad, kernel, **along, dims=dims, **options, dilation=1)}


# --- records ---------------------------------------------------------------------------------

_B, _C, _H, _W, _D = Dim("b", 2), Dim("c", 2), Dim("h", 8), Dim("w", 4), Dim("d", 2)
_HO, _WO, _DO = Dim("ho", 4), Dim("wo", 2), Dim("do", 2)

_CASES: tuple[tuple[tuple[Dim, ...], dict[str, Any]], ...] = (
    ((_B, _H), {"source": (_H,), "size": (3,), "target": (_H,), "stride": 1, "pad": "same"}),
    (
        (_H, _B, _W, _C),
        {"source": (_H, _W), "size": (3, 3), "target": (_HO, _WO), "stride": 2, "pad": "same"},
    ),
    ((_H, _W), {"source": (_W, _H), "size": (3, 3), "target": (_WO, _HO), "stride": 2, "pad": 1}),
    ((_B, _H, _C), {"source": (_H,), "size": (5,), "target": (_WO,), "stride": 3, "pad": "valid"}),
    (
        (_B, _D, _C, _W, _WO),
        {
            "source": (_D, _W, _WO),
            "size": (3, 2, 3),
            "target": (_D, _W, _WO),
            "stride": 1,
            "pad": "same",
        },
    ),
)


def _samples(*, back: bool = False, indexed: bool = False) -> tuple[Sample, ...]:
    samples = []
    for dims, attrs in _CASES:
        x = tensor(*dims)
        y = TensorType(replaced_dims(x, attrs), x.dtype)
        first = y if back else x
        along = _turned(attrs) if back else attrs
        if not indexed:
            samples.append(sample(first, **along))
            continue
        at = TensorType(tuple(reversed(y.dims)), I32)
        samples.append(sample(first, at, values=("int", "index:tap"), **along))
    return tuple(samples)


_OPTIONS = (("stride", None), ("pad", "valid"))

register(
    OpDef(
        "max_pool",
        Surface("slide", (1, 1), _OPTIONS),
        _infer("max_pool"),
        lambda sig: _factors(sig, LEAST, linear=False),
        _max_numpy,
        _max_text,
        _samples(),
        flops=_cost,
        true_rows=swapped(
            "`monotone` stands for both extremes, and only one of them passes here",
            "P(max) -> P(max)",
        ),
        gradient=_max_gradient,
        meaning="The largest element of every window, without its padding. A window moves on by "
        "its size, unless `stride` says otherwise.",
    )
)
register(
    OpDef(
        "avg_pool",
        Surface("slide", (1, 1), (*_OPTIONS, ("pad_counts", 1))),
        _infer("avg_pool"),
        lambda sig: _factors(sig, 0.0, linear=True),
        _mean_numpy,
        _mean_text,
        _samples(),
        exact=False,
        flops=_cost,
        gradient=_mean_gradient,
        meaning="The mean of every window; its padding counts as zeros, or with `pad_counts=0` not "
        "at all. A window moves on by its size, unless `stride` says otherwise.",
    )
)
register(
    OpDef(
        "max_pool_at",
        Surface("view", (1, 1)),
        _infer("max_pool_at", indices=True),
        lambda sig: _factors(sig, LEAST, linear=False),
        _at_numpy,
        _at_text,
        _samples(),
        flops=_cost,
        meaning="The number of the first tap that has the largest element of a window, row-major.",
    )
)
register(
    OpDef(
        "max_pool_grad",
        Surface("view", (2, 2)),
        _infer("max_pool_grad", back=True),
        _back_factors,
        _grad_numpy,
        _grad_text,
        _samples(back=True, indexed=True),
        flops=_cost,
        gradient=_grad_gradient,
        meaning="The gradient of `max_pool`: the cotangent of each position, where its element is.",
    )
)
register(
    OpDef(
        "max_pool_take",
        Surface("view", (2, 2)),
        _infer("max_pool_take"),
        lambda sig: _factors(sig, 0.0, linear=True),
        _take_numpy,
        _take_text,
        _samples(indexed=True),
        flops=_cost,
        gradient=_take_gradient,
        meaning="The gradient of `max_pool_grad`: the element that each position was taken from.",
    )
)
