"""What the gradient rules of operators (`ops/opdef.py`) know and emit for one operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, Value
from meshdsl.ops.opdef import Attrs
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """A `Backward` (see `ops/opdef.py`) for one operator of a program."""

    op: NamedOp
    grad: Value
    wants: frozenset[int]
    available: Callable[[Value], Value]
    emitter: Emit

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
        return self.emitter(name, *operands, **attrs)

    def emit_all(self, name: str, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator of several results."""
        return self.emitter.all(name, *operands, **attrs)

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
