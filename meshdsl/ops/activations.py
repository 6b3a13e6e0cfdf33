"""Activation functions, each with its gradient as one operator: torch has a kernel for it.

`gelu` is the exact erf form unless `approximate="tanh"` is given. The gradients take a cotangent
that may lack dims, and users cannot call them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import applied, contracted, factor_of, product
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Gradient,
    NumpyCall,
    OpDef,
    OpError,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.pointwise import BINARY, NO_TRUE_ROWS, UNARY, numpy_pointwise, pointwise
from meshdsl.ops.requirements import (
    Array,
    merged_dims,
    need_kind,
    need_one_dtype,
    plain,
    sample,
    swapped,
    tensor,
)
from meshdsl.ops.torch_expressions import expanded

# --- constructors ----------------------------------------------------------------------------


def _smooth(
    name: str,
    numpy: Callable[[Array], Array],
    torch: str,
    gradient: Gradient,
    *,
    meaning: str,
    rises: bool,
    in_place: str = "",
    precision: Literal["widest", "f32"] = "widest",
) -> None:
    """A function of floats that rounds; `rises`: it never falls."""
    pointwise(
        name, 1, numpy, torch, accept="float", exact=False, monotone=[0] if rises else [],
        gradient=gradient, in_place=[in_place] if in_place else [], precision=precision,
        meaning=meaning,
    )  # fmt: skip


def _slope(
    name: str,
    numpy: Callable[[Array, Array], Array],
    kernel: str,
    curve: Callable[[Backward], Value] | None,
    *,
    meaning: str,
    tail: str = "",
    exact: bool = False,
    monotone: Sequence[int] = (),
    values: str = "int",
    true_rows: Mapping[str, str] = NO_TRUE_ROWS,
) -> None:
    """The operator `name(dy, z)`, dy times a slope, as the torch kernel of the same operands.

    `curve` is the derivative of the slope, for the gradient by z; None where it is 0.
    """

    def text(call: TorchCall, texts: list[str]) -> str:
        parts = [call.tensor(i) if call.is_constant(i) else t for i, t in enumerate(texts)]
        return f"torch.ops.aten.{kernel}({', '.join(parts)}{tail})"

    def into_dy(call: TorchCall, texts: list[str]) -> str:
        z = call.tensor(1) if call.is_constant(1) else texts[1]
        return f"torch.ops.aten.{kernel}.grad_input({texts[0]}, {z}{tail}, grad_input={texts[0]})"

    pointwise(
        name, 2, numpy, text, accept="float", exact=exact, internal=True,
        linear=[(0,)], monotone=monotone, values=("int", values),
        gradient=_slope_gradient(name, curve), in_place=[into_dy], true_rows=true_rows,
        meaning=meaning,
    )  # fmt: skip


def _slope_gradient(name: str, curve: Callable[[Backward], Value] | None) -> Gradient:
    """The gradients by dy, the same operator, and by z, dy times the derivative of the slope."""

    def gradient(call: Backward) -> Mapping[int, Value]:
        grads = {}
        if call.wanted(0):
            again = call.emit(name, call.grad, call.operand(1), **dict(call.attrs))
            grads[0] = contracted(call, 0, again)
        if call.wanted(1) and curve is not None:
            both = product(call, call.grad, call.operand(0))
            grads[1] = contracted(call, 1, both, curve(call))
        return grads

    return gradient


# --- relu ------------------------------------------------------------------------------------

pointwise(
    "relu", 1, lambda x: np.maximum(x, 0), "torch.relu({0})", monotone=[0],
    gradient=applied("relu_grad", to_result=True), in_place=["torch.relu_({0})"],
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


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))  # exp(-x) would overflow


def _sigmoid_curve(call: Backward) -> Value:
    """The derivative of y * (1 - y): 1 - 2 * y."""
    return call.emit("add", call.emit("mul", call.operand(1), -2.0), 1.0)


_smooth(
    "tanh",
    np.tanh,
    "torch.tanh({0})",
    applied("tanh_grad", to_result=True),
    rises=True,
    in_place="torch.tanh_({0})",
    meaning="The hyperbolic tangent of each element.",
)
_slope(
    "tanh_grad",
    lambda dy, y: dy * (1 - y * y),
    "tanh_backward",
    lambda call: call.emit("mul", call.operand(1), -2.0),
    exact=True,
    values="unit",
    true_rows=swapped(
        "so for finite cotangents; an infinite one times a slope of 0 is NaN",
        *(f"P({op}), B -> P({op})" for op in ("max", "min")),
    ),
    meaning="The gradient of `tanh`, from its result y: dy * (1 - y^2).",
)
_smooth(
    "sigmoid",
    _sigmoid,
    "torch.sigmoid({0})",
    applied("sigmoid_grad", to_result=True),
    rises=True,
    in_place="torch.sigmoid_({0})",
    meaning="1 / (1 + e^-x), element by element.",
)
_slope(
    "sigmoid_grad",
    lambda dy, y: dy * (y * (1 - y)),
    "sigmoid_backward",
    _sigmoid_curve,
    exact=True,
    values="unit",
    meaning="The gradient of `sigmoid`, from its result y: dy * y * (1 - y).",
)

# --- silu, softplus, erf -----------------------------------------------------------------------


def _silu_slope(x: Array) -> Array:
    s = _sigmoid(x)
    return np.asarray(s * (1 + x * (1 - s)))


def _silu_curve(call: Backward) -> Value:
    """With s = sigmoid(x): s * (1 - s) * (2 + x * (1 - 2 * s))."""
    x = call.operand(1)
    s = call.emit("sigmoid", x)
    lean = call.emit("add", call.emit("mul", s, -2.0), 1.0)
    return call.emit("sigmoid_grad", call.emit("add", call.emit("mul", x, lean), 2.0), s)


_smooth(
    "silu",
    lambda x: np.asarray(x * _sigmoid(x)),
    "torch.nn.functional.silu({0})",
    applied("silu_grad"),
    rises=False,
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
_smooth(
    "softplus",
    lambda x: np.logaddexp(0, x),
    "torch.nn.functional.softplus({0}, threshold=40.0)",
    factor_of(lambda call: call.emit("sigmoid", call.operand(0))),
    rises=True,
    precision="f32",
    meaning="log(1 + e^x), element by element.",
)


def _erf(x: Array) -> Array:
    values = [math.erf(v) for v in x.ravel().tolist()]
    return np.array(values, dtype=x.dtype).reshape(x.shape)


def _bell(call: Backward, x: Value, exponent: float, height: float) -> Value:
    """The curve height * exp(exponent * x^2)."""
    power = call.emit("mul", call.emit("square", x), exponent)
    return call.emit("mul", call.emit("exp", power), height)


_smooth(
    "erf",
    _erf,
    "torch.erf({0})",
    factor_of(lambda call: _bell(call, call.operand(0), -1.0, 2 / math.sqrt(math.pi))),
    rises=True,
    meaning="The error function of each element.",
)

# --- gelu ------------------------------------------------------------------------------------

_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
_DENSITY = 1 / math.sqrt(2 * math.pi)


def _gelu_numpy(call: NumpyCall, x: Array) -> Array:
    if call.attrs["approximate"] == "tanh":
        inner = _GELU_SCALE * (x + _GELU_CUBE * x**3)
        return np.asarray(0.5 * x * (1 + np.tanh(inner)))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _gelu_slope(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        t = np.tanh(_GELU_SCALE * (x + _GELU_CUBE * x**3))
        inner = _GELU_SCALE * (1 + 3 * _GELU_CUBE * x * x)
        return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    return np.asarray(0.5 * (1 + _erf(x / math.sqrt(2))) + x * _DENSITY * np.exp(-0.5 * x * x))


def _form(attrs: Attrs) -> str:
    return ', approximate="tanh"' if attrs["approximate"] == "tanh" else ""


def _gelu_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_kind("gelu", "float", *ins)
    if attrs["approximate"] not in ("none", "tanh"):
        raise OpError(
            "MD0213",
            f"`gelu` knows no approximation {attrs['approximate']!r}",
            'leave it out for the exact form, or write `approximate="tanh"`',
        )
    return (TensorType(merged_dims("gelu", *ins), need_one_dtype("gelu", *ins)),)


def _gelu_grad_text(call: TorchCall) -> str:
    # The kernel does not broadcast.
    dy, x = (expanded(call, i, call.outs[0].dims) for i in (0, 1))
    return f"torch.ops.aten.gelu_backward({dy}, {x}{_form(call.attrs)})"


def _gelu_grad_into_dy(call: TorchCall) -> str:
    dy, x = call.tensor(0), expanded(call, 1, call.outs[0].dims)
    return f"torch.ops.aten.gelu_backward.grad_input({dy}, {x}{_form(call.attrs)}, grad_input={dy})"


def _gelu_curve(call: Backward) -> Value:
    """The second derivative of gelu: density(x) * (2 - x^2) for the exact form."""
    x = call.operand(1)
    if call.attrs["approximate"] == "tanh":
        return _gelu_tanh_curve(call, x)
    lean = call.emit("add", call.emit("neg", call.emit("square", x)), 2.0)
    return call.emit("mul", _bell(call, x, -0.5, _DENSITY), lean)


def _gelu_tanh_curve(call: Backward, x: Value) -> Value:
    """(1 - t^2) * (u' + x * (u'' / 2 - t * u'^2)), t = tanh(u), u' = k * (1 + 3 * c * x^2)."""
    square = call.emit("square", x)
    inner = call.emit("add", call.emit("mul", square, _GELU_CUBE), 1.0)
    t = call.emit("tanh", call.emit("mul", call.emit("mul", x, inner), _GELU_SCALE))
    slope = call.emit("add", call.emit("mul", square, 3 * _GELU_SCALE * _GELU_CUBE), _GELU_SCALE)
    bend = call.emit("mul", x, 3 * _GELU_SCALE * _GELU_CUBE)
    turn = call.emit("mul", t, call.emit("square", slope))
    curved = call.emit("mul", x, call.emit("sub", bend, turn))
    return call.emit("tanh_grad", call.emit("add", slope, curved), t)


