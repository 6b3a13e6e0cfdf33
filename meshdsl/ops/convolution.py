"""Convolution, its transpose, and its gradient by the kernel: closed under gradients.

Dims have roles by where they occur, as in an einsum. In image, kernel and result: a group, each
with its own kernel. In image and kernel: summed. In the image alone: the batch; in the kernel
alone: the channels of the result. So `upconv`, the exact transpose of `conv`, takes the same
kernel, and grouped or depthwise convolutions need no option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, sliding
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Roles:
    """The dims of a call by their roles, without those that windows slide along or consist of.

    `image` is what belongs to image or result and kernel: `summed` is in image and kernel, `made`
    in kernel and result.
    """

    batch: kit.Names
    group: kit.Names
    summed: kit.Names
    made: kit.Names


def roles_of(
    image: kit.TensorType, kernel: kit.TensorType, out: kit.TensorType, attrs: kit.Attrs
) -> Roles:
    """The roles of the dims of a convolution, `upconv` as well."""
    window_dims = {d.name for key in ("source", "window", "target") for d in attrs[key]}
    loose = [n for n in image.names if n not in window_dims]
    return Roles(
        tuple(n for n in loose if not kernel.has(n)),
        tuple(n for n in loose if kernel.has(n) and out.has(n)),
        tuple(n for n in loose if kernel.has(n) and not out.has(n)),
        tuple(n for n in kernel.names if n not in window_dims and not image.has(n)),
    )


def _roles(sig: kit.Signature | kit.TorchCall) -> Roles:
    """The roles of a call of `conv` or `upconv`."""
    return roles_of(sig.ins[0], sig.ins[1], sig.outs[0], sig.attrs)


def _kernel_roles(sig: kit.Signature | kit.TorchCall) -> Roles:
    """The roles of the convolution of which `sig` computes the gradient by the kernel."""
    return roles_of(sig.ins[0], sig.outs[0], sig.ins[1], sig.attrs)


def _slides(attrs: kit.Attrs, *, back: bool = False) -> tuple[sliding.Slide, ...]:
    return sliding.slides(attrs, [d.size for d in attrs["window"]], back=back)


# --- shapes ----------------------------------------------------------------------------------


def _bind(name: str) -> kit.Bind:
    """The attributes with the dims of the result.

    Where a call does not give them, every dim that image and kernel share is summed, and the
    channels of the kernel take the place of the first of them.
    """

    def bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
        if attrs["dims"] is not None:
            return attrs
        image, kernel = ins
        kit.need_dims(name, image, attrs["source"])
        kit.need_dims(name, kernel, attrs["window"])
        new = {s.name: t for s, t in zip(attrs["source"], attrs["target"], strict=True)}
        windows = {d.name for d in attrs["window"]}
        channels = [d for d in kernel.dims if not image.has(d.name) and d.name not in windows]
        dims: list[kit.Dim] = []
        for dim in image.dims:
            if dim.name in new or kernel.has(dim.name):
                dims += channels
                channels = []
            if dim.name in new or not kernel.has(dim.name):
                dims.append(new.get(dim.name, dim))
        return {**attrs, "dims": tuple(dims)}

    return bind


def _infer(name: str, back: bool) -> kit.Infer:
    """The shape rule of `conv`; with `back` that of `upconv`."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        image, kernel = ins
        kit.need_kind(name, "float", *ins)
        dtype = kit.need_one_dtype(name, *ins)
        sliding.check_windows(name, attrs, [d.size for d in attrs["window"]])
        kit.need_dims(name, image, attrs["source"])
        kit.need_dims(name, kernel, attrs["window"])
        kit.merged_dims(name, *ins)
        kit.need_distinct(name, attrs["dims"])
        out = kit.TensorType(attrs["dims"], dtype)
        _check_places(name, image, kernel, out, attrs)
        sliding.check_sizes(name, _slides(attrs, back=back), attrs, back=back)
        return (out,)

    return infer


