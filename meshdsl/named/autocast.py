"""Mixed precision: products in a narrow dtype, sums and losses in f32 (Micikevicius et al. 2018).

Which operators stay wide follows torch's autocast lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshdsl.ir.program import Carry, Collected, Stacked
from meshdsl.ir.types import F32, DType, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Update, Value
from meshdsl.ops.opdef import lookup


def mixed(program: NamedProgram, compute: DType) -> NamedProgram:
    """The program with parameters and products in `compute`.

    Inputs, losses, the states that the program assigns and parameters whose declarations state a
    dtype keep theirs.
    """
    return _Mixed(compute).program(program)


@dataclass(slots=True)
class _Mixed:
    compute: DType
    made: dict[Value, Value] = field(default_factory=dict)
    casts: dict[tuple[Value, DType], Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def program(self, program: NamedProgram) -> NamedProgram:
        learned = {*program.learned}
        params = tuple(
            replace(p, value=self._new(p.value, self.compute))
            if p.value in learned and not p.typed
            else p
            for p in program.params
        )
        body = self._block(program.body)
        self.nodes = []
        updates = tuple(self._update(u) for u in program.updates)
        body = (*body, *self.nodes)
        outputs = tuple(replace(o, value=self.of(o.value)) for o in program.outputs)
        goal = program.goal and replace(program.goal, loss=self.of(program.goal.loss))
        result = replace(program, params=params, body=body, outputs=outputs, goal=goal)
        return replace(result, updates=updates)

    def of(self, value: Value) -> Value:
        """The new value of a value of the program."""
        return self.made.get(value, value)

    def _update(self, update: Update) -> Update:
        """An update of a state, which keeps its dtype."""
        new, dtype = self.of(update.new), update.old.type.dtype
        return replace(update, new=self._cast(new, dtype, NamedOp("cast", (), (), (), new.span)))

    def _new(self, value: Value, dtype: DType) -> Value:
        made = replace(value, type=TensorType(value.type.dims, dtype))
        self.made[value] = made
        return made

    def _block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        outside, self.nodes = self.nodes, []
        casts = dict(self.casts)
        for node in nodes:
            if isinstance(node, NamedLoop):
                self._loop(node)
            else:
                self._op(node)
        cast_nodes, self.nodes, self.casts = tuple(self.nodes), outside, casts
        return cast_nodes

    def _op(self, op: NamedOp) -> None:
        ins = tuple(self.of(v) for v in op.ins)
        floats = [v.type.dtype for v in ins if v.type.dtype.kind == "float"]
        if floats and op.name != "cast":
            dtype = self._dtype(op, floats)
            ins = tuple(self._cast(v, dtype, op) for v in ins)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(op.attrs))
        outs = tuple(self._new(v, t.dtype) for v, t in zip(op.outs, types, strict=True))
        origin = op.origin and op.origin.on(self.of)
        self.nodes.append(replace(op, ins=ins, outs=outs, origin=origin))

    def _dtype(self, op: NamedOp, floats: list[DType]) -> DType:
        precision = lookup(op.name).precision
        if precision == "compute":
            return self.compute
        widest = max(floats, key=lambda d: d.bytes)
        return max(widest, F32, key=lambda d: d.bytes) if precision == "f32" else widest

    def _cast(self, value: Value, dtype: DType, op: NamedOp) -> Value:
        if value.type.dtype.kind != "float" or value.type.dtype == dtype:
            return value
        if (value, dtype) not in self.casts:
            type_ = TensorType(value.type.dims, dtype)
            result = replace(value, type=type_, role="activation", follows=value.follows or value)
            self.casts[value, dtype] = result
            attrs = (("dtype", dtype),)
            tags = op.phase, op.block, op.origin and op.origin.on(self.of)
            self.nodes.append(NamedOp("cast", (value,), (result,), attrs, op.span, *tags))
        return self.casts[value, dtype]

    def _loop(self, loop: NamedLoop) -> None:
        """Rebuild a loop; carries keep the dtype of their initial value."""
        for item in loop.stacked:
            self._new(item.inside, self.of(item.outer).type.dtype)
        for carry in loop.carries:
            self._new(carry.inside, self.of(carry.init).type.dtype)
        outside, casts = self.nodes, dict(self.casts)
        body = list(self._block(loop.body))
        self.nodes = body
        carries = tuple(self._carry(c, loop) for c in loop.carries)
        self.nodes, self.casts = outside, casts
        stacked = tuple(Stacked(self.of(s.outer), self.of(s.inside)) for s in loop.stacked)
        collected = tuple(self._collected(c) for c in loop.collected)
        made = replace(loop, carries=carries, stacked=stacked, collected=collected)
        origin = loop.origin and loop.origin.on(self.of)
        self.nodes.append(replace(made, body=tuple(body), origin=origin))

    def _carry(self, carry: Carry[Value], loop: NamedLoop) -> Carry[Value]:
        inside, next_ = self.of(carry.inside), self.of(carry.next)
        dtype = inside.type.dtype
        if next_.type.dtype != dtype:
            next_ = self._cast(
                next_,
                dtype,
                NamedOp("cast", (), (), (), loop.span, loop.phase, loop.block, loop.origin),
            )
        return Carry(self.of(carry.init), inside, next_, self._new(carry.result, dtype))

    def _collected(self, made: Collected[Value]) -> Collected[Value]:
        inside = self.of(made.inside)
        return Collected(inside, self._new(made.outer, inside.type.dtype))
