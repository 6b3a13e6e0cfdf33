"""Batch normalisation (Ioffe and Szegedy 2015): less the mean, over the deviation, in each channel.

`batch_norm_stats` computes the statistics along its dims, all but the channel, and shows them;
`frozen_batch_norm` is given them. No program calls either: `named/batch_norm_fusion.py` finds them.
Where a dim of the statistics is split, the definitions there are used instead: the gradient is that
of two operators then, `batch_norm_sums`, which are reduced, and `batch_norm_input_grad`. Their dims
are all in loops: `dims`, which have to be whole, are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, sliding
from meshdsl.ops.normalise import USUAL_EPS

# --- dims by their part ------------------------------------------------------------------------


def channel_of(ins: kit.Types) -> str:
    """The dim of which every index has its own statistics: the only one of the last operand."""
    (channel,) = ins[-1].names
    return channel


def _order(call: kit.TorchCall) -> kit.Names:
    """The dims of the tensor as torch's kernels have them: the channel is the second."""
    names, channel = call.ins[0].names, channel_of(call.ins)
    others = [n for n in names if n != channel]
    return (*others[:1], channel, *others[1:])


# --- shape rules -------------------------------------------------------------------------------


def _check(name: str, tensors: kit.Types, channels: kit.Types) -> None:
    """Assert the dims of operands, which no program writes: all of `tensors`, one of `channels`."""
    kit.need_kind(name, "float", *tensors, *channels)
    kit.need_one_dtype(name, *tensors, *channels)
    channel = channel_of(channels)
    assert all(t.dims == tensors[0].dims for t in tensors), f"{name} of {tensors}"
    assert all(t.names == (channel,) for t in channels), f"{name} of {channels}"


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of x, scale and shift to the result, its mean and its variance."""
    _check("batch_norm_stats", ins[:1], ins[1:])
    return ins


def _grad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of dy, x, scale, mean and variance to the gradients by x, scale and shift."""
    _check("batch_norm_grad", ins[:2], ins[2:])
    return ins[0], ins[2], ins[2]


def _sums_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of dy, x, mean and variance to the gradients by scale and shift."""
    _check("batch_norm_sums", ins[:2], ins[2:])
    return ins[2], ins[2]


def _input_grad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of dy, x, scale, mean, variance and the gradients by scale and shift to that by x."""
    _check("batch_norm_input_grad", ins[:2], ins[2:])
    return ins[:1]


