"""Turning along a dim: `roll`, whose end comes in at the start, and `reverse`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.ir.types import BOOL, I32, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.gradients import with_dims
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
    Reads,
    Signature,
    Spelling,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.reduce import same_type
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    Array,
    loops,
    no_flops,
    reader,
    sample,
    tensor,
)


def _factors(sig: Signature, reads: Reads) -> Factors:
    """Every dim is a loop; the own one reads elsewhere."""
    dim = sig.attrs["dim"].name
    factors = (*loops(sig, without=(dim,)), reader(dim, [dim], reads))
    return Factors(factors, (frozenset({0}),), (0,))


def _axis(call: NumpyCall | TorchCall) -> int:
    return call.ins[0].index(call.attrs["dim"].name)


# --- roll ------------------------------------------------------------------------------------


def _roll_bind(attrs: Attrs, ins: tuple[TensorType, ...]) -> Attrs:
    """`by`, where it is an integer, from 0 on and less than the size: all others do the same."""
    by = attrs["by"]
    if not isinstance(by, int):
        raise OpError("MD0213", f"`roll` by {by} elements", "give an integer")
    return {**attrs, "by": by % attrs["dim"].size}


def _roll_factors(sig: Signature) -> Factors:
    by = sig.attrs["by"] % sig.attrs["dim"].size
    return _factors(sig, Reads(lo=-by, hi=-by, fill="wrap"))


def _roll_numpy(call: NumpyCall, x: Array) -> Array:
    if call.is_split(call.attrs["dim"].name):
        return x  # a window: moved already
    return np.roll(x, call.attrs["by"], _axis(call))


def _roll_text(call: TorchCall) -> str:
    if call.is_split(call.attrs["dim"].name):
        return call.tensor(0)
    return f"{call.tensor(0)}.roll({call.attrs['by']}, {_axis(call)})"


def _roll_gradient(call: Backward) -> Mapping[int, Value]:
    dim, by = call.attrs["dim"], call.attrs["by"]
    if not call.grad.type.has(dim.name):
        return {0: call.grad}
    return {0: call.emit("roll", call.grad, dim=dim, by=-by % dim.size)}


register(
    OpDef(
        "roll",
        Surface("dim", (1, 1), (("by", ...),)),
        same_type("roll", "any"),
        _roll_factors,
        _roll_numpy,
        _roll_text,
        (
            sample(tensor(SEQ), dim=SEQ, by=1),
            sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ, by=2),
            sample(tensor(HIDDEN, BATCH, dtype=I32), dim=HIDDEN, by=5),
            sample(tensor(BATCH, SEQ, dtype=BOOL), values="bool", dim=SEQ, by=3),
        ),
        flops=no_flops,
        bind=_roll_bind,
        passes=True,
        gradient=_roll_gradient,
        spelled={
            "dtensor": Spelling(),
            "jax": Spelling("jnp.roll({x}, {by}, {at})"),
            "oneflow": Spelling("flow.roll({x}, {by}, {at})"),
        },
        meaning="The tensor moved `by` places along a dim; what leaves at the end enters first.",
    )
)

# --- reverse ---------------------------------------------------------------------------------


def _reverse_numpy(call: NumpyCall, x: Array) -> Array:
    return np.flip(x, _axis(call))


def _reverse_text(call: TorchCall) -> str:
    return f"{call.tensor(0)}.flip({_axis(call)})"


def _reverse_gradient(call: Backward) -> Mapping[int, Value]:
    return {0: call.emit("reverse", with_dims(call, call.attrs["dim"]), dim=call.attrs["dim"])}


register(
    OpDef(
        "reverse",
        Surface("dim", (1, 1)),
        same_type("reverse", "any"),
        lambda sig: _factors(sig, Reads(flip=True, fill=None)),
        _reverse_numpy,
        _reverse_text,
        (
            sample(tensor(SEQ), dim=SEQ),
            sample(tensor(BATCH, SEQ, HIDDEN), dim=SEQ),
            sample(tensor(HIDDEN, BATCH, dtype=I32), dim=HIDDEN),
            sample(tensor(BATCH, SEQ, dtype=BOOL), values="bool", dim=SEQ),
        ),
        flops=no_flops,
        gradient=_reverse_gradient,
        spelled={
            "dtensor": Spelling(),
            "jax": Spelling("jnp.flip({x}, {at})"),
            "oneflow": Spelling("flow.flip({x}, ({at},))"),
        },
        meaning="The tensor with the order of a dim turned round: the last element is the first.",
    )
)
