"""`--dtype`: the same program with floats of another type where it states none.

A dtype that a program states, by a `cast` or in the declaration of a parameter, is kept where it is
the wider one, as under `compute=`: positions and angles stay f32 under bf16. Where such a value
meets one of the type asked for, it is cast to that. A literal takes the type of its neighbours.

Which results of an operator stay wider than its operands, as the logarithms of sums of attention
do, its own shape rule says: a program whose gradients are already written out is typed as one that
was written in the type.
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.ir.types import DType, TensorType
from meshdsl.named.casting import Casting
from meshdsl.named.ir import NamedOp, NamedProgram, Value
from meshdsl.ops.opdef import lookup


def retype(program: NamedProgram, dtype: DType) -> NamedProgram:
    """Change float tensors, literals and narrower casts to `dtype`; integers and bools stay.

    Results of operators have the types that their shape rules give them.
    """
    retyped = _Retype(dtype)
    for param in program.params:
        if param.typed and retyped.is_held(param.value.type.dtype):
            retyped.held.add(retyped.typed(param.value, param.value.type.dtype))
    body = retyped.nodes(program.body)
    updates = tuple(retyped.update(u) for u in program.updates)
    rebuilt = program.rebuilt((*body, *retyped.taken()), retyped.value)
    goal = rebuilt.goal and rebuilt.goal.without_mixed()
    return replace(rebuilt, updates=updates, goal=goal)


class _Retype(Casting):
    """`held` are new values in dtypes that the program states; `literals`, numbers it writes."""

    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self.dtype = dtype
        self.held: set[Value] = set()
        self.literals: dict[Value, NamedOp] = {}

    def is_held(self, dtype: DType) -> bool:
        """Whether a dtype that is stated is kept."""
        return dtype.kind == "float" and dtype.bytes > self.dtype.bytes

    def value(self, value: Value) -> Value:
        """The value of the new type: that of an input, a parameter or a state is made here."""
        if value in self.new:
            retyped: Value = self.new[value]
            return retyped
        return self.typed(
            value, self.dtype if value.type.dtype.kind == "float" else value.type.dtype
        )

    def typed(self, value: Value, dtype: DType) -> Value:
        """The value that has a dtype in place of one; the same for the one whose rules it takes."""
        rules_from = value.rules_from and self.value(value.rules_from)
        type_ = TensorType(value.type.dims, dtype)
        typed = self.new[value] = replace(value, type=type_, rules_from=rules_from)
        return typed

    def like(self, value: Value, other: Value) -> None:
        """Give a value the new dtype of another, and whether it is held."""
        super().like(value, other)
        if self.value(other) in self.held:
            self.held.add(self.new[value])

    def op(self, op: NamedOp) -> tuple[NamedOp, ...]:
        """The operator after casts of what it reads."""
        ins: tuple[Value, ...] = tuple(map(self.value, op.ins))
        # The gradient of a cast is one to the dtype of what the cast has read.
        is_stated = op.name == "cast" and op.origin is None
        attrs = tuple((k, self._attr(v, is_stated)) for k, v in op.attrs)
        if op.name != "cast":
            ins = self._together(op, ins)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(attrs))
        outs = tuple(self.typed(v, t.dtype) for v, t in zip(op.outs, types, strict=True))
        if (op.name == "cast" and is_stated) or not self.held.isdisjoint(ins):
            self.held.update(v for v in outs if self.is_held(v.type.dtype))
        origin = op.origin and op.origin.on(self.value)
        new = replace(op, ins=ins, outs=outs, attrs=attrs, origin=origin)
        if op.name == "constant":
            self.literals[outs[0]] = new
        return (*self.taken(), new)

    def _attr(self, value: object, is_stated: bool) -> object:
        if not isinstance(value, DType) or value.kind != "float":
            return value
        return value if is_stated and self.is_held(value) else self.dtype

    def _together(self, op: NamedOp, ins: tuple[Value, ...]) -> tuple[Value, ...]:
        """What is read in one dtype, where a dtype that is stated meets others."""
        held = [v.type.dtype for v in ins if v in self.held]
        if not held:
            return ins
        others = (v for v in ins if v not in self.held and v not in self.literals)
        meets = any(v.type.dtype == self.dtype for v in others)
        dtype = self.dtype if meets else max(held, key=lambda d: d.bytes)
        return tuple(
            self._literal(v, dtype)
            if v in self.literals
            else self.cast(v, dtype, op)
            if v in self.held
            else v
            for v in ins
        )

    def _literal(self, value: Value, dtype: DType) -> Value:
        """A number in a dtype, not rounded to another one before."""
        if value.type.dtype.kind != "float" or value.type.dtype == dtype:
            return value
        if (value, dtype) not in self.casts:
            new = value.alike(type=TensorType(value.type.dims, dtype))
            self.casts[value, dtype] = new
            attrs = tuple((k, dtype if k == "dtype" else v) for k, v in self.literals[value].attrs)
            self.added.append(replace(self.literals[value], outs=(new,), attrs=attrs))
            self.literals[new] = self.added[-1]
        return self.casts[value, dtype]
