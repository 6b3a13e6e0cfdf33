"""Pooling: the maximum or the mean of every window that slides along dims.

The gradient of a maximum goes to the first of equals, in row-major order of the taps: whatever the
layout, `max_pool_at` finds the same tap. `max_pool_grad` adds up what belongs to each element tap
by tap, `max_pool_take` takes it from there; they are each other's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, sliding

LEAST = -math.inf


def _slides(attrs: kit.Attrs, *, back: bool = False) -> tuple[sliding.Slide, ...]:
    return sliding.slides(attrs, attrs["size"], back=back)


# --- shapes and factors ------------------------------------------------------------------------


def _infer(name: str, *, back: bool = False, indices: bool = False) -> kit.Infer:
    """The shape rule along windows; with `back` from positions to elements."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        kit.need_dims(name, ins[0], attrs["source"])
        kit.need_kind(name, "float", ins[0])
        sliding.check_windows(name, attrs, attrs["size"])
        dims = sliding.replaced_dims(ins[0], attrs)
        kit.need_distinct(name, dims)
        sliding.check_sizes(name, _slides(attrs, back=back), attrs, back=back)
        return (kit.TensorType(dims, kit.I32 if indices else ins[0].dtype),)

    return infer


def _factors(sig: kit.Signature, fill: float, linear: bool) -> kit.Factors:
    """The loops of what reads elements and yields one number for each position."""
    slides = _slides(sig.attrs)
    every = [*kit.loops(sig, without=[s.coarse.name for s in slides])]
    for slide in slides:
        reads, indexed = slide.reads(fill), len(sig.ins) > 1
        ins = (slide.fine.name, *([slide.coarse.name] if indexed else []))
        windows = (reads, *([None] if indexed else [])) if reads else ()
        every.append(kit.Factor(slide.coarse.name, ins, (slide.coarse.name,), reads=windows))
    # Where there are indices, elements are only picked.
    picked = (0,) if len(sig.ins) > 1 else ()
    return kit.Factors(tuple(every), (frozenset({0}),) if linear else (), picked)


def _back_factors(sig: kit.Signature) -> kit.Factors:
    """The loops of what reads the positions that an element went into."""
    slides = _slides(sig.attrs, back=True)
    every = [*kit.loops(sig, without=[s.fine.name for s in slides])]
    for slide in slides:
        reads = slide.read_back()
        ins = (slide.coarse.name,) * len(sig.ins)
        windows = (reads,) * len(sig.ins) if reads else ()
        every.append(kit.Factor(slide.fine.name, ins, (slide.fine.name,), reads=windows))
    return kit.Factors(tuple(every), (frozenset({0}),))


def _cost(sig: kit.Signature) -> int:
    return math.prod(sig.attrs["size"]) * min(t.elements for t in (*sig.ins, *sig.outs))


# --- numpy -----------------------------------------------------------------------------------


def _number(tap: sliding.Tap, attrs: kit.Attrs) -> int:
    """The row-major number of a tap."""
    return int(np.ravel_multi_index(tap, attrs["size"]))


def _max_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    out = np.full(call.local(call.outs[0]).shape, LEAST, x.dtype)
    for _, part in sliding.tap_parts(call, x, _slides(call.attrs), LEAST):
        out = np.maximum(out, part)
    return out


def _at_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    shape = call.local(call.outs[0]).shape
    best, at = np.full(shape, LEAST, x.dtype), np.zeros(shape, np.int32)
    for tap, part in sliding.tap_parts(call, x, _slides(call.attrs), LEAST):
        larger = (part > best) | np.isnan(part)  # as torch: the last of NaN
        best, at = np.where(larger, part, best), np.where(larger, _number(tap, call.attrs), at)
    return at.astype(np.int32)


def _take_numpy(call: kit.NumpyCall, x: kit.Array, at: kit.Array) -> kit.Array:
    out = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    best_taps = at.transpose([call.ins[1].index(n) for n in call.outs[0].names])
    for tap, part in sliding.tap_parts(call, x, _slides(call.attrs)):
        out += np.where(best_taps == _number(tap, call.attrs), part, 0)
    return out


