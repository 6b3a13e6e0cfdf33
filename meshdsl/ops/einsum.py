"""`einsum(a, b, … -> [dims])`: names missing on the right are summed."""

from __future__ import annotations

import math

from meshdsl.ops import arithmetic_gradients, kit, zeros
from meshdsl.ops.einsum_text import (
    added_product,
    adding_text,
    einsum_text,
    filling_text,
    is_contiguous,
    temporary_elements,
)


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_kind("einsum", "number", *ins)
    dtype = kit.need_one_dtype("einsum", *ins)
    operand_dims = kit.merged_dims("einsum", *ins)
    kit.need_distinct("einsum", attrs["dims"])
    for dim in attrs["dims"]:
        if dim not in operand_dims:
            raise kit.OpError(
                "MD0207",
                f"`einsum` should yield the dim `{dim}`, which no operand has",
                None,
                kit.DropDim(dim.name),
                also=f"the operands are {', '.join(map(str, ins))}",
            )
    return (kit.TensorType(attrs["dims"], dtype),)


def _factors(sig: kit.Signature) -> kit.Factors:
    dims = kit.merged_dims("einsum", *sig.ins)
    summed = [d for d in dims if not sig.outs[0].has(d.name)]
    loops = tuple(kit.loop(sig, d.name, "sum" if d in summed else None) for d in dims)
    linear = tuple(frozenset({i}) for i in range(len(sig.ins)))
    # One operand with nothing summed is a transpose.
    return kit.Factors(loops, linear, (0,) if len(sig.ins) == 1 and not summed else ())


def _numpy(call: kit.NumpyCall, *arrays: kit.Array) -> kit.Array:
    operands = [(a, t.names) for a, t in zip(arrays, call.ins, strict=True)]
    # `optimize` goes through BLAS; it gains nothing, and fails, on scalars.
    optimize = len(arrays) > 1 and any(t.dims for t in call.ins)
    return kit.einsum_by_name(*operands, to=call.outs[0].names, optimize=optimize)


def product_flops(sig: kit.Signature) -> int:
    """The FLOPs of a product of all operands that is summed."""
    dims = kit.merged_dims("einsum", *sig.ins)
    loops = math.prod(d.size for d in dims)
    if len(sig.ins) > 1:
        summed = any(not sig.outs[0].has(d.name) for d in dims)
        return (len(sig.ins) if summed else len(sig.ins) - 1) * loops
    return loops if len(dims) > len(sig.outs[0].dims) else 0


_SAMPLES = kit.samples(
    "s h; h v | dims=(s v)",
    "s h; v h | dims=(s v)",
    "h s; h v | dims=(s v)",
    "s h; h v | dims=(v s)",
    "b s h; h v | dims=(b s v)",
    "b s; s h v | dims=(b h v)",
    "b s h; s h v | dims=(b v)",
    "b s h; h s v | dims=(b v)",
    "b s h; b v h | dims=(b s v)",
    "b s h; b h v | dims=(b v s)",
    "b s h; h v | dims=(b v s)",
    "b s v; v h | dims=(s h)",
    "s h; s h | dims=(s)",
    "s h; h s | dims=()",
    "h; h | dims=()",
    "h; h v | dims=(v)",
    "s h; h | dims=(s)",
    "s; h | dims=(h s)",
    "s h; h | dims=(h s)",
    "s h; () | dims=(h)",
    "b s; s h | dims=(h)",
    "s h; s v | dims=(v)",
    "b s h | dims=(h b)",
    "s h | dims=(h s)",
    "s h | dims=()",
    "() | dims=()",
    "b s; s h; h v | dims=(v b)",
    "s h; s; h | dims=(s)",
    "s h: i32; s v: i32 | dims=(v h)",
    "s h: i32 | dims=(h)",
    "s h: i64; s h: i64 | dims=()",
)


def _may_add(sig: kit.Signature, split: frozenset[str], gaps: frozenset[int]) -> bool:
    """Whether it is a product of matrices: nothing is rounded before it is added."""
    del split
    dtype = sig.outs[0].dtype
    if dtype.kind != "float" or dtype.bytes < kit.F32.bytes:
        return False
    way = added_product(sig.ins, sig.outs[0])
    return way is not None and way.joined.isdisjoint(gaps)


def _may_fill(sig: kit.Signature) -> bool:
    """Whether it is a product of matrices."""
    is_float = sig.outs[0].dtype.kind == "float"
    return is_float and added_product(sig.ins, sig.outs[0]) is not None


kit.operator(
    "einsum",
    kit.Surface("out", (1, None)),
    _infer,
    _factors,
    _numpy,
    einsum_text,
    _SAMPLES,
    flops=product_flops,
    gradient=arithmetic_gradients.einsum_gradient,
    zeros=zeros.summed_product,
    precision="compute",
    shows=lambda ins, attrs: len(ins) == 1 and len(ins[0].dims) == len(attrs["dims"]),
    scratch=lambda sig, numbers: temporary_elements(sig.ins, sig.outs[0]) * sig.outs[0].dtype.bytes,
    adds=adding_text,
    adds_to=_may_add,
    fills=filling_text,
    fills_to=_may_fill,
    contiguous=lambda sig: is_contiguous(sig.ins, sig.outs[0]),
    meaning="The product of all operands, summed over the dims that the result lacks.",
)
