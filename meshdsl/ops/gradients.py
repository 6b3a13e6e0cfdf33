"""Helpers of the operators' gradients: contractions, numbers, the most frequent rules."""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.ir.types import Dim, DType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Backward, Gradient, Grads

Slope = Callable[[Backward], Value]


def contracted(call: Backward, index: int, *factors: Value) -> Value:
    """The product of `factors`, given per element of the result, summed for operand `index`.

    Dims that the operand has and no factor are left out: the gradient is constant along them.
    Every other dim of the call must occur in a factor. Factors without dims scale the sum.
    """
    operand = call.ins[index]
    scales = [f for f in factors if not f.type.dims]
    tensors = [f for f in factors if f.type.dims]
    names = {n for f in tensors for n in f.type.names}
    if names <= set(operand.names):
        return product(call, *factors)
    dims = tuple(d for d in operand.dims if d.name in names)
    if len(tensors) > 1:
        total = call.emit("einsum", *tensors, dims=dims)
    else:
        gone = tuple(d for d in tensors[0].type.dims if not operand.has(d.name))
        total = call.emit("sum", tensors[0], dims=gone)
    return product(call, total, *scales)


def product(call: Backward, *factors: Value) -> Value:
    """All factors multiplied, the smallest first, so that the largest is read once."""
    smallest, *others = sorted(factors, key=lambda f: f.type.elements)
    for factor in others:
        smallest = call.emit("mul", factor, smallest)
    return smallest


def number(call: Backward, value: float, dtype: DType) -> Value:
    """`value` as a literal of `dtype`, where no tensor of that dtype comes first in the call."""
    return call.emit("constant", value=value, dtype=dtype)


def zero_like(call: Backward, value: Value) -> Value:
    """The literal 0 in the dtype of `value`."""
    return number(call, 0.0, value.type.dtype)


def by_operand(call: Backward, *rules: Callable[[], Value]) -> Grads:
    """The gradients of the first operands by a rule each, of which only the wanted are computed."""
    return {i: rule() for i, rule in enumerate(rules) if call.wanted(i)}


def shared(share: Callable[[Backward, int], Value]) -> Gradient:
    """The gradient of two operands as the cotangent times the `share` of each, by its index."""
    return lambda call: {
        i: contracted(call, i, call.grad, share(call, i)) for i in (0, 1) if call.wanted(i)
    }


def full_grad(call: Backward) -> Value:
    """The cotangent with all dims of the result."""
    return call.full(call.grad, call.outs[0].dims)


def with_dims(call: Backward, *dims: Dim) -> Value:
    """The cotangent with all of `dims`, which the result has; others may still be missing."""
    grad = call.grad
    if all(grad.type.has(d.name) for d in dims):
        return grad
    names = {*grad.type.names, *(d.name for d in dims)}
    return call.full(grad, tuple(d for d in call.outs[0].dims if d.name in names))


def passed(call: Backward) -> Grads:
    """The cotangent unchanged: along the dims that it lacks, the gradient is constant."""
    return {0: call.grad}


def summed(call: Backward) -> Grads:
    """The gradient of the only operand: the cotangent, summed over the dims that it lacks."""
    return {0: call.sized(call.grad, 0)}


def factor_of(slope: Slope) -> Gradient:
    """The gradient of a pointwise function of one operand whose derivative is `slope`."""
    return lambda call: {0: product(call, call.grad, slope(call))}


def applied(name: str, *, to_result: bool = False) -> Gradient:
    """The gradient as operator `name` of the cotangent and the operand (or result).

    It takes the attributes of the call.
    """

    def gradient(call: Backward) -> Grads:
        saved = call.result() if to_result else call.operand(0)
        return {0: call.emit(name, call.grad, saved, **dict(call.attrs))}

    return gradient
