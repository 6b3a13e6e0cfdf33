"""`x // y` and `x % y`, rounded towards minus infinity as in Python and numpy."""

from __future__ import annotations

import operator
from collections.abc import Callable

from meshdsl.backends.runtime.indices import check_divisor
from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit

_SAMPLES = kit.SampleList(
    lambda: (
        *kit.samples(*kit.BINARY, values="half int"),
        *kit.samples(*kit.BINARY[:3], values="int nonzero", dtype=kit.I32),
    )
)


def _text(template: str) -> Callable[[kit.TorchCall], str]:
    """The template; integers are divided by a tensor only after a look for zeros."""

    def write(call: kit.TorchCall, texts: list[str]) -> str:
        one, other = texts
        if call.ins[1].dtype.kind == "int" and not call.is_constant(1):
            other = f"{call.use('check_divisor')}({other}, {call.place})"
        return template.format(one, other)

    return kit.torch_pointwise(write)


def _numpy(function: Callable[[kit.Array, kit.Array], kit.Array]) -> Callable[..., kit.Array]:
    def run(call: kit.NumpyCall, x: kit.Array, y: kit.Array) -> kit.Array:
        divisor = check_divisor(y, call.place) if call.ins[1].dtype.kind == "int" else y
        return kit.numpy_pointwise(function)(call, x, divisor)

    return run


def _rest_gradient(call: kit.Backward) -> kit.Grads:
    """Between its jumps, x % y is x less y as often as it fits."""
    grads = {0: call.sized(call.grad, 0)} if call.wanted(0) else {}
    if call.wanted(1):
        fits = call.emit("floordiv", call.operand(0), call.operand(1))
        grads[1] = call.emit("neg", kit.contracted(call, 1, call.grad, fits))
    return grads


def _floored(
    name: str,
    sign: str,
    in_place: str,
    numpy: Callable[[kit.Array, kit.Array], kit.Array],
    fold: Callable[[float, float], float],
    gradient: kit.Gradient | None,
    meaning: str,
) -> None:
    """Register an operator that divides numbers of one dtype and rounds down."""
    kit.operator(
        name,
        kit.Surface("none", (2, 2)),
        kit.pointwise_type(sign, "number"),
        kit.plain(),
        _numpy(numpy),
        _text(f"{{0}} {sign} {{1}}"),
        _SAMPLES,
        gradient=gradient,
        in_place={0: _text(f"{{0}}.{in_place}({{1}})")},
        infix=sign,
        fold=fold,
        meaning=meaning,
    )


_floored(
    "floordiv", "//", "floor_divide_", lambda x, y: np.floor_divide(x, y), operator.floordiv, None,
    "The first tensor over the second, rounded down, element by element: `-7 // 2` is -4. An "
    "integer that is divided by 0 ends the run (MD0802).",
)  # fmt: skip
_floored(
    "mod", "%", "remainder_", lambda x, y: np.remainder(x, y), operator.mod, _rest_gradient,
    "What `//` leaves, with the sign of the divisor, element by element: `-7 % 2` is 1.",
)  # fmt: skip
