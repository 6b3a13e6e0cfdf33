"""`--dtype`: the same program with every float of another type."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.ir.types import DType
from meshdsl.named.ir import Loop, Node, Op, Output, Program, Update, Value


def retype(program: Program, dtype: DType) -> Program:
    """Change every float tensor, literal and cast to `dtype`; integers and bools stay."""
    return _Retype(dtype).program(program)


class _Retype:
    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.made: dict[Value, Value] = {}

    def program(self, program: Program) -> Program:
        inputs = tuple(self.value(v) for v in program.inputs)
        params = tuple(replace(p, value=self.value(p.value)) for p in program.params)
        body = self.nodes(program.body)
        outputs = tuple(Output(o.name, self.value(o.value), o.span) for o in program.outputs)
        goal = program.goal and program.goal.without_mixed()
        goal = goal and replace(goal, loss=self.value(goal.loss))
        made = replace(program, inputs=inputs, params=params, body=body, outputs=outputs)
        updates = tuple(Update(self.value(u.old), self.value(u.new)) for u in program.updates)
        return replace(made, goal=goal, updates=updates)

    def value(self, value: Value) -> Value:
        if value not in self.made:
            is_float = value.type.dtype.kind == "float"
            dtype = self.dtype if is_float else value.type.dtype
            follows = value.follows and self.value(value.follows)
            type_ = replace(value.type, dtype=dtype)
            self.made[value] = replace(value, type=type_, follows=follows)
        return self.made[value]

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.loop(n) if isinstance(n, Loop) else self.op(n) for n in nodes)

    def op(self, op: Op) -> Op:
        ins, outs = (tuple(self.value(v) for v in vs) for vs in (op.ins, op.outs))
        return replace(op, ins=ins, outs=outs, attrs=tuple((k, self.attr(v)) for k, v in op.attrs))

    def attr(self, value: object) -> object:
        return self.dtype if isinstance(value, DType) and value.kind == "float" else value

    def loop(self, loop: Loop) -> Loop:
        stacked = tuple(Stacked(self.value(s.outer), self.value(s.inside)) for s in loop.stacked)
        carries = tuple(
            Carry(*(self.value(v) for v in (c.init, c.inside, c.next, c.result)))
            for c in loop.carries
        )
        collected = tuple(
            Collected(self.value(c.inside), self.value(c.outer)) for c in loop.collected
        )
        body = self.nodes(loop.body)
        return replace(loop, stacked=stacked, carries=carries, body=body, collected=collected)