def _grad_numpy(call: kit.NumpyCall, dy: kit.Array, at: kit.Array) -> kit.Array:
    slides = _slides(call.attrs, back=True)
    best_taps = at.transpose([call.ins[1].index(n) for n in call.ins[0].names])
    parts = (
        (t, np.where(best_taps == _number(t, call.attrs), dy, 0)) for t in sliding.taps(slides)
    )
    return sliding.spread_back(call, slides, parts, dy.dtype)


def _mean_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    total = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    for _, part in sliding.tap_parts(call, x, _slides(call.attrs)):
        total += part
    return np.asarray(total / math.prod(call.attrs["size"]), dtype=x.dtype)


# --- torch -----------------------------------------------------------------------------------


def _groups(names: kit.Names, own: tuple[kit.Dim, ...]) -> tuple[kit.Names, ...]:
    """The dims as torch pools them: others, at most two of them apart, and those of windows."""
    along = [d.name for d in own]
    others = tuple(n for n in names if n not in along)
    split = [others[:-1], others[-1:]] if len(others) > 1 else [others]
    return (*split, *((n,) for n in along))


def _pool_text(
    call: kit.TorchCall, function: str, fill: float, more: str = "", cast: str = ""
) -> str:
    """A pooling of torch on operand 0, before its dims are put in order."""
    slides = _slides(call.attrs)
    x = kit.grouped(
        call.tensor(0), call.ins[0].names, _groups(call.ins[0].names, call.attrs["source"])
    )
    padding = sliding.own_padding(call, slides, _is_small) if not more else None
    if padding is None:
        x = sliding.padded(x, [sliding.margins(call, s) for s in slides], fill)
    x += cast
    options = [sliding.equal_or_tuple([s.size for s in slides])]
    strides = [s.stride for s in slides]
    if strides != [s.size for s in slides]:
        options.append(f"stride={sliding.equal_or_tuple(strides)}")
    if padding is not None and any(padding):
        options.append(f"padding={sliding.equal_or_tuple(padding)}")
    name = f"torch.nn.functional.{function}{len(slides)}d"
    return f"{name}({x}, {', '.join(options)}{more})"


def _is_small(slide: sliding.Slide) -> bool:
    """Whether torch pads so much: at most half a window. It minds the tensor without padding."""
    return 2 * slide.before <= slide.size <= slide.fine.size


def _in_order(call: kit.TorchCall, text: str) -> str:
    names = call.outs[0].names
    return sliding.guarded(
        call, kit.ungrouped(call, text, _groups(names, call.attrs["target"]), names)
    )


def _mean_text(call: kit.TorchCall) -> str:
    """In f32 where torch has no kernel of a narrower dtype for CPUs."""
    dtype = call.ins[0].dtype
    if len(call.attrs["source"]) < 3 or dtype.bytes >= kit.F32.bytes:
        return _in_order(call, _pool_text(call, "avg_pool", 0.0))
    wide = _pool_text(call, "avg_pool", 0.0, cast=".float()")
    return _in_order(call, f"{wide}.to({dtype.torch})")


def _at_text(call: kit.TorchCall) -> str:
    """The number of the tap, from the index into the padded tensor that torch gives."""
    index = _pool_text(call, "max_pool", LEAST, ", return_indices=True")
    slides = _slides(call.attrs)
    windows, strides = _geometry(slides)
    widths = kit.tuple_text([_width(call, s) for s in slides])
    return _in_order(call, f"{call.use('tap_of')}({index}[1], {widths}, {windows}, {strides})")


def _geometry(slides: Sequence[sliding.Slide]) -> tuple[str, str]:
    """The sizes of windows, and their strides."""
    return kit.tuple_text([s.size for s in slides]), kit.tuple_text([s.stride for s in slides])


