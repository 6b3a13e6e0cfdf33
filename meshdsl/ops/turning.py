"""Turning along a dim: `roll`, whose end comes in at the start, and `reverse`."""

from __future__ import annotations

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit

# --- roll ------------------------------------------------------------------------------------


def _roll_bind(attrs: kit.Attrs, ins: kit.Types) -> kit.Attrs:
    """`by`, where it is an integer, from 0 on and less than the size: all others do the same."""
    by = attrs["by"]
    if not isinstance(by, int):
        message = f"`roll` by {by} elements"
        way = kit.SetOption("by", "1")
        raise kit.OpError("MD0213", message, None, way, also="`by` is an integer")
    return {**attrs, "by": by % attrs["dim"].size}


def _roll_factors(sig: kit.Signature) -> kit.Factors:
    dim = sig.attrs["dim"]
    by = sig.attrs["by"] % dim.size
    return kit.moving(sig, dim, [dim], kit.Reads(lo=-by, hi=-by, fill="wrap"))


def _roll_numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    if call.is_split(call.attrs["dim"].name):
        return x  # a window: moved already
    return np.roll(x, call.attrs["by"], kit.axis(call))


def _roll_text(call: kit.TorchCall) -> str:
    if call.is_split(call.attrs["dim"].name):
        return call.tensor(0)
    return f"{call.tensor(0)}.roll({call.attrs['by']}, {kit.axis(call)})"


def _roll_gradient(call: kit.Backward) -> kit.Grads:
    dim, by = call.attrs["dim"], call.attrs["by"]
    if not call.grad.type.has(dim.name):
        return {0: call.grad}
    return {0: call.emit("roll", call.grad, dim=dim, by=-by % dim.size)}


kit.operator(
    "roll",
    kit.Surface("dim", (1, 1), (("by", ...),)),
    kit.same_type("roll", "any"),
    _roll_factors,
    _roll_numpy,
    _roll_text,
    kit.samples(
        "s | dim=s by=1", "b s h | dim=s by=2", "h b: i32 | dim=h by=5", "b s: bool | dim=s by=3"
    ),
    flops=kit.no_flops,
    bind=_roll_bind,
    passes=True,
    gradient=_roll_gradient,
    spelled={
        "dtensor": kit.Spelling(),
        "jax": kit.Spelling("jnp.roll({x}, {by}, {at})"),
        "oneflow": kit.Spelling("flow.roll({x}, {by}, {at})"),
    },
    meaning="The tensor moved `by` places along a dim; what leaves at the end enters first.",
)

# --- reverse ---------------------------------------------------------------------------------


def _reverse_factors(sig: kit.Signature) -> kit.Factors:
    dim = sig.attrs["dim"]
    return kit.moving(sig, dim, [dim], kit.Reads(flip=True, fill=None))


kit.operator(
    "reverse",
    kit.Surface("dim", (1, 1)),
    kit.same_type("reverse", "any"),
    _reverse_factors,
    lambda call, x: np.flip(x, kit.axis(call)),
    lambda call: f"{call.tensor(0)}.flip({kit.axis(call)})",
    kit.samples("s | dim=s", "b s h | dim=s", "h b: i32 | dim=h", "b s: bool | dim=s"),
    flops=kit.no_flops,
    gradient=lambda call: {
        0: call.emit("reverse", kit.with_dims(call, call.attrs["dim"]), **call.attrs)
    },
    spelled={
        "dtensor": kit.Spelling(),
        "jax": kit.Spelling("jnp.flip({x}, {at})"),
        "oneflow": kit.Spelling("flow.flip({x}, ({at},))"),
    },
    meaning="The tensor with the order of a dim turned round: the last element is the first.",
)
