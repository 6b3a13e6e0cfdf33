"""Gradients of the composites: one kernel, or in primitives where their own dim is split.

All are linear in the cotangent `dy`, which comes first, so that a partial one stays partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import indexing, kit, normalise

# --- constructors ----------------------------------------------------------------------------


def _infer(name: str) -> kit.Infer:
    """The type of `dy`; a second operand has it as well, a third is a scale along `dim`."""

    def infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
        kit.need_dims(name, ins[0], (attrs["dim"],))
        kit.need_kind(name, "float", *ins)
        kit.need_one_dtype(name, *ins)
        assert all(t.dims == ins[0].dims for t in ins[1:2]), f"{name} of {ins}"
        assert all(t.names == (attrs["dim"].name,) for t in ins[2:]), f"{name} of {ins}"
        return (ins[0],)

    return infer


# --- softmax, log_softmax ----------------------------------------------------------------------


def _kernel(name: str) -> Callable[[kit.TorchCall], str]:
    def write(call: kit.TorchCall) -> str:
        dy, y = call.tensor(0), call.tensor(1)
        return f"torch.ops.aten.{name}({dy}, {y}, {kit.axis(call)}, {call.outs[0].dtype.torch})"

    return write


def _into_dy(function: str) -> Mapping[int, Callable[[kit.TorchCall], str]]:
    """The same kernel, called through a support function."""

    def write(call: kit.TorchCall) -> str:
        return f"{call.use(function)}({call.tensor(0)}, {call.tensor(1)}, {kit.axis(call)})"

    return {0: write}


def _softmax_gradient(call: kit.Backward) -> kit.Grads:
    """The rule is symmetric in `dy`; by y it is linear in both, and again in each."""
    dim, dims = call.attrs["dim"], call.outs[0].dims
    grad = kit.full_grad(call)
    grads = {}
    if call.wanted(0):
        grads[0] = call.emit("softmax_grad", grad, call.operand(1), dim=dim)
    if call.wanted(1):
        dy, y = call.operand(0), call.operand(1)
        others = tuple(d for d in dims if d != dim)
        left = call.emit("mul", grad, call.emit("sub", dy, call.emit("einsum", dy, y, dims=others)))
        right = call.emit("mul", dy, call.emit("einsum", grad, y, dims=others))
        grads[1] = call.emit("sub", left, right)
    return grads


def _log_softmax_gradient(call: kit.Backward) -> kit.Grads:
    dim, dims = call.attrs["dim"], call.outs[0].dims
    grad = kit.full_grad(call)
    share = call.emit("exp", call.operand(1))
    grads = {}
    if call.wanted(0):
        others = tuple(d for d in dims if d != dim)
        grads[0] = call.emit("sub", grad, call.emit("einsum", grad, share, dims=others))
    if call.wanted(1):
        total = call.emit("neg", call.emit("sum", call.operand(0), dims=(dim,)))
        grads[1] = call.emit("mul", call.emit("mul", grad, share), total)
    return grads


normalise.composite(
    "softmax_grad",
    (2, 2),
    _infer("softmax_grad"),
    lambda call, dy, y: y * (dy - (dy * y).sum(kit.axis(call), keepdims=True)),
    _kernel("_softmax_backward_data"),
    normalise.norm_samples(2, 0),
    linear=lambda sig: ((0,),),
    exact=True,
    internal=True,
    gradient=_softmax_gradient,
    in_place=_into_dy("softmax_backward_"),
    meaning="The gradient of `softmax`, from its result y.",
)
normalise.composite(
    "log_softmax_grad",
    (2, 2),
    _infer("log_softmax_grad"),
    lambda call, dy, y: dy - np.exp(y) * dy.sum(kit.axis(call), keepdims=True),
    _kernel("_log_softmax_backward_data"),
    normalise.norm_samples(2, 0, "int unit"),  # exp of larger values overflows
    linear=lambda sig: ((0,),),
    internal=True,
    gradient=_log_softmax_gradient,
    in_place=_into_dy("log_softmax_backward_"),
    meaning="The gradient of `log_softmax`, from its result y.",
)

# --- norms -----------------------------------------------------------------------------------


def _linear(sig: kit.Signature) -> tuple[tuple[int, ...], ...]:
    """Linear in the cotangent, and in the scale."""
    return ((0,), (2,))[: len(sig.ins) - 1]


def _scaled(call: kit.NumpyCall, dy: kit.Array, scales: tuple[kit.Array, ...]) -> kit.Array:
    return dy * kit.align(scales[0], call.ins[2], call.ins[0].dims) if scales else dy


def _layer_norm_numpy(
    call: kit.NumpyCall, dy: kit.Array, x: kit.Array, *scales: kit.Array
) -> kit.Array:
    axis = kit.axis(call)
    z = x - x.mean(axis, keepdims=True)
    eps = normalise.eps_of("layer_norm", call.attrs)
    r = 1 / np.sqrt(np.square(z).mean(axis, keepdims=True) + eps)
    t, h = _scaled(call, dy, scales), z * r
    means = t.mean(axis, keepdims=True) + h * (t * h).mean(axis, keepdims=True)
    return np.asarray(r * (t - means))


def _rms_norm_numpy(
    call: kit.NumpyCall, dy: kit.Array, x: kit.Array, *scales: kit.Array
) -> kit.Array:
    axis = kit.axis(call)
    eps = normalise.eps_of("rms_norm", call.attrs)
    r = 1 / np.sqrt(np.square(x).mean(axis, keepdims=True) + eps)
    t = _scaled(call, dy, scales)
    return np.asarray(r * (t - x * r * r * (t * x).mean(axis, keepdims=True)))


def _layer_norm_text(call: kit.TorchCall) -> str:
    """Torch's kernel for the last dim, with the mean and deviation from the forward kernel."""
    dim, names = call.attrs["dim"], call.ins[0].names
    last = (*(n for n in names if n != dim.name), dim.name)
    dy, x = (kit.permuted(call.tensor(i), names, last) for i in (0, 1))
    scale = call.tensor(2) if len(call.ins) > 2 else "None"
    shape, eps = f"({dim.size},)", normalise.eps_of("layer_norm", call.attrs)
    forward = f"torch.native_layer_norm({x}, {shape}, None, None, {eps!r})[1:]"
    stats = call.let("stats", forward)
    # The kernel of a GPU takes the cotangent to be contiguous.
    args = f"{dy}.contiguous(), {x}, {shape}, *{stats}, {scale}, None, [True, False, False]"
    return kit.permuted(f"torch.ops.aten.native_layer_norm_backward({args})[0]", last, names)


