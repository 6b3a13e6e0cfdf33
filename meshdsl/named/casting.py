"""What passes share that change the dtypes of a program: casts where two of them meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshdsl.ir.program import Carry
from meshdsl.ir.rewrite import Rebuild
from meshdsl.ir.types import DType, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, Node, Update, Value


class Casting(Rebuild):
    """`casts` are those of this block and the blocks around it; `added`, those to come next."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[tuple[Value, DType], Value] = {}
        self.added: list[NamedOp] = []

    def taken(self) -> list[NamedOp]:
        """The casts that have been added: they come before what reads them."""
        added, self.added = self.added, []
        return added

    def update(self, update: Update) -> Update:
        """An update of a state, which keeps its dtype."""
        new, old = self.value(update.new), self.value(update.old)
        at = NamedOp("cast", (), (), (), new.span)
        return replace(update, new=self.cast(new, old.type.dtype, at), old=old)

    def typed(self, value: Value, dtype: DType) -> Value:
        """The value that has a dtype in place of one."""
        typed = self.new[value] = replace(value, type=TensorType(value.type.dims, dtype))
        return typed

    def like(self, value: Value, other: Value) -> None:
        """Give a value the new dtype of another."""
        self.typed(value, self.value(other).type.dtype)

    def nodes(self, nodes: Iterable[Node]) -> tuple[Any, ...]:
        """A block, whose casts those after it do not read."""
        casts = dict(self.casts)
        block = super().nodes(nodes)
        self.casts = casts
        return block

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
            self.like(inside, outer)
        body, casts = self.nodes(loop.body), dict(self.casts)
        carries = tuple(self._carry(c, loop) for c in loop.carries)
        body, self.casts = (*body, *self.taken()), casts
        for item in loop.collected:
            self.like(item.outer, item.inside)
        return (replace(self.on_new(loop, body=body), carries=carries),)

    def _entered(self, loop: NamedLoop) -> Iterable[tuple[Value, Value]]:
        yield from ((s.inside, s.outer) for s in loop.stacked)
        yield from ((c.inside, c.init) for c in loop.carries)

    def _carry(self, carry: Carry[Value], loop: NamedLoop) -> Carry[Value]:
        dtype = self.value(carry.inside).type.dtype
        next_ = self.cast(self.value(carry.next), dtype, loop)
        self.like(carry.result, carry.inside)
        return replace(carry.on(self.value), next=next_)
