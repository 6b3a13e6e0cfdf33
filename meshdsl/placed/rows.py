"""Legal placements of an operator along one mesh axis, derived from its factors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Op
from meshdsl.ops.opdef import Factor, Factors, OpDef, ReduceOp, Signature, lookup
from meshdsl.placed.sbp import B, Component, Partial, Split


@dataclass(frozen=True, slots=True)
class Row:
    """One legal row: the component of each operand and each output along an axis.

    `factor` is the loop that is split, None for the others.
    """

    ins: tuple[Component, ...]
    outs: tuple[Component, ...]
    factor: Factor | None = None

    def __str__(self) -> str:
        left = ", ".join(str(c) for c in self.ins)
        return f"{left} -> {', '.join(str(c) for c in self.outs)}"


def rows(factors: Factors, ins: int, outs: int) -> tuple[Row, ...]:
    """Every legal row for that many operands and outputs, the all-`B` row first."""
    found = [Row((B,) * ins, (B,) * outs)]
    # Windows of a split dim are exchanged by no collective yet.
    found += [_split_row(f) for f in factors.loops if not any(f.reads)]
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


@dataclass(frozen=True, slots=True)
class Call:
    """All that an operator's placement depends on; `same` numbers the operands, one value once."""

    name: str
    attrs: tuple[tuple[str, Any], ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    same: tuple[int, ...]

    @property
    def opdef(self) -> OpDef:
        """The operator's record."""
        return lookup(self.name)

    @property
    def signature(self) -> Signature:
        """Global types and attributes."""
        return Signature(self.ins, self.outs, dict(self.attrs))


def call_of(op: Op) -> Call:
    """`op` less its identity: equal calls are placed alike."""
    ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
    return Call(op.name, op.attrs, ins, outs, tuple(op.ins.index(v) for v in op.ins))


@functools.lru_cache(maxsize=65536)
def legal_rows(call: Call) -> tuple[Row, ...]:
    """The rows of a call along one axis."""
    return rows(call.opdef.factors(call.signature), len(call.ins), len(call.outs))