def _rms_norm_text(call: kit.TorchCall, *, into_dy: bool = False) -> str:
    """A function of the runtime on the cotangent times the scale.

    In f32 for f16, in which the sum of products soon overflows.
    """
    x, t = call.tensor(1), call.tensor(0)
    is_half = call.ins[0].dtype == kit.F16
    if is_half:
        x, t, into_dy = f"{x}.float()", f"{t}.float()", True
    if len(call.ins) > 2:
        scale = call.aligned(2, call.ins[0].dims)
        t, into_dy = f"{t}.mul_({scale})" if into_dy else f"{t} * {scale}", True
    function = call.use("rms_norm_grad_" if into_dy else "rms_norm_grad")
    eps = normalise.eps_of("rms_norm", call.attrs)
    text = f"{function}({t}, {x}, {kit.axis(call)}, {eps!r})"
    return f"{text}.half()" if is_half else text


normalise.composite(
    "layer_norm_grad",
    (2, 3),
    _infer("layer_norm_grad"),
    _layer_norm_numpy,
    _layer_norm_text,
    normalise.norm_samples(2, 1, has_eps=True),
    linear=_linear,
    cost=14,
    internal=True,
    meaning="The gradient of `layer_norm` by the tensor that is normalised.",
)
normalise.composite(
    "rms_norm_grad",
    (2, 3),
    _infer("rms_norm_grad"),
    _rms_norm_numpy,
    _rms_norm_text,
    normalise.norm_samples(2, 1, has_eps=True),
    linear=_linear,
    cost=10,
    internal=True,
    in_place={0: lambda call: _rms_norm_text(call, into_dy=True)},
    fits_in=lambda index, ins, numbers: ins[index].dtype != kit.F16,
    meaning="The gradient of `rms_norm` by the tensor that is normalised.",
)