def _check_places(
    name: str, image: kit.TensorType, kernel: kit.TensorType, out: kit.TensorType, attrs: kit.Attrs
) -> None:
    """MD0223 for a dim that cannot stand where it does, MD0207 for one that no operand has."""
    sources, targets = ({d.name for d in attrs[key]} for key in ("source", "target"))
    windows = {d.name for d in attrs["window"]}
    for dim in (*attrs["source"], *attrs["target"]):
        if kernel.has(dim.name):
            message = (
                f"`{name}` slides its kernel along `{dim}`, and the kernel {kernel} has it too"
            )
            raise kit.OpError("MD0223", message, f"rename it there: `k[{dim} -> other]`")
    for dim in attrs["window"]:
        if image.has(dim.name) or out.has(dim.name):
            message = f"the window `{dim}` of `{name}` can be a dim of the kernel only"
            raise kit.OpError("MD0223", message, f"its operands are {image} and {kernel}")
    missing = [d for d in attrs["target"] if not out.has(d.name)]
    lost = [n for n in image.names if n not in sources and not kernel.has(n) and not out.has(n)]
    lost += [n for n in kernel.names if n not in windows and not image.has(n) and not out.has(n)]
    if missing or lost:
        names = [*(d.name for d in missing), *lost]
        message = f"`{name}` yields {kit.listed(names)}, and `-> [{', '.join(out.names)}]` lacks it"
        help = "only dims that image and kernel share are summed"
        way = kit.ResultDims((*names, *out.names))
        raise kit.OpError("MD0223", message, None, way, also=help)
    for dim in out.dims:
        stays = image.has(dim.name) and dim.name not in sources - targets
        if dim.name not in targets and not stays and not kernel.has(dim.name):
            message = f"`{name}` should yield the dim `{dim}`, which no operand has"
            raise kit.OpError("MD0207", message, f"the operands are {image} and {kernel}")


def _kernel_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """The shape rule of `conv_kernel`: of an image and a cotangent to the kernel, `dims`."""
    sliding.check_options("conv_kernel", attrs)
    kit.need_dims("conv_kernel", ins[0], attrs["source"])
    kit.need_dims("conv_kernel", ins[1], attrs["target"])
    kit.merged_dims("conv_kernel", *ins)
    sliding.check_sizes("conv_kernel", _slides(attrs), attrs)
    return (kit.TensorType(attrs["dims"], kit.need_one_dtype("conv_kernel", *ins)),)


# --- factors ---------------------------------------------------------------------------------


def _factors(sig: kit.Signature, *, back: bool) -> kit.Factors:
    roles = _roles(sig)
    every = [kit.loop(sig, n) for n in (*roles.batch, *roles.group, *roles.made)]
    every += [kit.loop(sig, n, "sum") for n in roles.summed]
    for slide in _slides(sig.attrs, back=back):
        reads = slide.read_back() if back else slide.reads()
        source, target = (slide.fine, slide.coarse)[:: -1 if back else 1]
        ins, outs = (source.name, None), (target.name,)
        every.append(kit.Factor(target.name, ins, outs, reads=(reads, None) if reads else ()))
    return kit.Factors(tuple(every), (frozenset({0}), frozenset({1})))


def _kernel_factors(sig: kit.Signature) -> kit.Factors:
    roles = _kernel_roles(sig)
    every = [kit.loop(sig, n) for n in (*roles.group, *roles.summed, *roles.made)]
    every += [kit.loop(sig, n, "sum") for n in roles.batch]
    for slide in _slides(sig.attrs):
        reads = slide.reads()
        ins = (slide.fine.name, slide.coarse.name)
        windows = (reads, None) if reads else ()
        every.append(kit.Factor(slide.coarse.name, ins, (None,), "sum", windows))
    return kit.Factors(tuple(every), (frozenset({0}), frozenset({1})))


def _flops(sig: kit.Signature, *, back: bool = False) -> int:
    """Two for each tap of each position and each sum."""
    roles, positions_of = _roles(sig), sig.ins[0] if back else sig.outs[0]
    return _taps_flops(sig, positions_of, sig.ins[1], roles.made if back else roles.summed)


def _taps_flops(
    sig: kit.Signature, at: kit.TensorType, other: kit.TensorType, dims: kit.Names
) -> int:
    window: tuple[kit.Dim, ...] = sig.attrs["window"]
    each = math.prod(d.size for d in window) * math.prod(map(other.size, dims))
    return 2 * at.elements * each


# --- numpy -----------------------------------------------------------------------------------


def _tap_of(
    kernel: kit.Array, names: kit.Names, tap: sliding.Tap, attrs: kit.Attrs
) -> tuple[kit.Array, kit.Names]:
    """One tap of a kernel, and its dims."""
    at = dict(zip([d.name for d in attrs["window"]], tap, strict=True))
    index = tuple(at.get(n, slice(None)) for n in names)
    return kernel[index], tuple(n for n in names if n not in at)


