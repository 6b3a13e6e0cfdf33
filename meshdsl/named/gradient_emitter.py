"""Operators of a backward pass, as the gradient rules of operators emit them (`ops/opdef.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.ir.program import Origin
from meshdsl.ir.rewrite import substitute
from meshdsl.ir.types import BOOL, Dim, DType, TensorType
from meshdsl.named.builder import Builder, Scope
from meshdsl.named.ir import NamedOp, Value
from meshdsl.named.prelude import prelude
from meshdsl.ops.opdef import Attrs


class OpEmitter:
    """Emits operators at the place of `at`, for an `origin`; arithmetic on numbers is folded.

    `numbers` are the constants emitted so far. Results are the gradient of `target`, where given.
    """

    def __init__(
        self,
        builder: Builder,
        numbers: dict[Value, float],
        at: Value,
        origin: Origin,
        target: Value | None,
    ) -> None:
        self.builder, self.numbers, self.target = builder, numbers, target
        self.origin = origin
        self.span = at.span
        self.scope = Scope({}, {}, prelude(), at.path, at.functions)
        self.start = len(builder.frames[-1].body)

    def apply(
        self, name: str, ins: tuple[Value, ...], attrs: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """Emit an operator without folding."""
        fields = {} if self.target is None else self.target.as_gradient
        about = (self.span, self.scope)
        return self.builder.emit(name, ins, attrs, *about, fields=fields, origin=self.origin)

    def number(self, number: float, dtype: DType) -> Value:
        """Emit a constant without dims."""
        value = self.builder.constant(number, dtype, self.span, self.scope, self.origin)
        self.numbers[value] = number
        return value

    def zeros(self, type_: TensorType) -> Value:
        """A tensor of zeros."""
        return self.apply("zeros", (), {"dims": type_.dims, "dtype": type_.dtype})[0]

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` with all of `dims`, in this order: broadcast over those it lacks."""
        if value.type.dims == dims:
            return value
        name = "transpose" if len(value.type.dims) == len(dims) else "broadcast"
        return self.apply(name, (value,), {"dims": dims})[0]

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator of one result; numbers take the dtype of the first tensor."""
        if name == "constant":
            return self.number(attrs["value"], attrs["dtype"])
        if not operands:
            return self.apply(name, (), attrs)[0]
        dtype = next(v.type.dtype for v in operands if isinstance(v, Value))
        if name == "einsum":
            return self._einsum([self._value(v, dtype) for v in operands], attrs["dims"])
        numbers = [self.numbers.get(v) if isinstance(v, Value) else v for v in operands]
        folded = self._folded(name, numbers, operands)
        if isinstance(folded, Value):
            return folded
        if folded is not None:
            return self.number(folded, attrs.get("dtype", dtype))
        ins = tuple(self._value(v, dtype) for v in operands)
        return self.apply(name, ins, attrs)[0]

    def _value(self, operand: Value | float, dtype: DType) -> Value:
        return operand if isinstance(operand, Value) else self.number(float(operand), dtype)

    def _folded(
        self, name: str, known: list[float | None], operands: tuple[Value | float, ...]
    ) -> Value | float | None:
        """The folded result of a call: an operand, a number, or None where it needs an operator."""
        if name in ("cast", "neg", *_ARITHMETIC) and all(k is not None for k in known):
            return _arithmetic(name, [k for k in known if k is not None])
        if name == "eq" and all(k is not None for k in known):
            (same,) = self.apply("constant", (), {"value": known[0] == known[1], "dtype": BOOL})
            self.numbers[same] = float(known[0] == known[1])
            return same
        if name == "where" and known[0] is not None:
            return operands[1 if known[0] else 2]
        for one, other in {"mul": ((0, 1), (1, 0)), "div": ((1, 0),)}.get(name, ()):
            if known[one] == 1 and isinstance(operand := operands[other], Value):
                return operand
        return None

    def _einsum(self, operands: list[Value], dims: tuple[Dim, ...]) -> Value:
        """A contraction; the numbers among its operands are multiplied onto the result."""
        tensors = [v for v in operands if v not in self.numbers]
        number = math.prod(self.numbers[v] for v in operands if v in self.numbers)
        if not tensors:
            return self.number(number, operands[0].type.dtype)
        product = tensors[0]
        if len(tensors) > 1 or len(product.type.dims) != len(dims):
            product = self.apply("einsum", tuple(tensors), {"dims": dims})[0]
        return self.emit("mul", product, number)

    # --- labels ------------------------------------------------------------------------------

    def follow(self, value: Value, target: Value) -> Value:
        """`value` as the gradient of `target`: bound by its rules, if it was made here."""
        body = self.builder.frames[-1].body
        results = {v for n in body[self.start :] if isinstance(n, NamedOp) for v in n.outs}
        if value not in results or value.rules_from is not None or value in self.numbers:
            return value
        labelled = replace(value, **target.source.as_gradient)
        self.builder.place(labelled, len(self.builder.frames) - 1)
        body[self.start :] = substitute(body[self.start :], {value: labelled})
        return labelled


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else math.nan,
    "square": lambda a: a * a,
}


def _arithmetic(name: str, numbers: list[float]) -> float | None:
    if name in ("cast", "neg"):
        return numbers[0] if name == "cast" else -numbers[0]
    number = _ARITHMETIC[name](*numbers)
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A `Backward` (see `ops/opdef.py`) for one operator of a program."""

    op: NamedOp
    grad: Value
    wants: frozenset[int]
    available: Callable[[Value], Value]
    emitter: OpEmitter

    @property
    def ins(self) -> tuple[TensorType, ...]:
        """Global types of the operands."""
        return tuple(v.type for v in self.op.ins)

    @property
    def outs(self) -> tuple[TensorType, ...]:
        """Global types of the results."""
        return tuple(v.type for v in self.op.outs)

    @property
    def attrs(self) -> Attrs:
        """The attributes of the operator."""
        return dict(self.op.attrs)

    def wanted(self, index: int) -> bool:
        """Whether the gradient of operand `index` is used."""
        return index in self.wants

    def operand(self, index: int) -> Value:
        """Operand `index` as the backward pass reads it."""
        return self.available(self.op.ins[index])

    def result(self, index: int = 0) -> Value:
        """Result `index` as the backward pass reads it."""
        return self.available(self.op.outs[index])

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator of one result."""
        return self.emitter.emit(name, *operands, **attrs)

    def emit_all(self, name: str, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator of several results."""
        return self.emitter.apply(name, operands, attrs)

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` broadcast to `dims`."""
        return self.emitter.full(value, dims)

    def sized(self, value: Value, index: int) -> Value:
        """`value`, given per element of the result, summed and scaled for operand `index`."""
        type_, every = self.op.ins[index].type, self.op.out.type
        extra = tuple(d for d in value.type.dims if not type_.has(d.name))
        lost = [d for d in every.dims if not type_.has(d.name) and not value.type.has(d.name)]
        if extra:
            value = self.emit("sum", value, dims=extra)
        return self.emit("mul", value, float(math.prod(d.size for d in lost)))