# --- cross-entropy ---------------------------------------------------------------------------


def _cross_entropy_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """The type of the logits; the cotangent may lack dims."""
    dy, logits, targets = ins
    kit.need_dims("cross_entropy_grad", logits, (attrs["dim"],))
    kit.need_dims("cross_entropy_grad", targets, dy.dims)
    kit.need_one_dtype("cross_entropy_grad", dy, logits)
    indexing.need_indices("cross_entropy_grad", targets, attrs["dim"])
    return (logits,)


def _cross_entropy_numpy(
    call: kit.NumpyCall, dy: kit.Array, logits: kit.Array, targets: kit.Array
) -> kit.Array:
    dims, dim = call.outs[0].dims, call.attrs["dim"].name
    at = call.outs[0].index(dim)
    share = normalise.softmax_numpy(logits, at)
    classes = np.arange(share.shape[at]).reshape(-1, *(1,) * (share.ndim - at - 1))
    hit = kit.align(indexing.checked_numpy(call, 2, targets, dim), call.ins[2], dims) == classes
    return np.asarray(kit.align(dy, call.ins[0], dims) * (share - hit))


def _cross_entropy_text(call: kit.TorchCall) -> str:
    """The softmax times dy, computed in place; then dy is subtracted at the targets."""
    logits, dim = call.ins[1], call.attrs["dim"].name
    at = logits.index(dim)
    positions = tuple(n for n in logits.names if n != dim)
    where = logits.without(dim).dims
    index = kit.permuted(indexing.checked_text(call, 2, dim), call.ins[2].names, positions)
    if call.is_constant(0) and logits.dtype.bytes >= kit.F32.bytes:
        share, number = f"torch.softmax({call.tensor(1)}, {at}).mul_({call.args[0]})", call.args[0]
        less = number[1:] if number.startswith("-") else f"-{number}"
        return f'{share}.scatter_({at}, {index}.unsqueeze({at}), {less}, reduce="add")'
    dy = call.let("dy", call.tensor(0)) if call.is_constant(0) else call.args[0]
    wide = kit.aligned(dy, call.ins[0].names, logits.names)
    share = f"torch.softmax({call.tensor(1)}, {at}).mul_({wide})"
    less = f"-{kit.aligned(dy, call.ins[0].names, positions)}"
    if len(call.ins[0].names) < len(where):
        less = f"({less}).expand({kit.tuple_text([call.extent(d.name) for d in where])})"
    else:
        less = f"({less})"
    return f"{share}.scatter_add_({at}, {index}.unsqueeze({at}), {less}.unsqueeze({at}))"


normalise.composite(
    "cross_entropy_grad",
    (3, 3),
    _cross_entropy_infer,
    _cross_entropy_numpy,
    _cross_entropy_text,
    kit.samples(
        "(); v; (): i32 | dim=v",
        "b; b v; b: i32 | dim=v",
        "(); b v; b: i32 | dim=v",
        "s b; b s v; s b: i32 | dim=v",
        "s; b v s; b s: i32 | dim=v",
        values="int int index:v",
    ),
    linear=lambda sig: ((0,),),
    cost=6,
    internal=True,
    indices=2,
    meaning="The gradient of `cross_entropy` by the logits.",
)