def _local(call: kit.NumpyCall, *, back: bool = False) -> tuple[sliding.Slide, ...]:
    """The windows, as far as the kernel is here."""
    return sliding.slides(
        call.attrs, [call.extent(d.name) for d in call.attrs["window"]], back=back
    )


def _renamed(names: kit.Names, attrs: kit.Attrs) -> kit.Names:
    """`names` with the targets of the windows for their sources."""
    new = {s.name: t.name for s, t in zip(attrs["source"], attrs["target"], strict=True)}
    return tuple(new.get(n, n) for n in names)


def _numpy(call: kit.NumpyCall, x: kit.Array, k: kit.Array) -> kit.Array:
    out = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    names = _renamed(call.ins[0].names, call.attrs)
    for tap, here in sliding.tap_parts(call, x, _local(call)):
        part = _tap_of(k, call.ins[1].names, tap, call.attrs)
        out += kit.einsum_by_name((here, names), part, to=call.outs[0].names)
    return out


def _up_numpy(call: kit.NumpyCall, y: kit.Array, k: kit.Array) -> kit.Array:
    slides, names = _local(call, back=True), _renamed(call.ins[0].names, call.attrs)

    def parts() -> Iterator[tuple[sliding.Tap, kit.Array]]:
        for tap in sliding.taps(slides):
            part = _tap_of(k, call.ins[1].names, tap, call.attrs)
            yield tap, kit.einsum_by_name((y, names), part, to=call.outs[0].names)

    return sliding.spread_back(call, slides, parts(), y.dtype)


def _kernel_numpy(call: kit.NumpyCall, x: kit.Array, dy: kit.Array) -> kit.Array:
    out = np.zeros(call.local(call.outs[0]).shape, x.dtype)
    names = _renamed(call.ins[0].names, call.attrs)
    windows = [d.name for d in call.attrs["window"]]
    for tap, here in sliding.tap_parts(call, x, _local(call)):
        at = dict(zip(windows, tap, strict=True))
        names_left = tuple(n for n in call.outs[0].names if n not in at)
        part = kit.einsum_by_name((here, names), (dy, call.ins[1].names), to=names_left)
        out[tuple(at.get(n, slice(None)) for n in call.outs[0].names)] = part
    return out


# --- torch -----------------------------------------------------------------------------------


def _names(dims: tuple[kit.Dim, ...]) -> tuple[kit.Names, ...]:
    return tuple((d.name,) for d in dims)


def _options(
    slides: tuple[sliding.Slide, ...],
    groups: str,
    padding: tuple[int, ...] = (),
    more: tuple[int, ...] = (),
) -> str:
    """The options of a torch convolution that differ from its defaults."""
    text = ""
    for name, numbers, default in (
        ("stride", [s.stride for s in slides], 1),
        ("padding", padding, 0),
        ("output_padding", more, 0),
        ("dilation", [s.dilation for s in slides], 1),
    ):
        if any(n != default for n in numbers):
            text += f", {name}={sliding.equal_or_tuple(numbers)}"
    return text if groups == "1" else f"{text}, groups={groups}"


def _operand(call: kit.TorchCall, index: int, groups: tuple[kit.Names, ...]) -> str:
    return kit.grouped(call.tensor(index), call.ins[index].names, groups)


def _image(
    call: kit.TorchCall, slides: tuple[sliding.Slide, ...], roles: Roles
) -> tuple[str, tuple[int, ...]]:
    """The image as torch has it, and the padding that torch is to add."""
    channels = (*roles.group, *roles.summed)
    text = _operand(call, 0, (roles.batch, channels, *_names(call.attrs["source"])))
    padding = sliding.own_padding(call, slides)
    if padding is None:
        return sliding.padded(text, [sliding.margins(call, s) for s in slides]), (0,) * len(slides)
    return text, padding


def _torch(call: kit.TorchCall) -> str:
    slides, roles = _slides(call.attrs), _roles(call)
    image, padding = _image(call, slides, roles)
    channels = (*roles.group, *roles.made)
    kernel = _operand(call, 1, (channels, roles.summed, *_names(call.attrs["window"])))
    options = _options(slides, sliding.number_of(call, roles.group), padding)
    text = f"torch.nn.functional.conv{len(slides)}d({image}, {kernel}{options})"
    result = (roles.batch, channels, *_names(call.attrs["target"]))
    return sliding.guarded(call, kit.ungrouped(call, text, result, call.outs[0].names))


