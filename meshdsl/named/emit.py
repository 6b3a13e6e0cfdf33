"""`Emit`: operators made at one place of a program for one reason, as gradients and updates are.

What a program states is made where it is read (`calls.py`, `expressions.py`). What is made beside
that has its span, calls, role, phase and origin from here, and its numbers are folded here. Numbers
of a text are folded in `expressions.py`, those left in a placed program in `cse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from meshdsl.diagnostics import Span
from meshdsl.ir.program import Origin
from meshdsl.ir.types import BOOL, Dim, DType, TensorType
from meshdsl.named.builder import NO_FIELDS, Builder
from meshdsl.named.ir import InCalls, Value
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Emit:
    """Makes operators: `emit("add", a, b)` is the sum of two values.

    span:    their place in the source.
    calls:   what is inside the same calls of functions; None: what is inside none.
    fields:  of the results (`role`, `rules_from` and the like); constants have the defaults.
    origin:  what they are made for, in the backward pass.
    phase:   the part of a training step that they belong to; empty: that of the builder.
    numbers: the constants made so far, where calls on numbers are folded; None: where they are not.
    """

    builder: Builder
    span: Span
    calls: InCalls | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = None
    phase: str = ""
    numbers: dict[Value, float] | None = None

    def __call__(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """An operator of one result; numbers take the dtype of the first float, or first tensor."""
        if name == "constant":
            return self.number(attrs["value"], attrs["dtype"])
        if self.numbers is None or not operands:
            return self.all(name, *operands, **attrs)[0]
        if name == "einsum":
            return self._einsum(self.numbers, self._tensors(operands), attrs["dims"])
        folded = self._folded(self.numbers, name, operands)
        if folded is None:
            return self.all(name, *operands, **attrs)[0]
        if isinstance(folded, Value):
            return folded
        return self.number(folded, attrs.get("dtype", _dtype_of(operands)))

    def all(self, name: str, *operands: Value | float, **attrs: Any) -> tuple[Value, ...]:
        """All results of an operator, which is not folded."""
        return self.apply(name, self._tensors(operands), attrs)

    def apply(
        self, name: str, ins: tuple[Value, ...], attrs: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """The same for attributes by name."""
        with self.builder.in_phase(self.phase):
            return self.builder.emit(
                name, ins, attrs, self.span, self.calls, fields=self.fields, origin=self.origin
            )

    def known_as(self, name_hint: str) -> Emit:
        """The same for results with a name hint."""
        return replace(self, fields={**self.fields, "name_hint": name_hint})

    def number(self, number: float, dtype: DType) -> Value:
        """A constant without dims."""
        with self.builder.in_phase(self.phase):
            value = self.builder.constant(number, dtype, self.span, self.calls, self.origin)
        if self.numbers is not None:
            self.numbers[value] = number
        return value

    def zeros(self, type_: TensorType) -> Value:
        """A tensor of zeros."""
        return self("zeros", dims=type_.dims, dtype=type_.dtype)

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` with all of `dims`, in this order: broadcast over those it lacks."""
        if value.type.dims == dims:
            return value
        name = "transpose" if len(value.type.dims) == len(dims) else "broadcast"
        return self.all(name, value, dims=dims)[0]

    def cast(self, value: Value, dtype: DType) -> Value:
        """`value` in a dtype: itself, where it has that."""
        return value if value.type.dtype == dtype else self.all("cast", value, dtype=dtype)[0]

    def _tensors(self, operands: Sequence[Value | float]) -> tuple[Value, ...]:
        """Operands, numbers among them as constants."""
        return tuple(
            v if isinstance(v, Value) else self.number(v, _dtype_of(operands)) for v in operands
        )

    # --- folding ---------------------------------------------------------------------------------

    def _folded(
        self, numbers: dict[Value, float], name: str, operands: tuple[Value | float, ...]
    ) -> Value | float | None:
        """The folded result of a call: an operand, a number, or None where it needs an operator."""
        as_numbers = [numbers.get(v) if isinstance(v, Value) else v for v in operands]
        constants = [number for number in as_numbers if number is not None]
        if len(constants) == len(as_numbers) and name in _ARITHMETIC:
            number = _ARITHMETIC[name](*constants)
            return number if math.isfinite(number) else None
        if len(constants) == len(as_numbers) and name == "eq":
            (same,) = self.all("constant", value=as_numbers[0] == as_numbers[1], dtype=BOOL)
            numbers[same] = float(as_numbers[0] == as_numbers[1])
            return same
        if name == "where" and as_numbers[0] is not None:
            return operands[1 if as_numbers[0] else 2]
        for one, other in {"mul": ((0, 1), (1, 0)), "div": ((1, 0),)}.get(name, ()):
            if as_numbers[one] == 1 and isinstance(operand := operands[other], Value):
                return operand
        return None

    def _einsum(
        self, numbers: dict[Value, float], operands: tuple[Value, ...], dims: tuple[Dim, ...]
    ) -> Value:
        """A contraction; the numbers among its operands are multiplied onto the result."""
        tensors = [v for v in operands if v not in numbers]
        number = math.prod(numbers[v] for v in operands if v in numbers)
        if not tensors:
            return self.number(number, operands[0].type.dtype)
        product = tensors[0]
        if len(tensors) > 1 or len(product.type.dims) != len(dims):
            product = self.all("einsum", *tensors, dims=dims)[0]
        return self("mul", product, number)


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else math.nan,
    "square": lambda a: a * a,
    "neg": lambda a: -a,
    "cast": lambda a: a,
}
"""What is folded; a result that is not finite is left to the program."""


def _dtype_of(operands: Sequence[Value | float]) -> DType:
    """The dtype that numbers among operands take."""
    dtypes = [v.type.dtype for v in operands if isinstance(v, Value)]
    return next((d for d in dtypes if d.kind == "float"), dtypes[0])


def emit_at(
    builder: Builder,
    place: Value,
    fields: Mapping[str, Any] = NO_FIELDS,
    origin: Origin | None = None,
    phase: str = "",
) -> Emit:
    """What makes operators where `place` is made, in the same calls."""
    return Emit(builder, place.span, place, fields, origin, phase)
