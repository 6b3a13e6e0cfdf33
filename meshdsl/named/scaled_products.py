"""`compute=f8`: products with weights on 8-bit floats with scales, forward and backward.

As torchao and torchtitan have it: of each operand the scale is that of the greatest magnitude (see
`ops/eight_bits.py`), of the whole tensor, or with `rowwise` of each row and each column of the two
matrices. Operands are e4m3; the gradient is e5m2, which has more range, or with `rowwise`, where
each row has a scale, e4m3. With `rowwise` the product for the gradient of a weight stays in the
dtype of the rest: its rows would be of the whole batch.

Scales are of global tensors, whatever devices have of them. So a split operand costs an all_reduce
of its scales, which is placed and counted as everything else, and every layout has the same
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from meshdsl.diagnostics import Edit, Fix, Span, advice, fail
from meshdsl.ir.rewrite import Visitor, rewritten
from meshdsl.ir.types import E4M3, E5M2, F32, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, fields_inside
from meshdsl.named.optimizers import EightBits
from meshdsl.records import dataclass


def scaled_products(
    program: NamedProgram, how: EightBits, weights: Iterable[Value]
) -> NamedProgram:
    """The training step with products of activations and `weights` on 8-bit floats.

    Of a product of two operands, no dim is in both and in the result: it is one of matrices. The
    weight is computed from `weights` alone. Raises MD0298 where there is no such product.
    """
    finder = _Products(weights)
    finder.nodes(program.body)
    if not finder.products:
        assert program.goal is not None
        message = "no product of the loss is computed in 8 bits"
        why = (
            "a product in 8 bits has a weight declared without a dtype, and sums over all dims "
            "that both operands have"
        )
        fixes, span = _in_bf16(program.goal.span), program.goal.span
        fail("MD0298", message, span, help=advice(fixes, why), fixes=fixes)
    body = rewritten(program.body, partial(_scaled, how, finder.products))
    return replace(program, body=body)


_COMPUTE = re.compile(r"""\bcompute\s*=\s*("f8"|f8\s*(\([^()]*\))?)""")


def _in_bf16(goal: Span) -> tuple[Fix, ...]:
    """The fix that computes in bf16, where `minimize` says f8."""
    place = _COMPUTE.search(goal.text)
    if place is None:
        return ()
    span = Span(goal.source, goal.start + place.start(1), goal.start + place.end(1))
    return (Fix('write `compute="bf16"`', (Edit(span, '"bf16"'),), safe=False),)


def summed_dims(op: NamedOp) -> frozenset[str]:
    """The dims over which a product of two matrices is summed; none of any other operator."""
    if op.name != "einsum" or len(op.ins) != 2:
        return frozenset()
    left, right, result = (frozenset(v.type.names) for v in (*op.ins, *op.outs))
    shared = left & right
    is_matrix = not shared & result and left - shared and right - shared
    return shared if is_matrix else frozenset()


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the forward pass: the dims that it sums over, and those of its weight."""

    summed: frozenset[str]
    weight: frozenset[str]


class _Products(Visitor):
    """The products of the forward pass with a weight, by their results."""

    def __init__(self, weights: Iterable[Value]) -> None:
        self.weights = set(weights)
        self.products: dict[Value, Product] = {}

    def nodes(self, nodes: Iterable[Node]) -> None:
        """Visit a block."""
        for node in nodes:
            self.visit(node)

    def op(self, op: NamedOp) -> None:
        """Note a product, and that what is computed from weights alone is one."""
        if op.phase != "forward":
            return
        summed, weights = summed_dims(op), [v for v in op.ins if v in self.weights]
        if summed and len(weights) == 1:
            self.products[op.outs[0]] = Product(summed, frozenset(weights[0].type.names))
        if op.ins and len(weights) == len(op.ins):
            self.weights.update(op.outs)

    def loop(self, loop: NamedLoop) -> None:
        """Visit the body, in which slices of weights are weights."""
        self.weights.update(s.inside for s in loop.stacked if s.outer in self.weights)
        self.nodes(loop.body)


def _scaled(how: EightBits, products: Mapping[Value, Product], op: NamedOp) -> tuple[NamedOp, ...]:
    """The operators in place of one: a product on 8-bit operands, or itself."""
    summed = summed_dims(op)
    if not summed or op.phase == "update":
        return (op,)
    product = products.get(op.outs[0] if op.origin is None else op.origin.of)
    if product is None:
        return (op,)
    # The gradient of the result has no dim that the product sums over; its operands have.
    is_gradient = [product.summed.isdisjoint(v.type.names) for v in op.ins]
    if how.rowwise and product.weight == frozenset(op.outs[0].type.names):
        return (op,)
    wide = E4M3 if how.rowwise else E5M2
    added, operands, scales = list[NamedOp](), list[Value](), list[Value]()
    for value, is_wide in zip(op.ins, is_gradient, strict=True):
        reduced = tuple(d for d in value.type.dims if not how.rowwise or d.name in summed)
        of_scale = TensorType(value.type.without(*(d.name for d in reduced)).dims, F32)
        scale = _derived(value, "scale", of_scale)
        narrow = _derived(value, "f8", TensorType(value.type.dims, wide if is_wide else E4M3))
        dtype = ("dtype", narrow.type.dtype)
        attrs = (("dims", reduced), dtype)
        added.append(replace(op, name="f8_scale", ins=(value,), outs=(scale,), attrs=attrs))
        added.append(replace(op, name="to_f8", ins=(value, scale), outs=(narrow,), attrs=(dtype,)))
        operands.append(narrow)
        scales.append(scale)
    attrs = (("dims", op.outs[0].type.dims), ("dtype", op.outs[0].type.dtype))
    return (*added, replace(op, name="f8_einsum", ins=(*operands, *scales), attrs=attrs))


def _derived(value: Value, what: str, type_: TensorType) -> Value:
    """A value that is computed from one, and under no rule that names that."""
    hint = f"{value.label}_{what}" if value.name else what
    return Value(type_, value.span, name_hint=hint, **fields_inside(value))
