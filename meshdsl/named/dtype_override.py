"""`--dtype`: the same program with every float of another type.

Which results of an operator stay wider than its operands, as the logarithms of sums of attention
do, its own shape rule says: a program whose gradients are already written out is typed as one that
was written in the type.
"""

from __future__ import annotations

from dataclasses import replace

from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.ir.types import DType, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Output, Update, Value
from meshdsl.ops.opdef import lookup


def retype(program: NamedProgram, dtype: DType) -> NamedProgram:
    """Change every float tensor, literal and cast to `dtype`; integers and bools stay.

    Results of operators have the types that their shape rules give them.
    """
    return _Retype(dtype).program(program)


class _Retype:
    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.made: dict[Value, Value] = {}

    def program(self, program: NamedProgram) -> NamedProgram:
        inputs = tuple(self.value(v) for v in program.inputs)
        params = tuple(replace(p, value=self.value(p.value)) for p in program.params)
        body = self.nodes(program.body)
        outputs = tuple(Output(o.name, self.value(o.value), o.span) for o in program.outputs)
        goal = program.goal and program.goal.without_mixed()
        goal = goal and replace(goal, loss=self.value(goal.loss))
        new_program = replace(program, inputs=inputs, params=params, body=body, outputs=outputs)
        updates = tuple(Update(self.value(u.old), self.value(u.new)) for u in program.updates)
        return replace(new_program, goal=goal, updates=updates)

    def value(self, value: Value) -> Value:
        if value not in self.made:
            is_float = value.type.dtype.kind == "float"
            dtype = self.dtype if is_float else value.type.dtype
            follows = value.follows and self.value(value.follows)
            type_ = replace(value.type, dtype=dtype)
            self.made[value] = replace(value, type=type_, follows=follows)
        return self.made[value]

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.loop(n) if isinstance(n, NamedLoop) else self.op(n) for n in nodes)

    def op(self, op: NamedOp) -> NamedOp:
        ins = tuple(self.value(v) for v in op.ins)
        attrs = tuple((k, self.attr(v)) for k, v in op.attrs)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(attrs))
        outs = tuple(self.result(v, t.dtype) for v, t in zip(op.outs, types, strict=True))
        origin = op.origin and op.origin.on(self.value)
        return replace(op, ins=ins, outs=outs, attrs=attrs, origin=origin)

    def result(self, value: Value, dtype: DType) -> Value:
        """A result of an operator, in the type that its shape rule gives it."""
        follows = value.follows and self.value(value.follows)
        type_ = TensorType(value.type.dims, dtype)
        self.made[value] = replace(value, type=type_, follows=follows)
        return self.made[value]

    def attr(self, value: object) -> object:
        return self.dtype if isinstance(value, DType) and value.kind == "float" else value

    def loop(self, loop: NamedLoop) -> NamedLoop:
        for inside, outer in (*((s.inside, s.outer) for s in loop.stacked), *_entered(loop)):
            self.result(inside, self.value(outer).type.dtype)
        body = self.nodes(loop.body)
        # Values that leave the loop have the types that those of its body have by now.
        for outer, inside in ((c.outer, c.inside) for c in loop.collected):
            self.result(outer, self.value(inside).type.dtype)
        for carry in loop.carries:
            self.result(carry.result, self.value(carry.inside).type.dtype)
        carries = tuple(
            Carry(*(self.value(v) for v in (c.init, c.inside, c.next, c.result)))
            for c in loop.carries
        )
        collected = tuple(
            Collected(self.value(c.inside), self.value(c.outer)) for c in loop.collected
        )
        stacked = tuple(Stacked(self.value(s.outer), self.value(s.inside)) for s in loop.stacked)
        made = replace(loop, stacked=stacked, carries=carries, body=body, collected=collected)
        return replace(made, origin=loop.origin and loop.origin.on(self.value))


def _entered(loop: NamedLoop) -> list[tuple[Value, Value]]:
    """The values that a loop carries, each with the one that it begins with."""
    return [(c.inside, c.init) for c in loop.carries]
