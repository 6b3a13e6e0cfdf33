"""Gradients of arithmetic, extremes, `where`: products are contracted, never materialised."""

from __future__ import annotations

from meshdsl.ops import kit

Grads = kit.Grads


def add_gradient(call: kit.Backward) -> Grads:
    """The cotangent itself, for each operand."""
    return kit.by_operand(call, lambda: call.sized(call.grad, 0), lambda: call.sized(call.grad, 1))


def sub_gradient(call: kit.Backward) -> Grads:
    """The cotangent, and its negative: negated after the sum, when it is smallest."""
    return kit.by_operand(
        call,
        lambda: call.sized(call.grad, 0),
        lambda: call.emit("neg", call.sized(call.grad, 1)),
    )


mul_gradient = kit.shared(lambda call, index: call.operand(1 - index))
"""The cotangent times the other operand."""


def einsum_gradient(call: kit.Backward) -> Grads:
    """The einsum of the cotangent and the other operands."""

    def one(index: int) -> kit.Value:
        others = [call.operand(i) for i in range(len(call.ins)) if i != index]
        return kit.contracted(call, index, call.grad, *others)

    return {i: one(i) for i in range(len(call.ins)) if call.wanted(i)}


def div_gradient(call: kit.Backward) -> Grads:
    """Derivatives of x / y: 1 / y, and -(x / y) / y."""

    def numerator() -> kit.Value:
        x, y = call.ins
        if set(y.names) <= set(x.names):
            return call.emit("div", call.sized(call.grad, 0), call.operand(1))
        one = kit.number(call, 1.0, y.dtype)
        return kit.contracted(call, 0, call.grad, call.emit("div", one, call.operand(1)))

    def denominator() -> kit.Value:
        total = kit.contracted(call, 1, call.grad, call.result())
        return call.emit("neg", call.emit("div", total, call.operand(1)))

    return kit.by_operand(call, numerator, denominator)


def pow_gradient(call: kit.Backward) -> Grads:
    """Derivatives of x ^ p: p * x^(p-1), which is 0 for p = 0, and x^p * log(x).

    The latter is 0 for x = 0, unless p is negative and the power infinite.
    """

    def base() -> kit.Value:
        x, p = call.operand(0), call.operand(1)
        # 0 * x^-1 would be NaN at x = 0.
        one = kit.number(call, 1.0, p.type.dtype)
        safe = call.emit("where", call.emit("eq", p, 0.0), one, p)
        power = call.emit("pow", x, call.emit("sub", safe, 1.0))
        return kit.contracted(call, 0, call.grad, p, power)

    def exponent() -> kit.Value:
        x, p = call.operand(0), call.operand(1)
        # 0 * log(0) would be NaN.
        one = kit.number(call, 1.0, x.type.dtype)
        vanishes = call.emit("logical_and", call.emit("eq", x, 0.0), call.emit("ge", p, 0.0))
        safe = call.emit("where", vanishes, one, x)
        log = call.emit("log", safe)
        return kit.contracted(call, 1, call.grad, call.result(), log)

    return kit.by_operand(call, base, exponent)


def extreme_gradient(lost: str, not_won: str) -> kit.Gradient:
    """The rule of `maximum` (`lt`, `le`) or `minimum` (`gt`, `ge`): to the winner; half at a tie.

    Where one is NaN, to both, as `torch.maximum`.
    """

    def share(call: kit.Backward, index: int) -> kit.Value:
        operand, other = call.operand(index), call.operand(1 - index)
        dtype = operand.type.dtype
        left_out, tied = call.emit(lost, operand, other), call.emit(not_won, operand, other)
        winner_share = call.emit(
            "where", tied, kit.number(call, 0.5, dtype), kit.number(call, 1.0, dtype)
        )
        return call.emit("where", left_out, kit.number(call, 0.0, dtype), winner_share)

    return kit.shared(share)


def where_gradient(call: kit.Backward) -> Grads:
    """The cotangent where the operand was taken, 0 elsewhere."""
    condition, zero = call.operand(0), kit.zero_like(call, call.grad)
    grads = {}
    if call.wanted(1):
        grads[1] = call.sized(call.emit("where", condition, call.grad, zero), 1)
    if call.wanted(2):
        grads[2] = call.sized(call.emit("where", condition, zero, call.grad), 2)
    return grads


def cast_gradient(call: kit.Backward) -> Grads:
    """The cotangent cast back; integers have no gradient, and none is ever wanted."""
    old = call.ins[0].dtype
    return {
        0: call.grad if call.grad.type.dtype == old else call.emit("cast", call.grad, dtype=old)
    }


# --- slopes of one operand ---------------------------------------------------------------------


def neg_gradient(call: kit.Backward) -> Grads:
    """The negative."""
    return {0: call.emit("neg", call.grad)}


def square_gradient(call: kit.Backward) -> Grads:
    """2 * x."""
    return {0: kit.product(call, call.emit("mul", call.grad, 2.0), call.operand(0))}


def log_gradient(call: kit.Backward) -> Grads:
    """1 / x."""
    return {0: call.emit("div", call.grad, call.operand(0))}


def sqrt_gradient(call: kit.Backward) -> Grads:
    """1 / (2 * sqrt(x))."""
    return {0: call.emit("div", call.emit("mul", call.grad, 0.5), call.result())}


def rsqrt_gradient(call: kit.Backward) -> Grads:
    """-1/2 * x^(-3/2), from the result."""
    y = call.result()
    half = call.emit("mul", call.grad, -0.5)
    return {0: kit.product(call, half, call.emit("mul", call.emit("square", y), y))}


def cos_gradient(call: kit.Backward) -> Grads:
    """-sin(x)."""
    return {0: call.emit("neg", kit.product(call, call.grad, call.emit("sin", call.operand(0))))}
