"""Batch normalisation (Ioffe and Szegedy 2015): less the mean, over the deviation, in each channel.

`batch_norm_stats` computes the statistics along its dims, all but the channel, and shows them;
`frozen_batch_norm` is given them. No program calls either: `named/batch_norm_fusion.py` finds them.
Where a dim of the statistics is split, the definitions there are used instead.
"""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, sliding
from meshdsl.ops.normalise import USUAL_EPS

# --- dims by their part ------------------------------------------------------------------------


def channel_of(type_: kit.TensorType, attrs: kit.Attrs) -> str:
    """The dim of which every index has its own statistics."""
    if "dim" in attrs:
        channel: str = attrs["dim"].name
        return channel
    along = {d.name for d in attrs["dims"]}
    (channel,) = (n for n in type_.names if n not in along)
    return channel


def _order(call: kit.TorchCall) -> kit.Names:
    """The dims of the tensor as torch's kernels have them: the channel is the second."""
    names = call.ins[0].names
    channel = channel_of(call.ins[0], call.attrs)
    others = [n for n in names if n != channel]
    return (*others[:1], channel, *others[1:])


# --- shape rules -------------------------------------------------------------------------------


def _check(name: str, tensors: kit.Types, channels: kit.Types, attrs: kit.Attrs) -> None:
    """Assert the dims of operands, which no program writes: all of `tensors`, one of `channels`."""
    kit.need_kind(name, "float", *tensors, *channels)
    kit.need_one_dtype(name, *tensors, *channels)
    channel = channel_of(tensors[0], attrs)
    assert all(t.dims == tensors[0].dims for t in tensors), f"{name} of {tensors}"
    assert all(t.names == (channel,) for t in channels), f"{name} of {channels}"


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of x, scale and shift to the result, its mean and its variance."""
    _check("batch_norm_stats", ins[:1], ins[1:], attrs)
    return ins


def _grad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of dy, x, scale, mean and variance to the gradients by x, scale and shift."""
    _check("batch_norm_grad", ins[:2], ins[2:], attrs)
    return ins[0], ins[2], ins[2]


def _frozen_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of x, mean, variance, scale and shift."""
    _check("frozen_batch_norm", ins[:1], ins[1:], attrs)
    return ins[:1]


# --- factors -----------------------------------------------------------------------------------


def _factors(*linear: int) -> Callable[[kit.Signature], kit.Factors]:
    """The channel is the only loop; each operand of `linear` alone may be a partial sum."""

    def factors(sig: kit.Signature) -> kit.Factors:
        channel = kit.loop(sig, channel_of(sig.ins[0], sig.attrs))
        return kit.Factors((channel,), tuple(frozenset({i}) for i in linear))

    return factors


# --- numpy -------------------------------------------------------------------------------------


def _spread(call: kit.NumpyCall, array: kit.Array) -> kit.Array:
    """One number for each channel, to broadcast over the tensor."""
    channel = channel_of(call.ins[0], call.attrs)
    return kit.fitted(array, (channel,), call.ins[0].names)


def _frozen_numpy(call: kit.NumpyCall, x: kit.Array, *channels: kit.Array) -> kit.Array:
    mean, variance, scale, shift = (_spread(call, c) for c in channels)
    inverse = 1 / np.sqrt(variance + call.attrs["eps"])
    return np.asarray((x - mean) * inverse * scale + shift, x.dtype)


def _numpy(
    call: kit.NumpyCall, x: kit.Array, scale: kit.Array, shift: kit.Array
) -> tuple[kit.Array, ...]:
    along = kit.axes(call.ins[0], call.attrs["dims"])
    mean = np.asarray(x.mean(along))
    variance = np.asarray(np.square(x - _spread(call, mean)).mean(along))
    return _frozen_numpy(call, x, mean, variance, scale, shift), mean, variance


def _grad_numpy(
    call: kit.NumpyCall, dy: kit.Array, x: kit.Array, *channels: kit.Array
) -> tuple[kit.Array, ...]:
    """With z the normalised x: dx is scale / deviation * (dy - mean(dy) - z * mean(dy * z))."""
    along = kit.axes(call.ins[0], call.attrs["dims"])
    scale, mean, variance = (_spread(call, c) for c in channels)
    inverse = 1 / np.sqrt(variance + call.attrs["eps"])
    z = (x - mean) * inverse
    means = dy.mean(along, keepdims=True) + z * (dy * z).mean(along, keepdims=True)
    dx = np.asarray(scale * inverse * (dy - means), x.dtype)
    return dx, np.asarray((dy * z).sum(along)), np.asarray(dy.sum(along))


# --- torch -------------------------------------------------------------------------------------


def _eps(call: kit.TorchCall) -> str:
    """The keyword of the number that is added to the variance, where it is not torch's own."""
    eps = call.attrs["eps"]
    return "" if eps == USUAL_EPS["batch_norm"] else f", eps={eps!r}"


def _frozen_torch(call: kit.TorchCall) -> str:
    names, order = call.ins[0].names, _order(call)
    x = kit.permuted(call.tensor(0), names, order)
    channels = ", ".join(call.tensor(i) for i in range(1, 5))
    text = f"torch.nn.functional.batch_norm({x}, {channels}{_eps(call)})"
    return sliding.guarded(call, kit.permuted(text, order, names))


