"""Activation functions, each with its gradient as one operator: torch has a kernel for it.

`gelu` is the exact erf form unless `approximate="tanh"` is given. The gradients take a cotangent
that may lack dims, and users cannot call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, zeros

# --- constructors ----------------------------------------------------------------------------


def _slope(
    name: str,
    numpy: Callable[[kit.Array, kit.Array], kit.Array],
    kernel: str,
    curve: Callable[[kit.Backward], kit.Value] | None,
    *,
    meaning: str,
    tail: str = "",
    exact: bool = False,
    monotone: Sequence[int] = (),
    values: str = "int",
    true_rows: Mapping[str, str] = kit.NO_TRUE_ROWS,
) -> None:
    """The operator `name(dy, z)`, dy times a slope, as the torch kernel of the same operands.

    `curve` is the derivative of the slope, for the gradient by z; None where it is 0.
    """

    def text(call: kit.TorchCall, texts: list[str]) -> str:
        parts = [call.tensor(i) if call.is_constant(i) else t for i, t in enumerate(texts)]
        return f"torch.ops.aten.{kernel}({', '.join(parts)}{tail})"

    def into_dy(call: kit.TorchCall, texts: list[str]) -> str:
        z = call.tensor(1) if call.is_constant(1) else texts[1]
        return f"torch.ops.aten.{kernel}.grad_input({texts[0]}, {z}{tail}, grad_input={texts[0]})"

    kit.pointwise(
        name, 2, numpy, text, accept="float", exact=exact, internal=True,
        linear=[(0,)], monotone=monotone, values=f"int {values}",
        gradient=_slope_gradient(name, curve), in_place=[into_dy], true_rows=true_rows,
        meaning=meaning,
    )  # fmt: skip


def _slope_gradient(name: str, curve: Callable[[kit.Backward], kit.Value] | None) -> kit.Gradient:
    """The gradients by dy, the same operator, and by z, dy times the derivative of the slope."""

    def gradient(call: kit.Backward) -> kit.Grads:
        grads: dict[int, kit.Value] = {}
        if call.wanted(0):
            again = call.emit(name, call.grad, call.operand(1), **dict(call.attrs))
            grads[0] = kit.contracted(call, 0, again)
        if call.wanted(1) and curve is not None:
            both = kit.product(call, call.grad, call.operand(0))
            grads[1] = kit.contracted(call, 1, both, curve(call))
        return grads

    return gradient


# --- relu ------------------------------------------------------------------------------------

kit.pointwise(
    "relu", 1, lambda x: np.maximum(x, 0), "torch.relu({0})", monotone=[0],
    gradient=kit.applied("relu_grad", to_result=True), in_place=["torch.relu_({0})"],
    keeps_zero=True,
    meaning="max(x, 0), element by element.",
)  # fmt: skip
_slope(
    "relu_grad",
    lambda dy, y: np.where(y <= 0, 0.0, dy),
    "threshold_backward",
    None,
    tail=", 0",
    exact=True,
    monotone=[0],
    meaning="The gradient of `relu`: dy where the result y is positive, else 0.",
)

# --- tanh and sigmoid, from their results ------------------------------------------------------


def _sigmoid(x: kit.Array) -> kit.Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))  # exp(-x) would overflow


kit.smooth(
    "tanh",
    lambda x: np.tanh(x),
    "torch.tanh({0})",
    kit.applied("tanh_grad", to_result=True),
    keeps_zero=True,
    meaning="The hyperbolic tangent of each element.",
)
_slope(
    "tanh_grad",
    lambda dy, y: dy * (1 - y * y),
    "tanh_backward",
    lambda call: call.emit("mul", call.operand(1), -2.0),
    exact=True,
    values="unit",
    true_rows=kit.rows_with_reason(
        "so for finite cotangents; an infinite one times a slope of 0 is NaN",
        *(f"P({op}), B -> P({op})" for op in ("max", "min")),
    ),
    meaning="The gradient of `tanh`, from its result y: dy * (1 - y^2).",
)
kit.smooth(
    "sigmoid",
    _sigmoid,
    "torch.sigmoid({0})",
    kit.applied("sigmoid_grad", to_result=True),
    meaning="1 / (1 + e^-x), element by element.",
)
_slope(
    "sigmoid_grad",
    lambda dy, y: dy * (y * (1 - y)),
    "sigmoid_backward",
    lambda call: call.emit("add", call.emit("mul", call.operand(1), -2.0), 1.0),  # 1 - 2 * y
    exact=True,
    values="unit",
    meaning="The gradient of `sigmoid`, from its result y: dy * y * (1 - y).",
)

# --- silu, softplus, erf -----------------------------------------------------------------------


def _silu_slope(x: kit.Array) -> kit.Array:
    s = _sigmoid(x)
    return np.asarray(s * (1 + x * (1 - s)))


def _silu_curve(call: kit.Backward) -> kit.Value:
    """With s = sigmoid(x): s * (1 - s) * (2 + x * (1 - 2 * s))."""
    x = call.operand(1)
    s = call.emit("sigmoid", x)
    lean = call.emit("add", call.emit("mul", s, -2.0), 1.0)
    return call.emit("sigmoid_grad", call.emit("add", call.emit("mul", x, lean), 2.0), s)


kit.smooth(
    "silu",
    lambda x: np.asarray(x * _sigmoid(x)),
    "torch.nn.functional.silu({0})",
    kit.applied("silu_grad"),
    rises=False,
    in_place=False,
    keeps_zero=True,
    meaning="x * sigmoid(x), element by element; also called swish.",
)
_slope(
    "silu_grad",
    lambda dy, x: dy * _silu_slope(x),
    "silu_backward",
    _silu_curve,
    meaning="The gradient of `silu`: dy times its slope at x.",
)
# Torch's own threshold of 20 would be wrong by 2e-9 in f64.
kit.smooth(
    "softplus",
    lambda x: np.logaddexp(0, x),
    "torch.nn.functional.softplus({0}, threshold=40.0)",
    kit.factor_of(lambda call: call.emit("sigmoid", call.operand(0))),
    in_place=False,
    precision="f32",
    meaning="log(1 + e^x), element by element.",
)


def _erf(x: kit.Array) -> kit.Array:
    values = [math.erf(v) for v in x.ravel().tolist()]
    return np.array(values, dtype=x.dtype).reshape(x.shape)


def _bell(call: kit.Backward, x: kit.Value, exponent: float, height: float) -> kit.Value:
    """The curve height * exp(exponent * x^2)."""
    power = call.emit("mul", call.emit("square", x), exponent)
    return call.emit("mul", call.emit("exp", power), height)


kit.smooth(
    "erf",
    _erf,
    "torch.erf({0})",
    kit.factor_of(lambda call: _bell(call, call.operand(0), -1.0, 2 / math.sqrt(math.pi))),
    in_place=False,
    keeps_zero=True,
    meaning="The error function of each element.",
)

# --- gelu ------------------------------------------------------------------------------------

_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
_DENSITY = 1 / math.sqrt(2 * math.pi)


def _gelu_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    if call.attrs["approximate"] == "tanh":
        inner = _GELU_SCALE * (x + _GELU_CUBE * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _gelu_slope(x: kit.Array, approximate: str) -> kit.Array:
    if approximate == "tanh":
        t = np.tanh(_GELU_SCALE * (x + _GELU_CUBE * x**3))
        inner = _GELU_SCALE * (1 + 3 * _GELU_CUBE * x * x)
        return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    return np.asarray(0.5 * (1 + _erf(x / math.sqrt(2))) + x * _DENSITY * np.exp(-0.5 * x * x))


def _form(attrs: kit.Attrs) -> str:
    return ', approximate="tanh"' if attrs["approximate"] == "tanh" else ""


_gelu_type = kit.pointwise_type("gelu", "float")


def _gelu_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    outs = _gelu_type(ins, attrs)
    if attrs["approximate"] not in ("none", "tanh"):
        raise kit.OpError(
            "MD0213",
            f"`gelu` knows no approximation {attrs['approximate']!r}",
            'leave it out for the exact form, or write `approximate="tanh"`',
            kit.SetOption("approximate", '"tanh"'),
            kit.SetOption("approximate", '"none"'),
            also='`"none"`, the default, is the exact form',
        )
    return outs


def _gelu_grad_text(call: kit.TorchCall) -> str:
    # The kernel does not broadcast.
    dy, x = (kit.expanded(call, i, call.outs[0].dims) for i in (0, 1))
    return f"torch.ops.aten.gelu_backward({dy}, {x}{_form(call.attrs)})"


def _gelu_grad_into_dy(call: kit.TorchCall) -> str:
    dy, x = call.tensor(0), kit.expanded(call, 1, call.outs[0].dims)
    return f"torch.ops.aten.gelu_backward.grad_input({dy}, {x}{_form(call.attrs)}, grad_input={dy})"


def _gelu_curve(call: kit.Backward) -> kit.Value:
    """The second derivative of gelu: density(x) * (2 - x^2) for the exact form."""
    x = call.operand(1)
    if call.attrs["approximate"] == "tanh":
        return _gelu_tanh_curve(call, x)
    lean = call.emit("add", call.emit("neg", call.emit("square", x)), 2.0)
    return call.emit("mul", _bell(call, x, -0.5, _DENSITY), lean)


def _gelu_tanh_curve(call: kit.Backward, x: kit.Value) -> kit.Value:
    """(1 - t^2) * (u' + x * (u'' / 2 - t * u'^2)), t = tanh(u), u' = k * (1 + 3 * c * x^2)."""
    square = call.emit("square", x)
    inner = call.emit("add", call.emit("mul", square, _GELU_CUBE), 1.0)
    t = call.emit("tanh", call.emit("mul", call.emit("mul", x, inner), _GELU_SCALE))
    slope = call.emit("add", call.emit("mul", square, 3 * _GELU_SCALE * _GELU_CUBE), _GELU_SCALE)
    bend = call.emit("mul", x, 3 * _GELU_SCALE * _GELU_CUBE)
    turn = call.emit("mul", t, call.emit("square", slope))
    curved = call.emit("mul", x, call.emit("sub", bend, turn))
    return call.emit("tanh_grad", call.emit("add", slope, curved), t)


