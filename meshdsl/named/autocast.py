"""Mixed precision: products in a narrow dtype, sums and losses in f32 (Micikevicius et al. 2018).

Which operators stay wide follows torch's autocast lists.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

from meshdsl.ir.program import Carry
from meshdsl.ir.rewrite import Rebuild
from meshdsl.ir.types import F32, DType, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Update, Value
from meshdsl.ops.opdef import lookup


def mixed(program: NamedProgram, compute: DType, narrow: Container[Value]) -> NamedProgram:
    """The program with the parameters that are `narrow`, and products, in `compute`.

    Inputs, losses, all other parameters, the states that the program assigns and parameters whose
    declarations state a dtype keep theirs.
    """
    rebuild = _Mixed(compute)
    for param in program.params:
        if param.value in narrow and not param.typed:
            rebuild.typed(param.value, compute)
    body = rebuild.nodes(program.body)
    updates = tuple(rebuild.update(u) for u in program.updates)
    result = program.rebuilt((*body, *rebuild.taken()), rebuild.value)
    return replace(result, updates=updates)


class _Mixed(Rebuild):
    """`casts` are those of this block and the blocks around it; `added`, those to come next."""

    def __init__(self, compute: DType) -> None:
        super().__init__()
        self.compute = compute
        self.casts: dict[tuple[Value, DType], Value] = {}
        self.added: list[NamedOp] = []

    def taken(self) -> list[NamedOp]:
        """The casts that have been added: they come before what reads them."""
        added, self.added = self.added, []
        return added

    def update(self, update: Update) -> Update:
        """An update of a state, which keeps its dtype."""
        new = self.value(update.new)
        at = NamedOp("cast", (), (), (), new.span)
        return replace(update, new=self.cast(new, update.old.type.dtype, at))

    def typed(self, value: Value, dtype: DType) -> Value:
        """The value that has a dtype in place of one."""
        typed = self.new[value] = replace(value, type=TensorType(value.type.dims, dtype))
        return typed

    def nodes(self, nodes: Iterable[Node]) -> tuple[Any, ...]:
        casts = dict(self.casts)
        block = super().nodes(nodes)
        self.casts = casts
        return block

    def op(self, op: NamedOp) -> tuple[NamedOp, ...]:
        ins: tuple[Value, ...] = tuple(map(self.value, op.ins))
        floats = [v.type.dtype for v in ins if v.type.dtype.kind == "float"]
        if floats and op.name != "cast":
            dtype = self._dtype(op, floats)
            ins = tuple(self.cast(v, dtype, op) for v in ins)
        types = lookup(op.name).infer(tuple(v.type for v in ins), dict(op.attrs))
        outs = tuple(self.typed(v, t.dtype) for v, t in zip(op.outs, types, strict=True))
        origin = op.origin and op.origin.on(self.value)
        return (*self.taken(), replace(op, ins=ins, outs=outs, origin=origin))

    def _dtype(self, op: NamedOp, floats: list[DType]) -> DType:
        precision = lookup(op.name).precision
        if precision == "compute":
            return self.compute
        widest = max(floats, key=lambda d: d.bytes)
        return max(widest, F32, key=lambda d: d.bytes) if precision == "f32" else widest

    def cast(self, value: Value, dtype: DType, at: NamedOp | NamedLoop) -> Value:
        """A float in a dtype: the value, or a cast of it for the node `at`."""
        if value.type.dtype.kind != "float" or value.type.dtype == dtype:
            return value
        if (value, dtype) not in self.casts:
            type_ = TensorType(value.type.dims, dtype)
            result = value.alike(type=type_)
            self.casts[value, dtype] = result
            tags = at.phase, at.block, at.origin and at.origin.on(self.value)
            attrs = (("dtype", dtype),)
            self.added.append(NamedOp("cast", (value,), (result,), attrs, at.span, *tags))
        return self.casts[value, dtype]

    def loop(self, loop: NamedLoop) -> tuple[NamedLoop]:
        """The loop; carries keep the dtype of their initial value."""
        for inside, outer in self._entered(loop):
            self.typed(inside, self.value(outer).type.dtype)
        body, casts = self.nodes(loop.body), dict(self.casts)
        carries = tuple(self._carry(c, loop) for c in loop.carries)
        body, self.casts = (*body, *self.taken()), casts
        for item in loop.collected:
            self.typed(item.outer, self.value(item.inside).type.dtype)
        return (replace(self.on_new(loop, body=body), carries=carries),)

    def _entered(self, loop: NamedLoop) -> Iterable[tuple[Value, Value]]:
        yield from ((s.inside, s.outer) for s in loop.stacked)
        yield from ((c.inside, c.init) for c in loop.carries)

    def _carry(self, carry: Carry[Value], loop: NamedLoop) -> Carry[Value]:
        dtype = self.value(carry.inside).type.dtype
        next_ = self.cast(self.value(carry.next), dtype, loop)
        self.typed(carry.result, dtype)
        return replace(carry.on(self.value), next=next_)