def _frozen_in_place(call: kit.TorchCall) -> str:
    """Multiplied by a number for each channel, and another added, as torch's kernel does it."""
    x, mean, variance, scale, shift = (call.tensor(i) for i in range(5))
    slope = call.let("slope", f"{scale} * torch.rsqrt({variance} + {call.attrs['eps']!r})")
    offset = call.let("offset", f"{shift} - {mean} * {slope}")
    channel, names = call.ins[1].names, call.ins[0].names
    factor, term = (kit.aligned(text, channel, names) for text in (slope, offset))
    return f"{x}.mul_({factor}).add_({term})"


def _kernel(name: str, tensors: int) -> Callable[[kit.TorchCall], str]:
    """A call of a function of the runtime, whose first operands, `tensors`, have all dims."""

    def write(call: kit.TorchCall) -> str:
        names, order = call.ins[0].names, _order(call)
        operands = [call.tensor(i) for i in range(len(call.ins))]
        operands[:tensors] = (kit.permuted(x, names, order) for x in operands[:tensors])
        kernel = f"{call.use(name)}({', '.join(operands)}{_eps(call)})"
        if names == order:
            return kernel
        results = call.let("results", kernel)
        return f"({kit.permuted(f'{results}[0]', order, names)}, *{results}[1:])"

    return write


# --- gradients -----------------------------------------------------------------------------------


def _gradient(call: kit.Backward) -> kit.Grads:
    """By x, scale and shift together, from the statistics."""
    operands = [kit.full_grad(call), call.operand(0), call.operand(1)]
    operands += [call.result(1), call.result(2)]
    return dict(enumerate(call.emit_all("batch_norm_grad", *operands, **call.attrs)))


def _frozen_gradient(call: kit.Backward) -> kit.Grads:
    """Those by the statistics follow from the sums of dy, and of dy times what x is off by."""
    grad = kit.full_grad(call)
    x, mean, variance, scale = (call.operand(i) for i in range(4))
    dims = mean.type.dims
    inverse = call.emit("rsqrt", call.emit("add", variance, call.attrs["eps"]))
    slope = call.emit("mul", scale, inverse)
    along = tuple(d for d in grad.type.dims if d not in dims)

    def total() -> kit.Value:
        return call.emit("sum", grad, dims=along)

    def by_scale() -> kit.Value:
        products = call.emit("einsum", grad, call.emit("sub", x, mean), dims=dims)
        return call.emit("mul", products, inverse)

    def by_variance() -> kit.Value:
        rate = call.emit("mul", slope, call.emit("mul", inverse, -0.5))
        return call.emit("mul", by_scale(), rate)

    return kit.by_operand(
        call,
        lambda: call.emit("mul", grad, slope),
        lambda: call.emit("neg", call.emit("mul", total(), slope)),
        by_variance,
        by_scale,
        total,
    )


# --- records -----------------------------------------------------------------------------------

_CASES = ("b h s=2; h; h | dims=(b s) eps=1e-05", "s h; s; s | dims=(h) eps=0.001")
_GRADS = (
    "b h s=2; b h s; h; h; h | dims=(b s) eps=1e-05",
    "s h; s h; s; s; s | dims=(h) eps=0.001",
)
_FROZEN = ("b h s=2; h; h; h; h | dim=h eps=1e-05", "s h; s; s; s; s | dim=s eps=0.001")

kit.operator(
    "batch_norm_stats",
    kit.Surface("view", (3, 3)),
    _infer,
    _factors(),
    _numpy,
    _kernel("batch_norm", 1),
    kit.samples(*_CASES),
    exact=False,
    composite=True,
    flops=lambda sig: 8 * sig.ins[0].elements,
    true_rows={
        "B, P, P -> P, B, B": "a partial result comes with partial ones alone",
        **{f"B, B, P({op}) -> P({op}), B, B": "as for `+`" for op in ("max", "min")},
    },
    gradient=_gradient,
    precision="f32",
    words="the batch norm",
    meaning="The tensor less its mean along dims, over its deviation; times scale, plus shift.",
)
kit.operator(
    "batch_norm_grad",
    kit.Surface("view", (5, 5)),
    _grad_infer,
    _factors(0),
    _grad_numpy,
    _kernel("batch_norm_grad", 2),
    kit.samples(*_GRADS, values="int int int int positive"),
    exact=False,
    composite=True,
    flops=lambda sig: 14 * sig.ins[0].elements,
    true_rows={"B, B, P, B, B -> P, B, B": "a partial result comes with partial ones alone"},
    words="the gradient of the batch norm",
    meaning="The gradients of `batch_norm_stats` by the normalised tensor, scale and shift.",
)
kit.operator(
    "frozen_batch_norm",
    kit.Surface("view", (5, 5)),
    _frozen_infer,
    kit.plain(linear=((0, 1, 4), (3, 4))),
    _frozen_numpy,
    _frozen_torch,
    kit.samples(*_FROZEN, values="int int positive int int"),
    exact=False,
    flops=lambda sig: 4 * sig.ins[0].elements,
    true_rows={f"B, B, B, B, P({op}) -> P({op})": "as for `+`" for op in ("max", "min")},
    gradient=_frozen_gradient,
    in_place={0: _frozen_in_place},
    fits_in=lambda index, ins, numbers: ins[0].dtype.bytes >= kit.F32.bytes,
    precision="f32",
    words="the batch norm",
    meaning="The tensor less a mean for each index of a dim, over a deviation; scaled, shifted.",
)
