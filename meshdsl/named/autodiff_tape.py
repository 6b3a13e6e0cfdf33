"""What the blocks of one backward pass share."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.named.autodiff_call import Emitter, source
from meshdsl.named.builder import Builder
from meshdsl.named.ir import Collected, Node, Repeat, TensorType, Value


class Tape:
    """What the blocks of one backward pass share."""

    def __init__(self, builder: Builder, active: set[Value], wrt: frozenset[Value]) -> None:
        self.builder, self.active, self.wrt = builder, active, wrt
        self.numbers: dict[Value, float] = {}
        self.collected: dict[Repeat, dict[Value, Value]] = {}
        self.twins: dict[Repeat, Repeat] = {}
        self.again: dict[Value, Value] = {}

    def emitter(self, at: Value, follows: Value | None = None) -> Emitter:
        """Emits for the gradient of `at`, at its place in the source."""
        return Emitter(self.builder, self.numbers, at, follows)

    def collect(self, loop: Repeat, value: Value, depth: int) -> Value:
        """All iterations' `value` of a forward loop, as a tensor outside it, `depth` loops deep."""
        known = self.collected.setdefault(self.twins.get(loop, loop), {})
        if value not in known:
            type_ = TensorType((loop.dim, *value.type.dims), value.type.dtype)
            known[value] = replace(value, type=type_, role="activation", follows=source(value))
            self.builder.place(known[value], depth)
        return known[value]

    def with_collected(self, nodes: tuple[Node, ...]) -> list[Node]:
        """`nodes` with the loops collecting what has been asked for."""
        return [self._collecting(n) if isinstance(n, Repeat) else n for n in nodes]

    def _collecting(self, loop: Repeat) -> Repeat:
        more = tuple(Collected(a, b) for a, b in self.collected.get(loop, {}).items())
        body = tuple(self.with_collected(loop.body))
        return replace(loop, body=body, collected=(*loop.collected, *more))
