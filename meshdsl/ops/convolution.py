"""Convolution, its transpose, and its gradient by the kernel: closed under gradients.

Dims have roles by where they occur, as in an einsum. In image, kernel and result: a group, each
with its own kernel. In image and kernel: summed. In the image alone: the batch; in the kernel
alone: the channels of the result. So `upconv`, the exact transpose of `conv`, takes the same
kernel, and grouped or depthwise convolutions need no option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factor,
    Factors,
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
    Array,
    listed,
    loop,
    merged_dims,
    need_dims,
    need_distinct,
    need_kind,
    need_one_dtype,
    sample,
    tensor,
)
from meshdsl.ops.sliding import (
    Slide,
    Tap,
    check_options,
    check_sizes,
    check_windows,
    cut_out,
    equal_or_tuple,
    grouped,
    guarded,
    is_part,
    margins,
    number_of,
    padded,
    positions,
    slides,
    spread_back,
    tapped,
    taps,
    ungrouped,
    widened,
)
from meshdsl.ops.torch_expressions import Names, tuple_text


@dataclass(frozen=True, slots=True)
class Roles:
    """The dims of a call by their roles, without those that windows slide along or consist of.

    `image` is what belongs to image or result and kernel: `summed` is in image and kernel, `made`
    in kernel and result.
    """

    batch: Names
    group: Names
    summed: Names
    made: Names


def roles_of(image: TensorType, kernel: TensorType, out: TensorType, attrs: Attrs) -> Roles:
    """The roles of the dims of a convolution, `upconv` as well."""
    window_dims = {d.name for key in ("source", "window", "target") for d in attrs[key]}
    loose = [n for n in image.names if n not in window_dims]
    return Roles(
        tuple(n for n in loose if not kernel.has(n)),
        tuple(n for n in loose if kernel.has(n) and out.has(n)),
        tuple(n for n in loose if kernel.has(n) and not out.has(n)),
        tuple(n for n in kernel.names if n not in window_dims and not image.has(n)),
    )


def _roles(sig: Signature | TorchCall) -> Roles:
    """The roles of a call of `conv` or `upconv`."""
    return roles_of(sig.ins[0], sig.ins[1], sig.outs[0], sig.attrs)


def _kernel_roles(sig: Signature | TorchCall) -> Roles:
    """The roles of the convolution of which `sig` computes the gradient by the kernel."""
    return roles_of(sig.ins[0], sig.outs[0], sig.ins[1], sig.attrs)


def _found(attrs: Attrs, *, back: bool = False) -> tuple[Slide, ...]:
    return slides(attrs, [d.size for d in attrs["window"]], back=back)


# --- shapes ----------------------------------------------------------------------------------


def _bind(name: str) -> Callable[[Attrs, tuple[TensorType, ...]], Attrs]:
    """The attributes with the dims of the result.

    Where a call does not give them, every dim that image and kernel share is summed, and the
    channels of the kernel take the place of the first of them.
    """

    def bind(attrs: Attrs, ins: tuple[TensorType, ...]) -> Attrs:
        if attrs["dims"] is not None:
            return attrs
        image, kernel = ins
        need_dims(name, image, attrs["source"])
        need_dims(name, kernel, attrs["window"])
        new = {s.name: t for s, t in zip(attrs["source"], attrs["target"], strict=True)}
        windows = {d.name for d in attrs["window"]}
        channels = [d for d in kernel.dims if not image.has(d.name) and d.name not in windows]
        dims: list[Dim] = []
        for dim in image.dims:
            if dim.name in new or kernel.has(dim.name):
                dims += channels
                channels = []
            if dim.name in new or not kernel.has(dim.name):
                dims.append(new.get(dim.name, dim))
        return {**attrs, "dims": tuple(dims)}

    return bind


def _infer(
    name: str, back: bool
) -> Callable[[tuple[TensorType, ...], Attrs], tuple[TensorType, ...]]:
    """The shape rule of `conv`; with `back` that of `upconv`."""

    def infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        image, kernel = ins
        need_kind(name, "float", *ins)
        dtype = need_one_dtype(name, *ins)
        check_windows(name, attrs, [d.size for d in attrs["window"]])
        need_dims(name, image, attrs["source"])
        need_dims(name, kernel, attrs["window"])
        merged_dims(name, *ins)
        need_distinct(name, attrs["dims"])
        out = TensorType(attrs["dims"], dtype)
        _check_places(name, image, kernel, out, attrs)
        check_sizes(name, _found(attrs, back=back), attrs, back=back)
        return (out,)

    return infer


def _check_places(
    name: str, image: TensorType, kernel: TensorType, out: TensorType, attrs: Attrs
) -> None:
    """MD0223 for a dim that cannot stand where it does, MD0207 for one that no operand has."""
    sources, targets = ({d.name for d in attrs[key]} for key in ("source", "target"))
    windows = {d.name for d in attrs["window"]}
    for dim in (*attrs["source"], *attrs["target"]):
        if kernel.has(dim.name):
            message = (
                f"`{name}` slides its kernel along `{dim}`, and the kernel {kernel} has it too"
            )
            raise OpError("MD0223", message, f"rename it there: `k[{dim} -> other]`")
    for dim in attrs["window"]:
        if image.has(dim.name) or out.has(dim.name):
            message = f"the window `{dim}` of `{name}` can be a dim of the kernel only"
            raise OpError("MD0223", message, f"its operands are {image} and {kernel}")
    missing = [d for d in attrs["target"] if not out.has(d.name)]
    lost = [n for n in image.names if n not in sources and not kernel.has(n) and not out.has(n)]
    lost += [n for n in kernel.names if n not in windows and not image.has(n) and not out.has(n)]
    if missing or lost:
        names = [*(d.name for d in missing), *lost]
        message = f"`{name}` yields {listed(names)}, and `-> [{', '.join(out.names)}]` lacks it"
        raise OpError("MD0223", message, "only dims that image and kernel share are summed")
    for dim in out.dims:
        stays = image.has(dim.name) and dim.name not in sources - targets
        if dim.name not in targets and not stays and not kernel.has(dim.name):
            message = f"`{name}` should yield the dim `{dim}`, which no operand has"
            raise OpError("MD0207", message, f"the operands are {image} and {kernel}")


def _kernel_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    """The shape rule of `conv_kernel`: of an image and a cotangent to the kernel, `dims`."""
    check_options("conv_kernel", attrs)
    need_dims("conv_kernel", ins[0], attrs["source"])
    need_dims("conv_kernel", ins[1], attrs["target"])
    merged_dims("conv_kernel", *ins)
    check_sizes("conv_kernel", _found(attrs), attrs)
    return (TensorType(attrs["dims"], need_one_dtype("conv_kernel", *ins)),)


# --- factors ---------------------------------------------------------------------------------


def _factors(sig: Signature, *, back: bool) -> Factors:
    roles = _roles(sig)
    every = [loop(sig, n) for n in (*roles.batch, *roles.group, *roles.made)]
    every += [loop(sig, n, "sum") for n in roles.summed]
    for slide in _found(sig.attrs, back=back):
        reads = slide.read_back() if back else slide.reads()
        source, target = (slide.fine, slide.coarse)[:: -1 if back else 1]
        ins, outs = (source.name, None), (target.name,)
        every.append(Factor(target.name, ins, outs, reads=(reads, None) if reads else ()))
    return Factors(tuple(every), (frozenset({0}), frozenset({1})))


def _kernel_factors(sig: Signature) -> Factors:
    roles = _kernel_roles(sig)
    every = [loop(sig, n) for n in (*roles.group, *roles.summed, *roles.made)]
    every += [loop(sig, n, "sum") for n in roles.batch]
    for slide in _found(sig.attrs):
        reads = slide.reads()
        ins = (slide.fine.name, slide.coarse.name)
        windows = (reads, None) if reads else ()
        every.append(Factor(slide.coarse.name, ins, (None,), "sum", windows))
    return Factors(tuple(every), (frozenset({0}), frozenset({1})))


def _flops(sig: Signature, *, back: bool = False) -> int:
    """Two for each tap of each position and each sum."""
    roles, positions_of = _roles(sig), sig.ins[0] if back else sig.outs[0]
    return _taps_flops(sig, positions_of, sig.ins[1], roles.made if back else roles.summed)


def _kernel_flops(sig: Signature) -> int:
    return _taps_flops(sig, sig.ins[1], sig.ins[0], _kernel_roles(sig).summed)


def _taps_flops(sig: Signature, at: TensorType, other: TensorType, dims: Names) -> int:
    window: tuple[Dim, ...] = sig.attrs["window"]
    each = math.prod(d.size for d in window) * math.prod(map(other.size, dims))
    return 2 * at.elements * each


# --- numpy -----------------------------------------------------------------------------------


def _einsum(a: Array, a_names: Names, b: Array, b_names: Names, out: Names) -> Array:
    numbers = {n: i for i, n in enumerate(dict.fromkeys((*a_names, *b_names)))}
    left, right, target = ([numbers[n] for n in names] for names in (a_names, b_names, out))
    return np.asarray(np.einsum(a, left, b, right, target))


def _tap_of(kernel: Array, names: Names, tap: Tap, attrs: Attrs) -> tuple[Array, Names]:
    """One tap of a kernel, and its dims."""
    at = dict(zip([d.name for d in attrs["window"]], tap, strict=True))
    index = tuple(at.get(n, slice(None)) for n in names)
    return kernel[index], tuple(n for n in names if n not in at)


def _local(call: NumpyCall, *, back: bool = False) -> tuple[Slide, ...]:
    """The windows, as far as the kernel is here."""
    return slides(call.attrs, [call.extent(d.name) for d in call.attrs["window"]], back=back)


def _renamed(names: Names, attrs: Attrs) -> Names:
    """`names` with the targets of the windows for their sources."""
    new = {s.name: t.name for s, t in zip(attrs["source"], attrs["target"], strict=True)}
    return tuple(new.get(n, n) for n in names)


def _numpy(call: NumpyCall, x: Array, k: Array) -> Array:
    sliding, names = _local(call), call.ins[0].names
    wide, out = widened(call, x, sliding), np.zeros(call.local(call.outs[0]).shape, x.dtype)
    for tap in taps(sliding):
        part, names_left = _tap_of(k, call.ins[1].names, tap, call.attrs)
        here = wide[tapped(call, tap, sliding, names)]
        out += _einsum(here, _renamed(names, call.attrs), part, names_left, call.outs[0].names)
    return out


def _up_numpy(call: NumpyCall, y: Array, k: Array) -> Array:
    sliding, names = _local(call, back=True), _renamed(call.ins[0].names, call.attrs)

    def parts() -> Iterator[tuple[Tap, Array]]:
        for tap in taps(sliding):
            part, names_left = _tap_of(k, call.ins[1].names, tap, call.attrs)
            yield tap, _einsum(y, names, part, names_left, call.outs[0].names)

    return spread_back(call, sliding, parts(), y.dtype)


def _kernel_numpy(call: NumpyCall, x: Array, dy: Array) -> Array:
    sliding, names = _local(call), call.ins[0].names
    wide, out = widened(call, x, sliding), np.zeros(call.local(call.outs[0]).shape, x.dtype)
    windows = [d.name for d in call.attrs["window"]]
    for tap in taps(sliding):
        at = dict(zip(windows, tap, strict=True))
        here = wide[tapped(call, tap, sliding, names)]
        names_left = tuple(n for n in call.outs[0].names if n not in at)
        part = _einsum(here, _renamed(names, call.attrs), dy, call.ins[1].names, names_left)
        out[tuple(at.get(n, slice(None)) for n in call.outs[0].names)] = part
    return out


# --- torch -----------------------------------------------------------------------------------


def _names(dims: tuple[Dim, ...]) -> tuple[Names, ...]:
    return tuple((d.name,) for d in dims)


def _options(
    found: tuple[Slide, ...],
    groups: str,
    padding: tuple[int, ...] = (),
    more: tuple[int, ...] = (),
) -> str:
    """The options of a torch convolution that differ from its defaults."""
    text = ""
    for name, numbers, default in (
        ("stride", [s.stride for s in found], 1),
        ("padding", padding, 0),
        ("output_padding", more, 0),
        ("dilation", [s.dilation for s in found], 1),
    ):
        if any(n != default for n in numbers):
            text += f", {name}={equal_or_tuple(numbers)}"
    return text if groups == "1" else f"{text}, groups={groups}"


def _operand(call: TorchCall, index: int, groups: tuple[Names, ...]) -> str:
    return grouped(call.tensor(index), call.ins[index].names, groups)


def _weight(call: TorchCall, index: int, roles: Roles) -> str:
    """A kernel as torch has it: [groups and channels of the result, summed, windows]."""
    outer = (*roles.group, *roles.made)
    return _operand(call, index, (outer, roles.summed, *_names(call.attrs["window"])))


def _padding(call: TorchCall, found: tuple[Slide, ...]) -> tuple[int, ...] | None:
    """The padding on both sides that makes as many positions as are wanted; None if none does."""
    windows = [call.is_window(0, s.fine.name) or s.is_identity for s in found]
    widths = [0 if windowed else s.before for s, windowed in zip(found, windows, strict=True)]
    counts = [positions(s, s.before) for s in found]
    fits = (
        windowed or n == s.coarse.size
        for s, n, windowed in zip(found, counts, windows, strict=True)
    )
    return tuple(widths) if all(fits) else None


def _image(call: TorchCall, found: tuple[Slide, ...], roles: Roles) -> tuple[str, tuple[int, ...]]:
    """The image as torch has it, and the padding that torch is to add."""
    channels = (*roles.group, *roles.summed)
    text = _operand(call, 0, (roles.batch, channels, *_names(call.attrs["source"])))
    padding = _padding(call, found)
    if padding is None:
        return padded(text, [margins(call, s) for s in found]), (0,) * len(found)
    return text, padding


def _torch(call: TorchCall) -> str:
    sliding, roles = _found(call.attrs), _roles(call)
    image, padding = _image(call, sliding, roles)
    channels = (*roles.group, *roles.made)
    kernel = _operand(call, 1, (channels, roles.summed, *_names(call.attrs["window"])))
    options = _options(sliding, number_of(call, roles.group), padding)
    text = f"torch.nn.functional.conv{len(sliding)}d({image}, {kernel}{options})"
    result = (roles.batch, channels, *_names(call.attrs["target"]))
    return guarded(call, ungrouped(call, text, result, call.outs[0].names))


def _up_torch(call: TorchCall) -> str:
    sliding, roles = _found(call.attrs, back=True), _roles(call)
    channels = (*roles.group, *roles.summed)
    image = _operand(call, 0, (roles.batch, channels, *_names(call.attrs["source"])))
    kernel = _operand(call, 1, (channels, roles.made, *_names(call.attrs["window"])))
    name = f"torch.nn.functional.conv_transpose{len(sliding)}d"
    groups = number_of(call, roles.group)
    cut = _cut(call, sliding)
    if cut is None:
        full = f"{name}({image}, {kernel}{_options(sliding, groups)})"
        text = cut_out(call, full, sliding)
    else:
        text = f"{name}({image}, {kernel}{_options(sliding, groups, *cut)})"
    result = (roles.batch, (*roles.group, *roles.made), *_names(call.attrs["target"]))
    return guarded(call, ungrouped(call, text, result, call.outs[0].names), sliding)


def _cut(call: TorchCall, found: tuple[Slide, ...]) -> tuple[tuple[int, ...], ...] | None:
    """The padding that torch is to cut off, and what it is to add at the end; None if it cannot."""
    if any(is_part(call, s) for s in found):
        return None
    widths = tuple(0 if s.is_identity else s.before for s in found)
    pairs = zip(found, widths, strict=True)
    more = tuple(
        0 if s.is_identity else s.fine.size - s.covered(s.coarse.size) + 2 * before
        for s, before in pairs
    )
    fits = (0 <= n < max(s.stride, s.dilation) for s, n in zip(found, more, strict=True))
    return (widths, more) if all(fits) else None


def _kernel_torch(call: TorchCall) -> str:
    sliding, roles = _found(call.attrs), _kernel_roles(call)
    image, padding = _image(call, sliding, roles)
    channels = (*roles.group, *roles.made)
    grad = _operand(call, 1, (roles.batch, channels, *_names(call.attrs["target"])))
    options = _options(sliding, number_of(call, roles.group), padding)
    sizes = (number_of(call, channels), number_of(call, roles.summed), *(s.size for s in sliding))
    name = f"torch.nn.grad.conv{len(sliding)}d_weight"
    text = f"{name}({image}, {tuple_text(sizes)}, {grad}{options})"
    result = (channels, roles.summed, *_names(call.attrs["window"]))
    return guarded(call, ungrouped(call, text, result, call.outs[0].names))


# --- gradients -------------------------------------------------------------------------------


def _kept(attrs: Attrs, *, turned: bool = False) -> dict[str, object]:
    """The attributes of an operator along the same windows; `turned` the other way."""
    source, target = (attrs[k] for k in (("target", "source") if turned else ("source", "target")))
    names = ("window", "stride", "pad", "dilation")
    return {"source": source, "target": target, **{n: attrs[n] for n in names}}


def _by(
    call: Backward, name: str, a: Value, b: Value, dims: tuple[Dim, ...], turned: bool
) -> Value:
    return call.emit(name, a, b, **_kept(call.attrs, turned=turned), dims=dims)


def _gradient(call: Backward) -> Mapping[int, Value]:
    """By the image the transpose, by the kernel the products of cotangent and image."""
    grad, (x, k), grads = call.full(call.grad, call.outs[0].dims), call.ins, {}
    if call.wanted(0):
        grads[0] = _by(call, "upconv", grad, call.operand(1), x.dims, True)
    if call.wanted(1):
        grads[1] = _by(call, "conv_kernel", call.operand(0), grad, k.dims, False)
    return grads


def _up_gradient(call: Backward) -> Mapping[int, Value]:
    """The transpose of the transpose; by the kernel, cotangent and image change places."""
    grad, (y, k), grads = call.full(call.grad, call.outs[0].dims), call.ins, {}
    if call.wanted(0):
        grads[0] = _by(call, "conv", grad, call.operand(1), y.dims, True)
    if call.wanted(1):
        grads[1] = _by(call, "conv_kernel", grad, call.operand(0), k.dims, True)
    return grads


def _kernel_gradient(call: Backward) -> Mapping[int, Value]:
    """Linear in the image and in the cotangent: with a kernel as cotangent, `upconv` and `conv`."""
    grad, (x, dy), grads = call.full(call.grad, call.outs[0].dims), call.ins, {}
    if call.wanted(0):
        grads[0] = _by(call, "upconv", call.operand(1), grad, x.dims, True)
    if call.wanted(1):
        grads[1] = _by(call, "conv", call.operand(0), grad, dy.dims, False)
    return grads


# --- records ---------------------------------------------------------------------------------

_B, _C, _O, _G = Dim("b", 2), Dim("c", 2), Dim("o", 4), Dim("g", 2)
_H, _W, _D = Dim("h", 8), Dim("w", 4), Dim("d", 2)
_KH, _KW, _KD = Dim("kh", 3), Dim("kw", 3), Dim("kd", 2)
_HO, _WO = Dim("ho", 4), Dim("wo", 2)


@dataclass(frozen=True, slots=True)
class _Case:
    """A convolution of the samples: dims of image, kernel and result, and its options."""

    image: tuple[Dim, ...]
    kernel: tuple[Dim, ...]
    out: tuple[Dim, ...]
    along: tuple[tuple[Dim, Dim, Dim], ...]
    stride: int = 1
    pad: str | int = "valid"
    dilation: int = 1

    def attrs(self, dims: tuple[Dim, ...], *, turned: bool = False) -> dict[str, Any]:
        source, window, target = zip(*self.along, strict=True)
        attrs: dict[str, Any] = {"source": source, "window": window, "target": target, "dims": dims}
        attrs |= {"stride": self.stride, "pad": self.pad, "dilation": self.dilation}
        return attrs | {"source": target, "target": source} if turned else attrs


_CASES = (
    _Case((_B, _C, _H), (_O, _C, _KH), (_B, _O, _H), ((_H, _KH, _H),), pad="same"),
    _Case(
        (_H, _C, _W, _B),
        (_KH, _C, _KW, _O),
        (_HO, _B, _O, _WO),
        ((_H, _KH, _HO), (_W, _KW, _WO)),
        stride=2,
        pad="same",
    ),
    _Case((_G, _C, _H), (_G, _KH, _O, _C), (_O, _G, _HO), ((_H, _KH, _HO),), 2, 1),
    _Case((_H,), (_KH,), (_HO,), ((_H, _KH, _HO),), dilation=2),
    _Case((_W, _H), (_KH, _KD), (_W, _H), ((_H, _KH, _H), (_W, _KD, _W)), 1, "same", 2),
    _Case((_C, _W, _H), (_C, Dim("one", 1)), (_W, _H), ((_H, Dim("one", 1), _H),)),
    _Case((_B, _G, _H), (_G, _KH), (_B, _G, _WO), ((_H, _KH, _WO),), 3, 0),
    _Case(
        (_B, _C, _W, _D, _WO),
        (_C, _KW, _KD, Dim("kx", 1)),
        (_B, _W, _D, _WO),
        ((_W, _KW, _W), (_D, _KD, _D), (_WO, Dim("kx", 1), _WO)),
        pad="same",
    ),
)


def _samples(kind: str) -> tuple[Sample, ...]:
    samples = []
    for case in _CASES:
        x, k, y = (tensor(*dims) for dims in (case.image, case.kernel, case.out))
        ins, out = {"conv": ((x, k), y), "upconv": ((y, k), x), "conv_kernel": ((x, y), k)}[kind]
        samples.append(sample(*ins, **case.attrs(out.dims, turned=kind == "upconv")))
    return tuple(samples)


_OPTIONS = (("stride", 1), ("pad", "valid"), ("dilation", 1))

register(
    OpDef(
        "conv",
        Surface("filter", (2, 2), _OPTIONS),
        _infer("conv", back=False),
        lambda sig: _factors(sig, back=False),
        _numpy,
        _torch,
        _samples("conv"),
        bind=_bind("conv"),
        flops=_flops,
        gradient=_gradient,
        precision="compute",
        meaning="The image under a kernel that slides along dims of it: at each position the sum "
        "of the products. Dims that only the image has are the batch, those of the kernel alone "
        "the channels of the result; those of both are groups where the result has them, else "
        "summed.",
    )
)
register(
    OpDef(
        "upconv",
        Surface("filter", (2, 2), _OPTIONS),
        _infer("upconv", back=True),
        lambda sig: _factors(sig, back=True),
        _up_numpy,
        _up_torch,
        _samples("upconv"),
        bind=_bind("upconv"),
        flops=lambda sig: _flops(sig, back=True),
        gradient=_up_gradient,
        precision="compute",
        meaning="The exact transpose of `conv` with the same options: every element of the image "
        "adds the kernel, scaled by it, to the positions that `conv` would read it from.",
    )
)
register(
    OpDef(
        "conv_kernel",
        Surface("view", (2, 2)),
        _kernel_infer,
        _kernel_factors,
        _kernel_numpy,
        _kernel_torch,
        _samples("conv_kernel"),
        flops=_kernel_flops,
        gradient=_kernel_gradient,
        precision="compute",
        meaning="The gradient of `conv` by its kernel: the products of image and cotangent, "
        "summed over all positions.",
    )
)