_FORMS = ("none", "tanh")

register(
    OpDef(
        "gelu",
        Surface("none", (1, 1), (("approximate", "none"),)),
        _gelu_infer,
        plain(),
        _gelu_numpy,
        lambda call: f"torch.nn.functional.gelu({call.tensor(0)}{_form(call.attrs)})",
        tuple(sample(tensor(*dims), approximate=form) for (dims,) in UNARY for form in _FORMS),
        exact=False,
        flops=lambda sig: 8 * sig.outs[0].elements,
        gradient=applied("gelu_grad"),
        meaning="x times the normal distribution function at x, or a curve close to it.",
    )
)


def _gelu_grad_numpy(call: NumpyCall, dy: Array, x: Array) -> Array:
    form = call.attrs["approximate"]
    return numpy_pointwise(lambda dy, x: dy * _gelu_slope(x, form))(call, dy, x)


register(
    OpDef(
        "gelu_grad",
        Surface("view", (2, 2)),
        _gelu_infer,
        plain(linear=[(0,)]),
        _gelu_grad_numpy,
        _gelu_grad_text,
        tuple(
            sample(*(tensor(*d) for d in dims), approximate=form)
            for dims in BINARY
            for form in _FORMS
        ),
        exact=False,
        flops=lambda sig: 12 * sig.outs[0].elements,
        gradient=_slope_gradient("gelu_grad", _gelu_curve),
        in_place={0: _gelu_grad_into_dy},
        meaning="The gradient of `gelu`: dy times its slope at x.",
    )
)