def _up_torch(call: kit.TorchCall) -> str:
    slides, roles = _slides(call.attrs, back=True), _roles(call)
    channels = (*roles.group, *roles.summed)
    image = _operand(call, 0, (roles.batch, channels, *_names(call.attrs["source"])))
    kernel = _operand(call, 1, (channels, roles.made, *_names(call.attrs["window"])))
    name = f"torch.nn.functional.conv_transpose{len(slides)}d"
    groups = sliding.number_of(call, roles.group)
    cut = _cut(call, slides)
    if cut is None:
        full = f"{name}({image}, {kernel}{_options(slides, groups)})"
        text = sliding.cut_out(call, full, slides)
    else:
        text = f"{name}({image}, {kernel}{_options(slides, groups, *cut)})"
    result = (roles.batch, (*roles.group, *roles.made), *_names(call.attrs["target"]))
    return sliding.guarded(call, kit.ungrouped(call, text, result, call.outs[0].names), slides)


def _cut(
    call: kit.TorchCall, slides: tuple[sliding.Slide, ...]
) -> tuple[tuple[int, ...], ...] | None:
    """The padding that torch is to cut off, and what it is to add at the end; None if it cannot."""
    widths, more = list[int](), list[int]()
    for slide in slides:
        same = sliding.overlap(call, slide)
        if same is None or same.before < 0:
            return None
        widths.append(same.before)
        more.append(same.elements - same.covered + 2 * same.before)
        if not 0 <= more[-1] < max(slide.stride, slide.dilation):
            return None
    return tuple(widths), tuple(more)


def _kernel_torch(call: kit.TorchCall) -> str:
    slides, roles = _slides(call.attrs), _kernel_roles(call)
    image, padding = _image(call, slides, roles)
    if roles.group and len(slides) == 1 and call.extent(slides[0].fine.name) == "1":
        # Of one position with strides of its own, torch's kernel without oneDNN refuses it.
        image = f"{image}.clone(memory_format=torch.contiguous_format)"
    channels = (*roles.group, *roles.made)
    grad = _operand(call, 1, (roles.batch, channels, *_names(call.attrs["target"])))
    options = _options(slides, sliding.number_of(call, roles.group), padding)
    sizes = (
        sliding.number_of(call, channels),
        sliding.number_of(call, roles.summed),
        *(s.size for s in slides),
    )
    name = f"torch.nn.grad.conv{len(slides)}d_weight"
    text = f"{name}({image}, {kit.tuple_text(sizes)}, {grad}{options})"
    result = (channels, roles.summed, *_names(call.attrs["window"]))
    return sliding.guarded(call, kit.ungrouped(call, text, result, call.outs[0].names))


# --- gradients -------------------------------------------------------------------------------


def _by(
    call: kit.Backward,
    name: str,
    a: kit.Value,
    b: kit.Value,
    dims: tuple[kit.Dim, ...],
    *,
    turned: bool,
) -> kit.Value:
    """An operator along the same windows, or with `turned` the other way, that yields `dims`."""
    ends = ("target", "source") if turned else ("source", "target")
    along = {new: call.attrs[old] for new, old in zip(("source", "target"), ends, strict=True)}
    options = {n: call.attrs[n] for n in ("window", "stride", "pad", "dilation")}
    return call.emit(name, a, b, **along, **options, dims=dims)


def _gradient(call: kit.Backward) -> kit.Grads:
    """By the image the transpose, by the kernel the products of cotangent and image."""
    grad, (x, k) = kit.full_grad(call), call.ins
    return kit.by_operand(
        call,
        lambda: _by(call, "upconv", grad, call.operand(1), x.dims, turned=True),
        lambda: _by(call, "conv_kernel", call.operand(0), grad, k.dims, turned=False),
    )


def _up_gradient(call: kit.Backward) -> kit.Grads:
    """The transpose of the transpose; by the kernel, cotangent and image change places."""
    grad, (y, k) = kit.full_grad(call), call.ins
    return kit.by_operand(
        call,
        lambda: _by(call, "conv", grad, call.operand(1), y.dims, turned=True),
        lambda: _by(call, "conv_kernel", grad, call.operand(0), k.dims, turned=True),
    )


