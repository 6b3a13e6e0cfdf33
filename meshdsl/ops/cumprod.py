"""`cumprod[d](x)`: the products of all elements of d up to each one."""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit


def _torch(call: kit.TorchCall) -> str:
    dtype = ", dtype=torch.int32" if call.ins[0].dtype == kit.I32 else ""
    return f"{call.tensor(0)}.cumprod({kit.axis(call)}{dtype})"


def _gradient(call: kit.Backward) -> kit.Grads:
    """The gradient by x[i]: sum over j >= i of dy[j] times the product up to j without x[i].

    In front of the first zero of its row that product is y[j] / x[i]. At the first zero it is the
    product of the others; behind it there is always a zero left. So one pass over the products
    without the first zero suffices. (Torch's formula for inputs with zeros, in operators.)
    """
    x, dim = call.operand(0), call.attrs["dim"]
    dtype, along = x.type.dtype, {"dim": dim, "exclusive": 0, "reverse": 0}
    one, grad = kit.number(call, 1.0, dtype), kit.with_dims(call, dim)
    is_zero = call.emit("eq", x, 0.0)
    zeros = call.emit("cumsum", call.emit("cast", is_zero, dtype=dtype), **along)
    is_before, is_one = call.emit("eq", zeros, 0.0), call.emit("eq", zeros, 1.0)
    is_first = call.emit("logical_and", is_zero, is_one)
    others = call.emit("cumprod", call.emit("where", is_first, one, x), dim=dim)
    sums = call.emit("mul", grad, others)
    nothing = kit.zero_like(call, sums)

    def from_here_on(value: kit.Value) -> kit.Value:
        return call.emit("cumsum", value, **along | {"reverse": 1})

    before = from_here_on(call.emit("where", is_before, sums, nothing))
    before = call.emit("div", before, call.emit("where", is_zero, one, x))
    at_zero = from_here_on(call.emit("where", is_before, nothing, sums))
    beyond = call.emit("where", is_first, at_zero, nothing)
    return {0: call.emit("where", is_before, before, beyond)}


kit.operator(
    "cumprod",
    kit.Surface("dim", (1, 1)),
    kit.same_type("cumprod", "number"),
    kit.plain(whole=True),
    lambda call, x: np.cumprod(x, axis=kit.axis(call), dtype=x.dtype),
    _torch,
    kit.samples("s | dim=s", "b s h | dim=s", "h s: i32 | dim=h"),
    exact=False,
    gradient=_gradient,
    precision="f32",
    meaning="The running product along a dim: element i is the product of elements 0 to i.",
)
