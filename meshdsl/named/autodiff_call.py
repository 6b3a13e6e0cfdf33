"""One operator being differentiated: what its record's `gradient` is given, and how it emits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.named.builder import Builder, Scope
from meshdsl.named.ir import BOOL, Dim, DType, Op, TensorType, Value
from meshdsl.named.prelude import prelude
from meshdsl.named.rewrite import substitute
from meshdsl.ops.opdef import Attrs


def source(value: Value) -> Value:
    """The tensor whose rules bind what stands for `value`."""
    return value.follows or value


class Emitter:
    """Emits operators at the place of `at`; arithmetic of known numbers is done at once.

    `numbers` are the constants emitted so far. Results follow `follows`, where it is given.
    """

    def __init__(
        self, builder: Builder, numbers: dict[Value, float], at: Value, follows: Value | None
    ) -> None:
        self.builder, self.numbers, self.follows = builder, numbers, follows
        self.span = at.span
        self.scope = Scope({}, {}, prelude(), at.path, at.functions)
        self.start = len(builder.frames[-1].body)

    def apply(
        self, name: str, ins: tuple[Value, ...], attrs: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """Emit an operator as it stands."""
        fields = {} if self.follows is None else about(self.follows)
        return self.builder.emit(name, ins, attrs, self.span, self.scope, fields=fields)

    def number(self, number: float, dtype: DType) -> Value:
        """A constant without dims."""
        value = self.builder.constant(number, dtype, self.span, self.scope)
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
        known = [self.numbers.get(v) if isinstance(v, Value) else v for v in operands]
        folded = self._folded(name, known, operands)
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
        """What the call comes to without an operator: an operand, a number, or None."""
        if name in ("cast", "neg", *_ARITHMETIC) and all(k is not None for k in known):
            return _arithmetic(name, [k for k in known if k is not None])
        if name == "eq" and all(k is not None for k in known):
            (same,) = self.apply("constant", (), {"value": known[0] == known[1], "dtype": BOOL})
            self.numbers[same] = float(known[0] == known[1])
            return same
        if name == "where" and known[0] is not None:
            return operands[1 if known[0] else 2]
        for one, other in {"mul": ((0, 1), (1, 0)), "div": ((1, 0),)}.get(name, ()):
            if known[one] == 1 and isinstance(found := operands[other], Value):
                return found
        return None

    def _einsum(self, operands: list[Value], dims: tuple[Dim, ...]) -> Value:
        """A contraction; the numbers among its operands are multiplied onto the result."""
        tensors = [v for v in operands if v not in self.numbers]
        number = math.prod(self.numbers[v] for v in operands if v in self.numbers)
        if not tensors:
            return self.number(number, operands[0].type.dtype)
        found = tensors[0]
        if len(tensors) > 1 or len(found.type.dims) != len(dims):
            found = self.apply("einsum", tuple(tensors), {"dims": dims})[0]
        return self.emit("mul", found, number)

    # --- labels ------------------------------------------------------------------------------

    def follow(self, value: Value, target: Value) -> Value:
        """`value` as the gradient of `target`: bound by its rules, if it was made here."""
        body = self.builder.frames[-1].body
        made = {v for n in body[self.start :] if isinstance(n, Op) for v in n.outs}
        if value not in made or value.follows is not None or value in self.numbers:
            return value
        labelled = replace(value, **about(source(target)))
        self.builder.place(labelled, len(self.builder.frames) - 1)
        body[self.start :] = substitute(body[self.start :], {value: labelled})
        return labelled


def about(target: Value) -> dict[str, Any]:
    """The fields of a value that is the gradient of `target`.

    It stands where the target does, also where it is made inside a function that reads the target:
    selectors of that function do not mean it.
    """
    name = ".".join((*target.path, f"d_{target.label}")) if target.name else None
    where = {"path": target.path, "functions": target.functions}
    return {"follows": target, "name": name, **where}


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
    found = _ARITHMETIC[name](*numbers)
    return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True)
class Call:
    """A `Backward` (see `ops/opdef.py`) for one operator of a program."""

    op: Op
    grad: Value
    wants: frozenset[int]
    available: Callable[[Value], Value]
    emitter: Emitter

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
        """Whether anybody needs the gradient of operand `index`."""
        return index in self.wants

    def operand(self, index: int) -> Value:
        """Operand `index` as the backward pass has it."""
        return self.available(self.op.ins[index])

    def result(self) -> Value:
        """The result as the backward pass has it."""
        return self.available(self.op.out)

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator of one result."""
        return self.emitter.emit(name, *operands, **attrs)

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` broadcast to `dims`."""
        return self.emitter.full(value, dims)

    def sized(self, value: Value, index: int) -> Value:
        """What `value`, given per element of the result, comes to for operand `index`."""
        own, every = self.op.ins[index].type, self.op.out.type
        extra = tuple(d for d in value.type.dims if not own.has(d.name))
        lost = [d for d in every.dims if not own.has(d.name) and not value.type.has(d.name)]
        if extra:
            value = self.emit("sum", value, dims=extra)
        return self.emit("mul", value, float(math.prod(d.size for d in lost)))
