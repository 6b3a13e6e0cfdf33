"""Legal placements of an operator along one mesh axis, derived from its factors."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any

from meshdsl.ir import program as ir
from meshdsl.ir.types import TensorType
from meshdsl.named.ir import NamedProgram, Value
from meshdsl.ops.opdef import Factor, Factors, OpDef, ReduceOp, Signature, lookup
from meshdsl.placed.collectives import halo
from meshdsl.placed.placements import B, Component, Mesh, Partial, Placement, Split, Window
from meshdsl.records import dataclass


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
    legal = [Row((B,) * ins, (B,) * outs)]
    legal += [_split_row(f) for f in factors.loops]
    legal += [_partial_row(group, "sum", ins, outs) for group in factors.linear]
    extremes: tuple[ReduceOp, ...] = ("max", "min")
    for operand in factors.monotone:
        legal += [_partial_row(frozenset({operand}), op, ins, outs) for op in extremes]
    return tuple(dict.fromkeys(legal))


def _split_row(factor: Factor) -> Row:
    ins = tuple(Split(d) if d else B for d in factor.ins)
    other = B if factor.reduce is None else Partial(factor.reduce)
    return Row(ins, tuple(Split(d) if d else other for d in factor.outs), factor)


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
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        made = hash((self.name, self.attrs, self.ins, self.outs, self.same))
        object.__setattr__(self, "_hash", made)

    def __hash__(self) -> int:
        return self._hash

    @property
    def opdef(self) -> OpDef:
        """The operator's record."""
        return lookup(self.name)

    @property
    def signature(self) -> Signature:
        """Global types and attributes."""
        return Signature(self.ins, self.outs, dict(self.attrs))


@functools.lru_cache(maxsize=1 << 13)
def call_of(op: ir.Op[Any]) -> Call:
    """`op` less its identity: equal calls are placed alike."""
    ins, outs = (tuple(v.type for v in vs) for vs in (op.ins, op.outs))
    return Call(op.name, op.attrs, ins, outs, tuple(op.ins.index(v) for v in op.ins))


@functools.lru_cache(maxsize=65536)
def legal_rows(call: Call) -> tuple[Row, ...]:
    """The rows of a call along one axis."""
    return rows(call.opdef.factors(call.signature), len(call.ins), len(call.outs))


def best_row(call: Call, have: Sequence[Component], wanted: Sequence[str | None]) -> Row | None:
    """The row for operands as they are along an axis, of which B may become anything, if any.

    The first that splits most of the `wanted` dims of the results, and changes the fewest operands.
    Rows that read windows are none.
    """
    if [*have] == [Partial("sum")] and _casts_floats(call):
        # Each addend is rounded, as where the optimizer accumulates.
        return Row(tuple(have), tuple(have))
    ranked = []
    for row in legal_rows(call):
        pairs = list(zip(have, row.ins, strict=True))
        if any(h not in (B, need) for h, need in pairs):
            continue
        if row.factor is not None and any(row.factor.reads):
            continue
        moved = sum(h != need for h, need in pairs)
        cut = sum(d is not None and c == Split(d) for d, c in zip(wanted, row.outs, strict=True))
        ranked.append(((-cut, moved), row))
    return min(ranked, key=lambda item: item[0], default=(None, None))[1]


def _casts_floats(call: Call) -> bool:
    return call.opdef.converts and {t.dtype.kind for t in (*call.ins, *call.outs)} == {"float"}


def multiplies_a_sum(row: Row) -> bool:
    """Whether a row passes a partial sum through a product (or past a condition)."""
    return row.factor is None and Partial("sum") in row.ins and B in row.ins


@functools.lru_cache(maxsize=65536)
def whole_dims(call: Call) -> tuple[frozenset[str], ...]:
    """By operand, the dims that the operator needs whole: none of its loops runs over them."""
    loops = [row.factor for row in legal_rows(call) if row.factor]
    return tuple(
        frozenset(t.names) - {loop.ins[i] for loop in loops} for i, t in enumerate(call.ins)
    )


@functools.lru_cache(maxsize=1 << 13)
def needed_whole(op: ir.Op[Any]) -> tuple[tuple[Any, frozenset[str]], ...]:
    """The operands of which an operator needs dims whole, with these."""
    return tuple((v, own) for v, own in zip(op.ins, whole_dims(call_of(op)), strict=True) if own)


