"""swiglu(gate, up) = gate * sigmoid(alpha * gate) * up, of Shazeer 2020, as one operator.

The record says all that a compiler needs. The kernel is in `kernel.py`, which only emitted
programs import: `meshdsl check` needs neither torch nor numpy.
"""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    """Both operands are floats of one dtype with the same dims; the result is as the first."""
    del attrs
    gate, up = ins
    kit.need_kind("swiglu", "float", gate, up)
    dtype = kit.need_one_dtype("swiglu", gate, up)
    if {*gate.names} != {*up.names}:
        help = "broadcast one of them first, or write `silu(gate) * up`"
        raise kit.OpError("MD0214", f"`swiglu` of {gate} and {up}: their dims differ", help)
    return (kit.TensorType(gate.dims, dtype),)


def _numpy(call: kit.NumpyCall, gate: kit.Array, up: kit.Array) -> kit.Array:
    up = kit.align(up, call.ins[1], call.outs[0].dims)
    return np.asarray(gate / (1 + np.exp(-call.attrs["alpha"] * gate)) * up)


def _torch(call: kit.TorchCall) -> str:
    up = kit.aligned_tensor(call, 1, call.outs[0].dims)  # a number becomes a tensor, too
    return f"torch.ops.swiglu_kernels.swiglu({call.tensor(0)}, {up}, {call.attrs['alpha']!r})"


def _gradient(call: kit.Backward) -> kit.Grads:
    """With s = sigmoid(alpha * gate): s * (1 + alpha * gate * (1 - s)) * up, and gate * s."""
    alpha, gate = call.attrs["alpha"], call.operand(0)
    s = call.emit("sigmoid", call.emit("mul", gate, alpha))
    grad, gated = kit.full_grad(call), call.emit("mul", gate, s)

    def of_gate() -> kit.Value:
        rest = call.emit("mul", call.emit("sub", 1.0, s), alpha)
        slope = call.emit("add", s, call.emit("mul", gated, rest))
        return call.emit("mul", call.emit("mul", grad, slope), call.operand(1))

    return kit.by_operand(call, of_gate, lambda: call.emit("mul", grad, gated))


OPERATORS = (
    kit.OpDef(
        "swiglu",
        kit.Surface("none", (2, 2), options=(("alpha", 1.0),)),
        infer=_infer,
        factors=kit.plain(linear=[[1]]),  # every dim may be split; partial sums of `up` pass
        numpy=_numpy,
        torch=_torch,
        samples=kit.samples("b h; b h | alpha=1.0", "b h; h b | alpha=1.5", "(); () | alpha=1.0"),
        exact=False,  # it rounds
        flops=lambda sig: 5 * sig.outs[0].elements,
        gradient=_gradient,
        meaning="gate · sigmoid(alpha · gate) · up, element by element.",
        imports=("swiglu_kernels.kernel",),
    ),
)
