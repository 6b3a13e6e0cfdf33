"""Evaluates the gradient of one operator while it is written: every emitted operator at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.diagnostics import Source, Span
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import Attrs, NumpyCall, OpDef, Signature, lookup
from meshdsl.ops.requirements import align, numpy_dtype
from meshdsl.prove.sample_values import results
from meshdsl.records import dataclass

NOWHERE = Span(Source("test.mdsl", "x"), 0, 0)


@dataclass
class Evaluator:
    """Applies operators to values, and remembers the array of each and the names it applied."""

    arrays: dict[Value, np.ndarray] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def value(self, array: np.ndarray, type_: TensorType) -> Value:
        """A new value; its array has the shape and the dtype that its type says."""
        assert array.shape == type_.shape
        assert array.dtype == numpy_dtype(type_.dtype)
        new_value = Value(type_, NOWHERE)
        self.arrays[new_value] = array
        return new_value

    def apply(self, name: str, ins: Sequence[Value], attrs: Attrs) -> Value:
        """The only result of an operator."""
        (result,) = self.apply_all(name, ins, attrs)
        return result

    def apply_all(self, name: str, ins: Sequence[Value], attrs: Attrs) -> tuple[Value, ...]:
        """The results of an operator."""
        opdef, types = lookup(name), tuple(v.type for v in ins)
        outs = opdef.infer(types, attrs)
        call = NumpyCall(types, outs, attrs)
        arrays = results(opdef, call, [self.arrays[v] for v in ins])
        self.names.append(name)
        return tuple(self.value(np.asarray(a), t) for a, t in zip(arrays, outs, strict=True))


class NumpyBackward:
    """A `Backward` (see `ops/opdef.py`) that knows the numbers, and records requests."""

    def __init__(
        self,
        opdef: OpDef,
        sig: Signature,
        arrays: Sequence[np.ndarray],
        grad: np.ndarray,
        grad_dims: tuple[Dim, ...],
        wants: frozenset[int],
    ) -> None:
        self.evaluator = Evaluator()
        if opdef.saving is not None:
            opdef = lookup(opdef.saving)
        outs = opdef.infer(sig.ins, sig.attrs)
        self.ins, self.outs, self.attrs = sig.ins, outs, sig.attrs
        self.wants = wants
        self.kept: list[str] = []
        self._ins = [self.evaluator.value(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
        computed = results(opdef, NumpyCall(sig.ins, outs, sig.attrs), list(arrays))
        pairs = zip(computed, outs, strict=True)
        self._results = [self.evaluator.value(np.asarray(array), t) for array, t in pairs]
        self.grad = self.evaluator.value(grad, TensorType(grad_dims, sig.outs[0].dtype))

    def wanted(self, index: int) -> bool:
        """Whether operand `index` was requested."""
        return index in self.wants

    def operand(self, index: int) -> Value:
        """Operand `index`."""
        self.kept.append(str(index))
        return self._ins[index]

    def result(self, index: int = 0) -> Value:
        """Result `index`."""
        self.kept.append("result")
        return self._results[index]

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """Apply an operator; numbers take the dtype of the first tensor."""
        dtypes = [v.type.dtype for v in operands if isinstance(v, Value)]
        ins = [
            v
            if isinstance(v, Value)
            else self.evaluator.apply("constant", (), {"value": v, "dtype": dtypes[0]})
            for v in operands
        ]
        return self.evaluator.apply(name, ins, attrs)

    def emit_all(self, name: str, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator of several results."""
        return self.evaluator.apply_all(name, operands, attrs)

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` broadcast to `dims`."""
        return value if value.type.dims == dims else self.emit("broadcast", value, dims=dims)

    def sized(self, value: Value, index: int) -> Value:
        """`value` summed over what operand `index` lacks; what it lacks itself counts by size."""
        type_ = self.ins[index]
        extra = tuple(d for d in value.type.dims if not type_.has(d.name))
        lost = [
            d for d in self.outs[0].dims if not type_.has(d.name) and not value.type.has(d.name)
        ]
        total = self.emit("sum", value, dims=extra) if extra else value
        return self.emit("mul", total, float(math.prod(d.size for d in lost))) if lost else total


def spread(array: np.ndarray, dims: tuple[Dim, ...], type_: TensorType) -> np.ndarray:
    """An array with some of the dims of `type_`, repeated over those it lacks."""
    return np.broadcast_to(align(array, TensorType(dims, type_.dtype), type_.dims), type_.shape)
