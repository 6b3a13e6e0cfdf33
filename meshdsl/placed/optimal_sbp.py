"""The fewest bytes under an `sbp` block: the search of `optimal.py`, bound by annotations."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.from_sbp import AnnotatedPlacer
from meshdsl.placed.optimal import Model
from meshdsl.placed.plan import Combination
from meshdsl.placed.sbp import Placement, placement

MOST_COMBINATIONS = 300
"""Beyond this many the search is not tried: where little is given there are too many ways."""


class AnnotatedModel(Model):
    """A tensor is just as annotated, or anything; inputs and parameters without one are whole.

    `returned` says where the outputs lie: when to reduce does not change what is returned.
    """

    most_combinations = MOST_COMBINATIONS

    def __init__(
        self, program: named.Program, placer: AnnotatedPlacer, returned: dict[Value, Placement]
    ) -> None:
        self.placer = placer
        self.layout, self.mesh = placer.layout, placer.mesh
        self.returned = returned
        self.returned_values = {o.value for o in program.outputs}
        self.slices: dict[Value, Placement] = {}
        self._slice(program.body)
        super().__init__(program, placer.layout)

    def _ruled_axes(self) -> set[str]:
        parts = [self._ruled(v) for v in _values(self.program)]
        parts += [p for op in named.walk(self.program.body) for p in self._reads(op)]
        return {a for p in parts for a in (*p.partial, *(a for _, axes in p.splits for a in axes))}

    def _arising(self) -> set[ReduceOp]:
        annotated = {p.op for p in map(self._ruled, _values(self.program)) if p.op}
        return super()._arising() | annotated

    def _slice(self, nodes: tuple[named.Node, ...]) -> None:
        """A slice of a stack is split as the stack is: positions count the dims of the stack."""
        for node in nodes:
            if isinstance(node, named.Repeat):
                for item in node.stacked:
                    loop = next(d for d in item.outer.type.names if not item.inside.type.has(d))
                    self.slices[item.inside] = self._ruled(item.outer).without_dim(loop)
                self._slice(node.body)

    def _ruled(self, value: Value) -> Placement:
        if value in self.slices:
            return self.slices[value]
        found = self.placer.annotations.of(value)
        return super()._ruled(value) if found is None else found[0]

    def _stored(self, value: Value) -> Placement:
        """What is read in parts is stored whole."""
        return self._whole(super()._stored(value))

    def _whole(self, placed: Placement) -> Placement:
        return placement(self.mesh, dict(placed.splits))

    def _reads(self, op: Op) -> tuple[Placement, ...]:
        reads = zip(self.placer.pins(op), op.ins, strict=True)
        return tuple(pin or self._ruled(value) for pin, value in reads)

    def _of(self, op: Op) -> Iterator[Combination]:
        pins = self.placer.pins(op)
        for combination in super()._of(op):
            needs = zip(pins, combination.needs, strict=True)
            if all(pin is None or pin == need for pin, need in needs):
                yield combination

    def _known(self, op: Op, axis: str) -> bool:
        reads = zip(self.placer.pins(op), op.ins, strict=True)
        return all(pin is not None or self._bound(value) for pin, value in reads)

    def _bound(self, value: Value) -> bool:
        return value in self.fixed or self.placer.annotations.of(value) is not None

    def _targets(self, value: Value, yields: list[Placement], returned: bool) -> list[Placement]:
        if returned:
            return [self.returned[value]]
        if self.placer.annotations.of(value) is not None:
            return [self._ruled(value)]
        return super()._targets(value, yields, returned)

    def _settle_carry(self, carry: named.Carry) -> None:
        super()._settle_carry(carry)
        found = self.placer.annotations.of(carry.next)
        if found is None or self.placer.annotations.of(carry.inside) is not None:
            return
        one = self.settled[carry.inside].get(found[0])
        if one is not None:
            self.lp.constrain([(one, 1)], 1, 1)

    def _returned(self, value: Value) -> Iterator[tuple[Placement, int]]:
        one = self.lp.variable()
        self.lp.constrain([(one, 1)], 1, 1)
        yield self.returned[value], one


def _values(program: named.Program) -> Iterator[Value]:
    yield from program.inputs
    yield from (p.value for p in program.params)
    yield from (v for op in named.walk(program.body) for v in op.outs)