def _kernel_gradient(call: kit.Backward) -> kit.Grads:
    """Linear in the image and in the cotangent: with a kernel as cotangent, `upconv` and `conv`."""
    grad, (x, dy) = kit.full_grad(call), call.ins
    return kit.by_operand(
        call,
        lambda: _by(call, "upconv", call.operand(1), grad, x.dims, turned=True),
        lambda: _by(call, "conv", call.operand(0), grad, dy.dims, turned=False),
    )


# --- records ---------------------------------------------------------------------------------


def _case(
    ins: str, along: str, dims: str, stride: int = 1, pad: str | int = "valid", dilation: int = 1
) -> str:
    """A convolution: operands, source, window and target of each window, dims of the result."""
    source, window, target = zip(*(words.split() for words in along.split(",")), strict=True)
    ends = f"source=({' '.join(source)}) window=({' '.join(window)}) target=({' '.join(target)})"
    options = f"stride={stride} pad={pad!r} dilation={dilation}"
    return f"{ins} | {ends} dims=({dims}) {options}"


_CASES = kit.samples(
    _case("b c=2 h=8; o=4 c kh=3", "h kh h", "b o h", pad="same"),
    _case("h=8 c=2 w=4 b; kh=3 c kw=3 o=4", "h kh ho=4, w kw wo=2", "ho b o wo", 2, "same"),
    _case("g=2 c=2 h=8; g kh=3 o=4 c", "h kh ho=4", "o g ho", 2, 1),
    _case("h=8; kh=3", "h kh ho=4", "ho", dilation=2),
    _case("w=4 h=8; kh=3 kd=2", "h kh h, w kd w", "w h", 1, "same", 2),
    _case("c=2 w=4 h=8; c one=1", "h one h", "w h"),
    _case("b g=2 h=8; g kh=3", "h kh wo=2", "b g wo", 3, 0),
    _case(
        "b c=2 w=4 d=2 wo=2; c kw=3 kd=2 kx=1",
        "w kw w, d kd d, wo kx wo",
        "b w d wo",
        pad="same",
    ),
)


def _calls(name: str) -> Iterator[kit.Sample]:
    """The convolutions, as calls of their transpose or of their gradient by the kernel."""
    for case in _CASES:
        (x, k), attrs = case.ins, dict(case.attrs)
        y = kit.TensorType(attrs["dims"], x.dtype)
        if name == "upconv":
            attrs |= {"source": attrs["target"], "target": attrs["source"]}
        ins, out = {"upconv": ((y, k), x), "conv_kernel": ((x, y), k)}[name]
        attrs["dims"] = out.dims
        yield kit.Sample(ins, tuple(attrs.items()), ("int", "int"))


_OPTIONS = (("stride", 1), ("pad", "valid"), ("dilation", 1))

kit.operator(
    "conv",
    kit.Surface("filter", (2, 2), _OPTIONS),
    _infer("conv", back=False),
    lambda sig: _factors(sig, back=False),
    _numpy,
    _torch,
    _CASES,
    bind=_bind("conv"),
    flops=_flops,
    gradient=_gradient,
    precision="compute",
    meaning="The image under a kernel that slides along dims of it: at each position the sum "
    "of the products. Dims that only the image has are the batch, those of the kernel alone "
    "the channels of the result; those of both are groups where the result has them, else "
    "summed.",
)
kit.operator(
    "upconv",
    kit.Surface("filter", (2, 2), _OPTIONS),
    _infer("upconv", back=True),
    lambda sig: _factors(sig, back=True),
    _up_numpy,
    _up_torch,
    kit.SampleList(partial(_calls, "upconv")),
    bind=_bind("upconv"),
    flops=lambda sig: _flops(sig, back=True),
    gradient=_up_gradient,
    precision="compute",
    meaning="The exact transpose of `conv` with the same options: every element of the image "
    "adds the kernel, scaled by it, to the positions that `conv` would read it from.",
)
kit.operator(
    "conv_kernel",
    kit.Surface("view", (2, 2)),
    _kernel_infer,
    _kernel_factors,
    _kernel_numpy,
    _kernel_torch,
    kit.SampleList(partial(_calls, "conv_kernel")),
    flops=lambda sig: _taps_flops(sig, sig.ins[1], sig.ins[0], _kernel_roles(sig).summed),
    gradient=_kernel_gradient,
    precision="compute",
    meaning="The gradient of `conv` by its kernel: the products of image and cotangent, "
    "summed over all positions.",
)