def _frozen_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Of x, mean, variance, scale and shift."""
    _check("frozen_batch_norm", ins[:1], ins[1:])
    return ins[:1]


# --- factors -----------------------------------------------------------------------------------


def _factors(*linear: int) -> Callable[[kit.Signature], kit.Factors]:
    """The channel is the only loop; each operand of `linear` alone may be a partial sum."""

    def factors(sig: kit.Signature) -> kit.Factors:
        channel = kit.loop(sig, channel_of(sig.ins))
        return kit.Factors((channel,), tuple(frozenset({i}) for i in linear))

    return factors


def _sums_factors(sig: kit.Signature) -> kit.Factors:
    """All dims are loops; those of the samples are reduced. Linear in dy."""
    channel = channel_of(sig.ins)
    loops = (kit.loop(sig, n, None if n == channel else "sum") for n in sig.ins[0].names)
    return kit.Factors(tuple(loops), (frozenset({0}),))


# --- numpy -------------------------------------------------------------------------------------


def _spread(call: kit.NumpyCall, array: kit.Array) -> kit.Array:
    """One number for each channel, to broadcast over the tensor."""
    return kit.fitted(array, (channel_of(call.ins),), call.ins[0].names)


def _normalised(
    call: kit.NumpyCall, x: kit.Array, mean: kit.Array, variance: kit.Array
) -> tuple[kit.Array, kit.Array]:
    """The normalised x, and the inverse deviation of each channel."""
    inverse = 1 / np.sqrt(variance + call.attrs["eps"])
    return (x - mean) * inverse, inverse


def _frozen_numpy(call: kit.NumpyCall, x: kit.Array, *channels: kit.Array) -> kit.Array:
    mean, variance, scale, shift = (_spread(call, c) for c in channels)
    return np.asarray(_normalised(call, x, mean, variance)[0] * scale + shift, x.dtype)


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
    z, inverse = _normalised(call, x, mean, variance)
    means = dy.mean(along, keepdims=True) + z * (dy * z).mean(along, keepdims=True)
    dx = np.asarray(scale * inverse * (dy - means), x.dtype)
    return dx, np.asarray((dy * z).sum(along)), np.asarray(dy.sum(along))


def _sums_numpy(
    call: kit.NumpyCall, dy: kit.Array, x: kit.Array, *channels: kit.Array
) -> tuple[kit.Array, ...]:
    x_type, channel = call.ins[1], channel_of(call.ins)
    along = kit.axes(x_type, [d for d in x_type.dims if d.name != channel])
    z, _ = _normalised(call, x, *(_spread(call, c) for c in channels))
    return np.asarray((dy * z).sum(along)), np.asarray(dy.sum(along))


def _input_grad_numpy(
    call: kit.NumpyCall, dy: kit.Array, x: kit.Array, *channels: kit.Array
) -> kit.Array:
    scale, mean, variance, dscale, dshift = (_spread(call, c) for c in channels)
    z, inverse = _normalised(call, x, mean, variance)
    return np.asarray(scale * inverse * (dy - (dshift + z * dscale) / call.attrs["count"]), x.dtype)


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
        count = f", {call.attrs['count']}" if "count" in call.attrs else ""
        kernel = f"{call.use(name)}({', '.join(operands)}{count}{_eps(call)})"
        if names == order or call.outs[0].names != names:
            return kernel
        if len(call.outs) == 1:
            return kit.permuted(kernel, order, names)
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

    @functools.cache
    def sums() -> tuple[kit.Value, ...]:
        return call.emit_all(
            "batch_norm_sums", grad, x, mean, variance, dims=(), eps=call.attrs["eps"]
        )

    def by_scale() -> kit.Value:
        return sums()[0]

    def total() -> kit.Value:
        if call.wanted(2) or call.wanted(3):
            return sums()[1]
        return call.emit("sum", grad, dims=tuple(d for d in grad.type.dims if d not in dims))

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
_SUMS = ("b h s=2; b h s; h; h | dims=() eps=1e-05", "s h; s h; s; s | dims=() eps=0.001")
_INPUTS = (
    "b h s=2; b h s; h; h; h; h; h | dims=() count=8 eps=1e-05",
    "s h; s h; s; s; s; s; s | dims=() count=4 eps=0.001",
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
    "batch_norm_sums",
    kit.Surface("view", (4, 4)),
    _sums_infer,
    _sums_factors,
    _sums_numpy,
    _kernel("batch_norm_sums", 2),
    kit.samples(*_SUMS, values="int int int positive"),
    exact=False,
    composite=True,
    flops=lambda sig: 5 * sig.ins[0].elements,
    true_rows={"B, P, P, B -> P, B": "a partial result comes with partial ones alone"},
    words="the gradient of scale and shift",
    meaning="The gradients of `frozen_batch_norm` by scale and shift.",
)
kit.operator(
    "batch_norm_input_grad",
    kit.Surface("view", (7, 7)),
    _input_grad_infer,
    kit.plain(linear=((0, 5, 6), (2,))),
    _input_grad_numpy,
    _kernel("batch_norm_input_grad", 2),
    kit.samples(*_INPUTS, values="int int int int positive int int"),
    exact=False,
    composite=True,
    flops=lambda sig: 6 * sig.ins[0].elements,
    words="the gradient of the normalised tensor",
    meaning="The gradient of `batch_norm_stats` by what is normalised, from its others.",
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