@functools.lru_cache(maxsize=1 << 6)
def added_alone(program: NamedProgram) -> frozenset[Value]:
    """The results of operators that one operator of their block reads, and adds to others."""
    counts = Counter(ir.uses(program.body))
    counts.update(o.value for o in program.outputs)
    counts.update(u.new for u in program.updates)
    return frozenset(v for v in _added(program.body) if counts[v] == 1)


def _added(block: tuple[Any, ...]) -> Iterator[Value]:
    """The operands of operators that add up results of operators of their own block."""
    results: set[Value] = set()
    for node in block:
        if not isinstance(node, ir.Op):
            yield from _added(node.body)
            continue
        several = node.kind is None and len({*node.ins}) > 1 and results.issuperset(node.ins)
        if several and any(r.ins.count(Partial("sum")) > 1 for r in legal_rows(call_of(node))):
            yield from node.ins
        results.update(node.outs)


Placements = tuple[Placement, ...]


@functools.lru_cache(maxsize=65536)
def with_windows(
    call: Call, needs: Placements, yields: Placements, mesh: Mesh
) -> Placements | None:
    """The placements of the operands with the windows that split loops read of them.

    None where a loop and an operand that it has a window of are split in different orders of axes.
    """
    loops = [f for f in call.opdef.factors(call.signature).loops if any(f.reads)]
    if not loops:
        return needs
    placed = []
    for index, (type_, need) in enumerate(zip(call.ins, needs, strict=True)):
        windows = [w for loop in loops for w in _windows(call, loop, index, needs, yields)]
        if any(axes != need.axes_of(window.dim) for axes, window in windows):
            return None
        here = replace(need.plain, windows=tuple(w for _, w in windows))
        exchanged = tuple(w for w in here.windows if _is_exchanged(here, w, type_, mesh))
        if len(exchanged) > 1:
            exchanged = _least_sent(here.plain, exchanged, type_, mesh)
        placed.append(replace(here, windows=exchanged))
    return tuple(placed)


def _least_sent(
    blocks: Placement, windows: tuple[Window, ...], type_: TensorType, mesh: Mesh
) -> tuple[Window, ...]:
    """The order of exchanges in which devices send the least in all, of equals the given one.

    The exchange along one dim sends what devices have of the others at that time. A window that
    leaves out some of its block, as with a stride, makes the exchanges after it smaller.
    """

    def sent(order: tuple[Window, ...]) -> int:
        total, here = 0, blocks
        for window in order:
            step = halo(mesh, here, blocks.axes_of(window.dim), window)
            total += sum(step.by_device(type_, mesh)) if step.moves else 0
            here = step.after
        return total

    return min(itertools.permutations(windows), key=sent)


def _windows(
    call: Call, loop: Factor, index: int, needs: Placements, yields: Placements
) -> Iterator[tuple[tuple[str, ...], Window]]:
    """The window that a loop reads of an operand, with the axes that the loop is split over."""
    dim, reads = loop.ins[index], loop.reads[index]
    if dim is None or reads is None:
        return
    axes, size = _blocks(call, loop, needs, yields)
    if axes and needs[index].axes_of(dim):
        yield axes, Window(dim, call.ins[index].size(dim), reads, size)


def _blocks(
    call: Call, loop: Factor, needs: Placements, yields: Placements
) -> tuple[tuple[str, ...], int]:
    """The axes that a loop is split over, and its size: those of a dim that is its index."""
    indexed = [*zip(yields, call.outs, loop.outs, strict=True)]
    operands = zip(needs, call.ins, loop.ins, loop.reads, strict=True)
    indexed += [(placed, type_, dim) for placed, type_, dim, read in operands if read is None]
    for placed, type_, dim in indexed:
        if dim is not None:
            return placed.axes_of(dim), type_.size(dim)
    raise AssertionError(f"all that has the loop {loop.name} of {call.name} is a window of it")


def _is_exchanged(need: Placement, window: Window, type_: TensorType, mesh: Mesh) -> bool:
    """Whether a window is other than the block itself."""
    size = type_.size(window.dim)
    return need.held(window.dim, size, mesh) != need.blocks(window.dim, size, mesh)
