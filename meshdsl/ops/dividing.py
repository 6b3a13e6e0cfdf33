"""`x // y` and `x % y`, rounded towards minus infinity as in Python and numpy."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import numpy as np

from meshdsl.backends.runtime.indices import check_divisor
from meshdsl.ir.types import I32, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import contracted
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Gradient,
    NumpyCall,
    OpDef,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.pointwise import BINARY, numpy_pointwise, torch_pointwise
from meshdsl.ops.requirements import (
    Array,
    merged_dims,
    need_kind,
    need_one_dtype,
    plain,
    sample,
    tensor,
)

_SAMPLES = (
    *(sample(*(tensor(*d) for d in dims), values=("half", "int")) for dims in BINARY),
    *(
        sample(*(tensor(*d, dtype=I32) for d in dims), values=("int", "nonzero"))
        for dims in BINARY[:3]
    ),
)


def _text(template: str) -> Callable[[TorchCall], str]:
    """The template; integers are divided by a tensor only after a look for zeros."""

    def write(call: TorchCall, texts: list[str]) -> str:
        one, other = texts
        if call.ins[1].dtype.kind == "int" and not call.is_constant(1):
            other = f"{call.use('check_divisor')}({other}, {call.place})"
        return template.format(one, other)

    return torch_pointwise(write)


def _numpy(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def run(call: NumpyCall, x: Array, y: Array) -> Array:
        divisor = check_divisor(y, call.place) if call.ins[1].dtype.kind == "int" else y
        return numpy_pointwise(function)(call, x, divisor)

    return run


def _rest_gradient(call: Backward) -> Mapping[int, Value]:
    """Between its jumps, x % y is x less y as often as it fits."""
    grads = {0: call.sized(call.grad, 0)} if call.wanted(0) else {}
    if call.wanted(1):
        fits = call.emit("floordiv", call.operand(0), call.operand(1))
        grads[1] = call.emit("neg", contracted(call, 1, call.grad, fits))
    return grads


def _floored(
    name: str,
    sign: str,
    in_place: str,
    numpy: Callable[[Array, Array], Array],
    fold: Callable[[float, float], float],
    gradient: Gradient | None,
    meaning: str,
) -> None:
    """Register an operator that divides numbers of one dtype and rounds down."""

    def infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
        del attrs
        need_kind(sign, "number", *ins)
        dtype = need_one_dtype(sign, *ins)
        return (TensorType(merged_dims(sign, *ins), dtype),)

    register(
        OpDef(
            name,
            Surface("none", (2, 2)),
            infer,
            plain(),
            _numpy(numpy),
            _text(f"{{0}} {sign} {{1}}"),
            _SAMPLES,
            gradient=gradient,
            in_place={0: _text(f"{{0}}.{in_place}({{1}})")},
            infix=sign,
            fold=fold,
            meaning=meaning,
        )
    )


_floored(
    "floordiv", "//", "floor_divide_", np.floor_divide, operator.floordiv, None,
    "The first tensor over the second, rounded down, element by element: `-7 // 2` is -4. An "
    "integer that is divided by 0 ends the run (MD0802).",
)  # fmt: skip
_floored(
    "mod", "%", "remainder_", np.remainder, operator.mod, _rest_gradient,
    "What `//` leaves, with the sign of the divisor, element by element: `-7 % 2` is 1.",
)  # fmt: skip
