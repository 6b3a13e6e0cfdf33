"""`einsum(a, b, … -> [dims])`: names missing on the right are summed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.ir.types import I32, I64, Dim, TensorType
from meshdsl.ops.arithmetic_gradients import einsum_gradient
from meshdsl.ops.einsum_text import einsum_text
from meshdsl.ops.opdef import (
    Attrs,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
    Sample,
    Signature,
    Surface,
    register,
)
from meshdsl.ops.requirements import (
    BATCH,
    HIDDEN,
    SEQ,
    VOCAB,
    Array,
    loop,
    merged_dims,
    need_distinct,
    need_kind,
    need_one_dtype,
    sample,
    tensor,
)


def _infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_kind("einsum", "number", *ins)
    dtype = need_one_dtype("einsum", *ins)
    operand_dims = merged_dims("einsum", *ins)
    need_distinct("einsum", attrs["dims"])
    for dim in attrs["dims"]:
        if dim not in operand_dims:
            raise OpError(
                "MD0207",
                f"`einsum` should yield the dim `{dim}`, which no operand has",
                f"the operands are {', '.join(map(str, ins))}",
            )
    return (TensorType(attrs["dims"], dtype),)


def _factors(sig: Signature) -> Factors:
    dims = merged_dims("einsum", *sig.ins)
    summed = [d for d in dims if not sig.outs[0].has(d.name)]
    loops = tuple(loop(sig, d.name, "sum" if d in summed else None) for d in dims)
    linear = tuple(frozenset({i}) for i in range(len(sig.ins)))
    # One operand with nothing summed is a transpose.
    return Factors(loops, linear, (0,) if len(sig.ins) == 1 and not summed else ())


def _numpy(call: NumpyCall, *arrays: Array) -> Array:
    numbers = {d.name: i for i, d in enumerate(merged_dims("einsum", *call.ins))}
    spec: list[object] = []
    for array, type_ in zip(arrays, call.ins, strict=True):
        spec += [array, [numbers[n] for n in type_.names]]
    target = [numbers[n] for n in call.outs[0].names]
    # `optimize` goes through BLAS; it gains nothing, and fails, on scalars.
    product = np.einsum(*spec, target, optimize=len(arrays) > 1 and bool(numbers))  # type: ignore[call-overload]
    return np.asarray(product, dtype=np.result_type(*arrays))


def _flops(sig: Signature) -> int:
    dims = merged_dims("einsum", *sig.ins)
    loops = math.prod(d.size for d in dims)
    if len(sig.ins) > 1:
        summed = any(not sig.outs[0].has(d.name) for d in dims)
        return (len(sig.ins) if summed else len(sig.ins) - 1) * loops
    return loops if len(dims) > len(sig.outs[0].dims) else 0


def _case(*dims: tuple[Dim, ...], to: tuple[Dim, ...]) -> Sample:
    return sample(*(tensor(*d) for d in dims), dims=to)


_B, _S, _H, _V = BATCH, SEQ, HIDDEN, VOCAB
_INTS = (tensor(_S, _H, dtype=I32), tensor(_S, _V, dtype=I32))
_SAMPLES = (
    _case((_S, _H), (_H, _V), to=(_S, _V)),
    _case((_S, _H), (_V, _H), to=(_S, _V)),
    _case((_H, _S), (_H, _V), to=(_S, _V)),
    _case((_S, _H), (_H, _V), to=(_V, _S)),
    _case((_B, _S, _H), (_H, _V), to=(_B, _S, _V)),
    _case((_B, _S), (_S, _H, _V), to=(_B, _H, _V)),
    _case((_B, _S, _H), (_S, _H, _V), to=(_B, _V)),
    _case((_B, _S, _H), (_H, _S, _V), to=(_B, _V)),
    _case((_B, _S, _H), (_B, _V, _H), to=(_B, _S, _V)),
    _case((_B, _S, _H), (_B, _H, _V), to=(_B, _V, _S)),
    _case((_B, _S, _H), (_H, _V), to=(_B, _V, _S)),
    _case((_B, _S, _V), (_V, _H), to=(_S, _H)),
    _case((_S, _H), (_S, _H), to=(_S,)),
    _case((_S, _H), (_H, _S), to=()),
    _case((_H,), (_H,), to=()),
    _case((_H,), (_H, _V), to=(_V,)),
    _case((_S, _H), (_H,), to=(_S,)),
    _case((_S,), (_H,), to=(_H, _S)),
    _case((_S, _H), (_H,), to=(_H, _S)),
    _case((_S, _H), (), to=(_H,)),
    _case((_B, _S), (_S, _H), to=(_H,)),
    _case((_S, _H), (_S, _V), to=(_V,)),
    _case((_B, _S, _H), to=(_H, _B)),
    _case((_S, _H), to=(_H, _S)),
    _case((_S, _H), to=()),
    _case((), to=()),
    _case((_B, _S), (_S, _H), (_H, _V), to=(_V, _B)),
    _case((_S, _H), (_S,), (_H,), to=(_S,)),
    sample(*_INTS, dims=(_V, _H)),
    sample(tensor(_S, _H, dtype=I32), dims=(_H,)),
    sample(tensor(_S, _H, dtype=I64), tensor(_S, _H, dtype=I64), dims=()),
)


def _scratch(sig: Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of a product of two operands that has all dims of the result and is summed."""
    del numbers
    if len(sig.ins) != 2:
        return 0
    remaining = set(sig.outs[0].names)
    shared = [d.size for d in sig.ins[0].dims if sig.ins[1].has(d.name)]
    summed = remaining < {d.name for d in sig.ins[0].dims if sig.ins[1].has(d.name)}
    return math.prod(shared) * sig.outs[0].dtype.bytes if remaining and summed else 0


register(
    OpDef(
        "einsum",
        Surface("out", (1, None)),
        _infer,
        _factors,
        _numpy,
        einsum_text,
        _SAMPLES,
        flops=_flops,
        gradient=einsum_gradient,
        precision="compute",
        shows=lambda ins, attrs: len(ins) == 1 and len(ins[0].dims) == len(attrs["dims"]),
        scratch=_scratch,
        meaning="The product of all operands, summed over the dims that the result lacks.",
    )
)
