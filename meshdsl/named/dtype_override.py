"""`--dtype`: the same program with every float of another type.

Which results of an operator stay wider than its operands, as the logarithms of sums of attention
do, its own shape rule says: a program whose gradients are already written out is typed as one that
was written in the type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshdsl.ir.rewrite import Rebuild
from meshdsl.ir.types import DType, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Value
from meshdsl.ops.opdef import lookup


def retype(program: NamedProgram, dtype: DType) -> NamedProgram:
    """Change every float tensor, literal and cast to `dtype`; integers and bools stay.

    Results of operators have the types that their shape rules give them.
    """
    retyped = _Retype(dtype)
    body = retyped.nodes(program.body)
    rebuilt = program.rebuilt(body, retyped.value)
    return replace(rebuilt, goal=rebuilt.goal and rebuilt.goal.without_mixed())


class _Retype(Rebuild):
    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self.dtype = dtype

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

    def like(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        """Give the first value of each pair the new dtype of the second."""
        for value, other in pairs:
            self.typed(value, self.value(other).type.dtype)

    def op(self, op: NamedOp) -> tuple[NamedOp]:
        ins = tuple(self.value(v) for v in op.ins)
        attrs = tuple((k, self.attr(v)) for k, v in op.attrs)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(attrs))
        for value, type_ in zip(op.outs, types, strict=True):
            self.typed(value, type_.dtype)
        return (self.on_new(op, attrs=attrs),)

    def attr(self, value: object) -> object:
        return self.dtype if isinstance(value, DType) and value.kind == "float" else value

    def enter(self, loop: NamedLoop) -> None:
        self.like((s.inside, s.outer) for s in loop.stacked)
        self.like((c.inside, c.init) for c in loop.carries)

    def leave(self, loop: NamedLoop) -> tuple[()]:
        # Values that leave the loop have the types that those of its body have by now.
        self.like((c.outer, c.inside) for c in loop.collected)
        self.like((c.result, c.inside) for c in loop.carries)
        return ()
