"""Legal placements of an operator along one mesh axis, derived from its factors."""

from __future__ import annotations

from dataclasses import dataclass

from meshdsl.ops.opdef import Factor, Factors, ReduceOp
from meshdsl.placed.sbp import B, Component, Partial, Split


@dataclass(frozen=True, slots=True)
class Row:
    """One legal row: what each operand and each output is along an axis.

    `factor` is the loop that is split, None for the others.
    """

    ins: tuple[Component, ...]
    outs: tuple[Component, ...]
    factor: Factor | None = None

    def __str__(self) -> str:
        left = ", ".join(str(c) for c in self.ins)
        return f"{left} -> {', '.join(str(c) for c in self.outs)}"


def rows(factors: Factors, ins: int, outs: int) -> tuple[Row, ...]:
    """Every legal row of an operator with that many operands and outputs, the all-`B` row first."""
    found = [Row((B,) * ins, (B,) * outs)]
    found += [_split_row(f) for f in factors.loops]
    found += [_partial_row(group, "sum", ins, outs) for group in factors.linear]
    extremes: tuple[ReduceOp, ...] = ("max", "min")
    for operand in factors.monotone:
        found += [_partial_row(frozenset({operand}), op, ins, outs) for op in extremes]
    return tuple(dict.fromkeys(found))


def _split_row(factor: Factor) -> Row:
    ins = tuple(Split(d) if d else B for d in factor.ins)
    if factor.reduce is None:
        return Row(ins, tuple(Split(d) if d else B for d in factor.outs), factor)
    return Row(ins, tuple(Partial(factor.reduce) for _ in factor.outs), factor)


def _partial_row(group: frozenset[int], op: ReduceOp, ins: int, outs: int) -> Row:
    part = Partial(op)
    return Row(tuple(part if i in group else B for i in range(ins)), (part,) * outs)