def _gelu_samples(shapes: Sequence[str]) -> kit.SampleList:
    forms = ("none", "tanh")
    return kit.samples(*(f'{s} | approximate="{form}"' for s in shapes for form in forms))


kit.operator(
    "gelu",
    kit.Surface("none", (1, 1), (("approximate", "none"),)),
    _gelu_infer,
    kit.plain(),
    _gelu_numpy,
    lambda call: f"torch.nn.functional.gelu({call.tensor(0)}{_form(call.attrs)})",
    _gelu_samples(kit.UNARY),
    exact=False,
    flops=lambda sig: 8 * sig.outs[0].elements,
    gradient=kit.applied("gelu_grad"),
    zeros=zeros.passes(0),
    meaning="x times the normal distribution function at x, or a curve close to it.",
)


def _gelu_grad_numpy(call: kit.NumpyCall, dy: kit.Array, x: kit.Array) -> kit.Array:
    form = call.attrs["approximate"]
    return kit.numpy_pointwise(lambda dy, x: dy * _gelu_slope(x, form))(call, dy, x)


kit.operator(
    "gelu_grad",
    kit.Surface("view", (2, 2)),
    _gelu_infer,
    kit.plain(linear=[(0,)]),
    _gelu_grad_numpy,
    _gelu_grad_text,
    _gelu_samples(kit.BINARY),
    exact=False,
    flops=lambda sig: 12 * sig.outs[0].elements,
    gradient=_slope_gradient("gelu_grad", _gelu_curve),
    in_place={0: _gelu_grad_into_dy},
    meaning="The gradient of `gelu`: dy times its slope at x.",
)