def _width(call: kit.TorchCall, slide: sliding.Slide) -> str:
    """The text of the elements along a dim, padded."""
    if call.is_window(0, slide.fine.name):
        return f"{call.tensor(0)}.shape[{call.ins[0].index(slide.fine.name)}]"
    return f"{call.extent(slide.fine.name)} + {sum(sliding.margins(call, slide))}"


def _pair(
    call: kit.TorchCall, along: tuple[kit.Dim, ...], second: tuple[kit.Dim, ...]
) -> tuple[str, str]:
    """Both operands with the dims of the first in the order of torch."""
    names = call.ins[0].names
    others = tuple(n for n in names if n not in [d.name for d in along])
    first = kit.grouped(call.tensor(0), names, [(n,) for n in (*others, *(d.name for d in along))])
    order = [(n,) for n in (*others, *(d.name for d in second))]
    return first, kit.grouped(call.tensor(1), call.ins[1].names, order)


def _ordered(call: kit.TorchCall, text: str) -> str:
    """`text`, whose last dims are those of windows, in the order of the result."""
    target_dims = [d.name for d in call.attrs["target"]]
    others = [n for n in call.outs[0].names if n not in target_dims]
    return kit.ungrouped(call, text, [(n,) for n in (*others, *target_dims)], call.outs[0].names)


def _take_text(call: kit.TorchCall) -> str:
    slides = _slides(call.attrs)
    x, at = _pair(call, call.attrs["source"], call.attrs["target"])
    x = sliding.padded(x, [sliding.margins(call, s) for s in slides])
    windows, strides = _geometry(slides)
    return _ordered(call, f"{call.use('taken')}({x}, {at}, {windows}, {strides})")


def _grad_text(call: kit.TorchCall) -> str:
    slides = _slides(call.attrs, back=True)
    dy, at = _pair(call, call.attrs["source"], call.attrs["source"])
    windows, strides = _geometry(slides)
    starts = []
    for slide in slides:
        fine, coarse = slide.fine.name, slide.coarse.name
        if sliding.is_part(call, slide):
            first = f"({call.start(0, coarse)}) * {slide.stride} - {slide.before}"
            starts.append(f"{call.offset(fine)} - ({first})")
        else:
            starts.append(str(slide.before))
    sizes = kit.tuple_text([call.extent(s.fine.name) for s in slides])
    options = f"{windows}, {strides}, {kit.tuple_text(starts)}, {sizes}"
    return _ordered(call, f"{call.use('put_back')}({dy}, {at}, {options})")


# --- gradients -------------------------------------------------------------------------------


def _turned(attrs: kit.Attrs) -> dict[str, Any]:
    return {**attrs, "source": attrs["target"], "target": attrs["source"]}


def _max_gradient(call: kit.Backward) -> kit.Grads:
    """The cotangent of each position to the first of the largest in its window."""
    at = call.emit("max_pool_at", call.operand(0), **call.attrs)
    return {0: call.emit("max_pool_grad", kit.full_grad(call), at, **_turned(call.attrs))}


def _by_taps(name: str) -> kit.Gradient:
    """The gradient as operator `name` of the cotangent and the same taps, the other way."""

    def gradient(call: kit.Backward) -> kit.Grads:
        grad = kit.full_grad(call)
        return {0: call.emit(name, grad, call.operand(1), **_turned(call.attrs))}

    return gradient


def _mean_gradient(call: kit.Backward) -> kit.Grads:
    """The transposed convolution of the cotangent with a kernel of equal numbers."""
    attrs, slides = call.attrs, _slides(call.attrs)
    # A user's name cannot contain a dot.
    windows = tuple(kit.Dim(f"{s.fine.name}.window", s.size) for s in slides)
    share = kit.number(call, 1.0 / math.prod(attrs["size"]), call.ins[0].dtype)
    grad, kernel = kit.full_grad(call), call.full(share, windows)
    strides = tuple(s.stride for s in slides)
    options = {"stride": strides if len(set(strides)) > 1 else strides[0], "pad": attrs["pad"]}
    along = {"source": attrs["target"], "window": windows, "target": attrs["source"]}
    dims = call.ins[0].dims
    return {0: call.emit("upconv", grad, kernel, **along, dims=dims, **options, dilation=1)}


# --- records ---------------------------------------------------------------------------------

_CASES = kit.samples(
    'b h=8 | source=(h) size=(3) target=(h) stride=1 pad="same"',
    'h=8 b w=4 c=2 | source=(h w) size=(3 3) target=(ho=4 wo=2) stride=2 pad="same"',
    "h=8 w=4 | source=(w h) size=(3 3) target=(wo=2 ho=4) stride=2 pad=1",
    'b h=8 c=2 | source=(h) size=(5) target=(wo=2) stride=3 pad="valid"',
    'b d=2 c=2 w=4 wo=2 | source=(d w wo) size=(3 2 3) target=(d w wo) stride=1 pad="same"',
)


def _with_taps(cases: Sequence[kit.Sample], *, back: bool) -> Iterator[kit.Sample]:
    """The cases with the taps of their windows as second operand; `back` from the positions."""
    for case in cases:
        (x,), attrs = case.ins, dict(case.attrs)
        y = kit.TensorType(sliding.replaced_dims(x, attrs), x.dtype)
        at = kit.TensorType(tuple(reversed(y.dims)), kit.I32)
        along = _turned(attrs) if back else attrs
        yield kit.Sample((y if back else x, at), tuple(along.items()), ("int", "index:tap"))


_OPTIONS = (("stride", None), ("pad", "valid"))

kit.operator(
    "max_pool",
    kit.Surface("slide", (1, 1), _OPTIONS),
    _infer("max_pool"),
    lambda sig: _factors(sig, LEAST, linear=False),
    _max_numpy,
    lambda call: _in_order(call, _pool_text(call, "max_pool", LEAST)),
    _CASES,
    flops=_cost,
    true_rows=kit.rows_with_reason(
        "`monotone` stands for both extremes, and only one of them passes here",
        "P(max) -> P(max)",
    ),
    gradient=_max_gradient,
    meaning="The largest element of every window, without its padding. A window moves on by "
    "its size, unless `stride` says otherwise.",
)
kit.operator(
    "avg_pool",
    kit.Surface("slide", (1, 1), (*_OPTIONS, ("pad_counts", 1))),
    _infer("avg_pool"),
    lambda sig: _factors(sig, 0.0, linear=True),
    _mean_numpy,
    _mean_text,
    _CASES,
    exact=False,
    flops=_cost,
    gradient=_mean_gradient,
    meaning="The mean of every window; its padding counts as zeros, or with `pad_counts=0` not "
    "at all. A window moves on by its size, unless `stride` says otherwise.",
)
kit.operator(
    "max_pool_at",
    kit.Surface("view", (1, 1)),
    _infer("max_pool_at", indices=True),
    lambda sig: _factors(sig, LEAST, linear=False),
    _at_numpy,
    _at_text,
    _CASES,
    flops=_cost,
    meaning="The number of the first tap that has the largest element of a window, row-major.",
)
kit.operator(
    "max_pool_grad",
    kit.Surface("view", (2, 2)),
    _infer("max_pool_grad", back=True),
    _back_factors,
    _grad_numpy,
    _grad_text,
    kit.SampleList(partial(_with_taps, _CASES, back=True)),
    flops=_cost,
    gradient=_by_taps("max_pool_take"),
    meaning="The gradient of `max_pool`: the cotangent of each position, where its element is.",
)
kit.operator(
    "max_pool_take",
    kit.Surface("view", (2, 2)),
    _infer("max_pool_take"),
    lambda sig: _factors(sig, 0.0, linear=True),
    _take_numpy,
    _take_text,
    kit.SampleList(partial(_with_taps, _CASES, back=False)),
    flops=_cost,
    gradient=_by_taps("max_pool_grad"),
    meaning="The gradient of `max_pool_grad`: the element that each position was taken from.",
)
