"""The least that any plan of a layout sends, found by trying them all: an oracle for `optimal`.

It knows nothing of the program that it checks but the operators of the named program, their types
and the rules `dim -> axis`. A plan gives every operator a row along each axis, and every value a
placement that it settles in; what readers need otherwise is made of that, once. A dynamic program
goes through the operators in order, and keeps the least for each state of the values that are still
read.

Rows and collectives are stated here once more.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshdsl.named.ir import NamedOp, NamedProgram, Value, walk

At = tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[str, ...]]
"""A placement: the axes of each split dim, outer first, and the axes over which it is partial."""

Part = str
"""What a tensor is along an axis: a dim, `PARTIAL` or `COPY`."""

PARTIAL, COPY = "+", "="

Row = tuple[tuple[Part, ...], Part]
"""The parts of the operands, and that of the result."""

JOINT = ("add", "sub")
EACH = ("neg", "identity", "cast", "transpose", "rename", "broadcast", "sum", "mean")
PRODUCTS = ("mul", "einsum")
FIRST = ("div", "relu_grad")
OTHERS = ("relu", "square", "constant", "zeros")
"""Operators that take all operands partial, their only one, one of them, the first, or none."""


# --- what is sent --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wires:
    """What a device of a mesh sends from one placement of a tensor to another."""

    mesh: tuple[tuple[str, int], ...]

    def ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(dict(self.mesh)[axis] for axis in axes)

    @functools.cache  # noqa: B019
    def least(self, dims: tuple[tuple[str, int], ...], size: int, start: At) -> Mapping[At, int]:
        """The fewest bytes to every placement that can be reached, of `size` bytes in all."""
        far, queue = {start: 0}, [(0, start)]
        while queue:
            cost, here = heapq.heappop(queue)
            if cost > far[here]:
                continue
            for sent, there in self._steps(dict(dims), size, here):
                if cost + sent < far.get(there, cost + sent + 1):
                    far[there] = cost + sent
                    heapq.heappush(queue, (cost + sent, there))
        return far

    def _steps(self, dims: dict[str, int], size: int, here: At) -> Iterator[tuple[int, At]]:
        splits, partial = dict(here[0]), here[1]
        block = size // self.ways(tuple(a for axes in splits.values() for a in axes))
        every = tuple(axis for axis, _ in self.mesh)
        for count in range(1, len(every) + 1):
            for axes in itertools.combinations(every, count):
                yield from self._collective(dims, block, here, axes)
        for axis in every:
            if axis not in partial and not any(axis in over for over in splits.values()):
                yield 0, at(splits, (*partial, axis))
                for dim in self._fitting(dims, splits, (axis,)):
                    yield 0, at({**splits, dim: (*splits.get(dim, ()), axis)}, partial)
        for dim, over in splits.items():
            yield 0, at({**splits, dim: over[:-1]}, (*partial, over[-1]))
        for one, other in itertools.combinations(every, 2):
            swap = {one: other, other: one}
            turned = {d: tuple(swap.get(a, a) for a in over) for d, over in splits.items()}
            if not {one, other} & set(partial) and self.ways((one,)) == self.ways((other,)):
                yield block, at(turned, partial)

    def _collective(
        self, dims: dict[str, int], block: int, here: At, axes: tuple[str, ...]
    ) -> Iterator[tuple[int, At]]:
        """Reductions, gathers and exchanges over some axes together, by rings."""
        splits, partial, ways = dict(here[0]), here[1], self.ways(axes)
        share = -(-(ways - 1) * block // ways)
        if set(axes) <= set(partial):
            left = tuple(a for a in partial if a not in axes)
            yield -(-2 * (ways - 1) * block // ways), at(splits, left)
            for dim in self._fitting(dims, splits, axes):
                yield share, at({**splits, dim: (*splits.get(dim, ()), *axes)}, left)
        for dim, over in splits.items():
            if over[-len(axes) :] != axes:
                continue
            less = {**splits, dim: over[: -len(axes)]}
            yield (ways - 1) * block, at(less, partial)
            for other in self._fitting(dims, less, axes):
                if other != dim:
                    yield share, at({**less, other: (*less.get(other, ()), *axes)}, partial)

    def _fitting(
        self, dims: dict[str, int], splits: Mapping[str, tuple[str, ...]], axes: tuple[str, ...]
    ) -> list[str]:
        return [d for d, n in dims.items() if n % self.ways((*splits.get(d, ()), *axes)) == 0]


def at(splits: Mapping[str, tuple[str, ...]], partial: tuple[str, ...]) -> At:
    return tuple(sorted((d, axes) for d, axes in splits.items() if axes)), tuple(sorted(partial))


def part(placed: At, axis: str) -> Part:
    dims = (dim for dim, axes in placed[0] if axis in axes)
    return next(dims, PARTIAL if axis in placed[1] else COPY)


def joined(parts: Mapping[str, Part]) -> At:
    splits: dict[str, tuple[str, ...]] = {}
    for axis, kind in parts.items():
        if kind not in (PARTIAL, COPY):
            splits[kind] = (*splits.get(kind, ()), axis)
    return at(splits, tuple(axis for axis, kind in parts.items() if kind == PARTIAL))


# --- what operators may do -----------------------------------------------------------------------


def rows(op: NamedOp) -> list[Row]:
    """The rows of an operator along one axis."""
    names = [list(v.type.names) for v in op.ins]
    result = list(op.out.type.names)
    back = {new: old for old, new in dict(op.attrs).get("pairs", ())}
    found: list[Row] = [((COPY,) * len(names), COPY)]
    for dim in dict.fromkeys([*result, *(d for ds in names for d in ds)]):
        if dim in result:
            old = back.get(dim, dim)
            found.append((tuple(old if old in ds else COPY for ds in names), dim))
        elif op.name in ("sum", "mean", "einsum"):
            found.append((tuple(dim if dim in ds else COPY for ds in names), PARTIAL))
    if op.name in JOINT:
        found.append(((PARTIAL,) * len(names), PARTIAL))
    elif op.name in (*EACH, *PRODUCTS, *FIRST):
        count = len(names) if op.name in PRODUCTS else 1
        for index in range(count):
            ins = tuple(PARTIAL if i == index else COPY for i in range(len(names)))
            found.append((ins, PARTIAL))
    else:
        assert op.name in OTHERS, op.name
    return found


def allowed(op: NamedOp, rules: Mapping[str, str], axis: str) -> list[tuple[Row, bool]]:
    """The rows of an operator that a plan of a layout may take along an axis.

    Those that split every operand and the result as rules do, where there are such: a ruled operand
    may also be partial, and a ruled result partial, or whole where no operand is ruled. Beside them
    whole operands are allowed where every row leaves a large result to be reduced, and rows for
    operands that have been left otherwise than ruled: of these the flag is true.

    A product that computes much takes nothing otherwise than ruled, nor anything whole, and keeps
    at least the splits of its result where rules contradict each other.
    """
    every = rows(op)
    asked = [ruled(v, rules, axis) for v in op.ins]
    want = ruled(op.out, rules, axis)
    suiting = [r for r in every if want is None or r[1] in (want, PARTIAL, COPY)]
    if not any(asked):
        return [(row, False) for row in suiting or every]
    light = is_light(op)
    keeping = [r for r in suiting if _keeps(r, asked, ())]
    others = [r for r in every if light and r not in keeping]
    passing = [
        r
        for r in others
        if _keeps(r, asked, (PARTIAL, *op.out.type.names)) and _is_linear(every, r, asked)
    ]
    if not keeping:
        keeping = every if light or not suiting else suiting
    elif light and _spares(op, keeping):
        keeping.append(every[0])
    return [*((row, False) for row in keeping), *((row, True) for row in passing)]


def _keeps(row: Row, asked: list[str | None], others: tuple[Part, ...]) -> bool:
    return all(a is None or i in (a, *others) for i, a in zip(row[0], asked, strict=True))


def _is_linear(every: list[Row], row: Row, asked: list[str | None]) -> bool:
    """Whether an operator is linear in the operands that a row takes otherwise than ruled."""
    taken = [i for i, (part, a) in enumerate(zip(row[0], asked, strict=True)) if a and part != a]
    return any(all(ins[i] == PARTIAL for i in taken) for ins, _ in every)


def _spares(op: NamedOp, keeping: list[Row]) -> bool:
    """Whether gathering what is split sends less than reducing what every row leaves partial."""
    gathered = [
        sum(v.type.bytes for v, i in zip(op.ins, ins, strict=True) if i != COPY)
        for ins, _ in keeping
        if PARTIAL not in ins
    ]
    reduced = 2 * op.out.type.bytes
    return all(out == PARTIAL for _, out in keeping) and min(gathered, default=reduced) < reduced


def is_light(op: NamedOp) -> bool:
    """Whether an operator computes at most eight times for each number that it reads or writes."""
    tensors = (*op.ins, op.out)
    loops = {d.name: d.size for v in tensors for d in v.type.dims}
    moved = sum(v.type.elements for v in tensors)
    return op.name != "einsum" or 2 * math.prod(loops.values()) <= 8 * moved


def ruled(value: Value, rules: Mapping[str, str], axis: str) -> str | None:
    """The dim of a value that rules split over an axis."""
    return next((d for d in value.type.names if rules.get(d) == axis), None)


def merge_equal(program: NamedProgram) -> tuple[list[NamedOp], dict[Value, Value]]:
    """The operators of a program, the first of equal ones, and the result that each other has."""
    kept: dict[tuple[object, ...], NamedOp] = {}
    merged: dict[Value, Value] = {}
    for op in walk(program.body):
        ins = tuple(merged.get(v, v) for v in op.ins)
        first = kept.setdefault((op.name, ins, op.attrs, op.out.type), replace(op, ins=ins))
        if first.out is not op.out:
            merged[op.out] = first.out
    return list(kept.values()), merged


# --- the least -----------------------------------------------------------------------------------

Live = tuple[At, frozenset[At]]
"""Where a value has settled, and in which placements it has been read."""

State = tuple[tuple[int, Live], ...]


class EveryPlan:
    """All plans of a program under rules, of which none may send more than `most` bytes."""

    def __init__(
        self, program: NamedProgram, rules: Mapping[str, str], mesh: Mapping[str, int], most: int
    ) -> None:
        self.program, self.rules, self.most = program, rules, most
        self.ops, merged = merge_equal(program)
        entering = [*program.inputs, *(p.value for p in program.params)]
        values = [*entering, *(op.out for op in self.ops)]
        # An axis that no rule names does nothing.
        self.mesh = tuple(
            (a, n) for a, n in mesh.items() if any(ruled(v, rules, a) for v in values)
        )
        self.wires = Wires(self.mesh)
        self.numbers = {v: i for i, v in enumerate(entering)}
        for op in self.ops:
            self.numbers[op.out] = len(self.numbers)
        self.types = {n: v for v, n in self.numbers.items()}
        self.last = {v: i for i, op in enumerate(self.ops) for v in op.ins}
        self.outputs = {merged.get(o.value, o.value) for o in program.outputs}
        self.entering = entering

    def least(self) -> int | None:
        """The fewest bytes; None where every plan sends more than `most`."""
        start = {self.numbers[v]: (self._settled(v), frozenset[At]()) for v in self.entering}
        states: dict[State, int] = {tuple(sorted(start.items())): 0}
        for index, op in enumerate(self.ops):
            after: dict[State, int] = {}
            for state, cost in states.items():
                for there, sent in self._taken(index, op, dict(state)):
                    if cost + sent <= self.most and cost + sent < after.get(there, self.most + 1):
                        after[there] = cost + sent
            states = after
        ends = [cost + self._ended(dict(state)) for state, cost in states.items()]
        return min((int(cost) for cost in ends if cost <= self.most), default=None)

    def _taken(
        self, index: int, op: NamedOp, state: dict[int, Live]
    ) -> Iterator[tuple[State, int]]:
        for needs, yielded, passing in self._combined(op):
            settled = [state[self.numbers[v]][0] for v in op.ins]
            triples = zip(op.ins, settled, needs, strict=True)
            if not all(self._may_read(v, here, need, passing) for v, here, need in triples):
                continue
            read = dict(state)
            for value, need in zip(op.ins, needs, strict=True):
                here, seen = read[self.numbers[value]]
                read[self.numbers[value]] = here, seen | {need}
            ending = {n: live for n, live in read.items() if self._ends(n, index)}
            sent = sum(self._versions(self.types[n], live) for n, live in ending.items())
            live_on = {n: live for n, live in read.items() if n not in ending}
            for target in self._settling(op.out, yielded):
                way = sent + self._sent(op.out, yielded, target)
                if way < math.inf:
                    after = {**live_on, self.numbers[op.out]: (target, frozenset[At]())}
                    yield tuple(sorted(after.items())), int(way)

    def _ends(self, number: int, index: int) -> bool:
        """Whether nobody reads a value after an operator."""
        value = self.types[number]
        return self.last.get(value, -1) <= index and value not in self.outputs

    def _combined(self, op: NamedOp) -> Iterator[tuple[tuple[At, ...], At, frozenset[str]]]:
        """The placements of operands and result of each combination of rows.

        And the axes along which operands have to have been left so.
        """
        options = [allowed(op, self.rules, axis) for axis, _ in self.mesh]
        axes = [axis for axis, _ in self.mesh]
        for picked in itertools.product(*options):
            by_axis = dict(zip(axes, picked, strict=True))
            ins = tuple(
                joined({a: row[0][i] for a, (row, _) in by_axis.items()})
                for i in range(len(op.ins))
            )
            out = joined({a: row[1] for a, (row, _) in by_axis.items()})
            if all(map(self._divides, (*op.ins, op.out), (*ins, out))):
                yield ins, out, frozenset(a for a, (_, passing) in by_axis.items() if passing)

    def _divides(self, value: Value, placed: At) -> bool:
        return all(value.type.size(d) % self.wires.ways(axes) == 0 for d, axes in placed[0])

    def _settled(self, value: Value) -> At:
        """Where rules have a value that enters or is returned."""
        asked = {a: ruled(value, self.rules, a) or COPY for a, _ in self.mesh}
        return joined(asked)

    def _settling(self, value: Value, yielded: At) -> Iterator[At]:
        """Where a result may settle: as rules say, or as it is yielded; else anywhere."""
        if value in self.outputs:
            yield self._settled(value)
            return
        options = []
        for axis, _ in self.mesh:
            dim, left = ruled(value, self.rules, axis), part(yielded, axis)
            free = [COPY, PARTIAL, *value.type.names]
            options.append([dim, *{left} - {dim, COPY}] if dim else free)
        for picked in itertools.product(*options):
            placed = joined({a: k for (a, _), k in zip(self.mesh, picked, strict=True)})
            if self._divides(value, placed):
                yield placed

    def _may_read(self, value: Value, settled: At, need: At, passing: frozenset[str]) -> bool:
        """What is left otherwise than rules demand is read so, or as they say."""
        for axis, _ in self.mesh:
            dim = ruled(value, self.rules, axis)
            here, there = part(settled, axis), part(need, axis)
            if dim is None or there == dim:
                continue
            if axis in passing:
                if there not in (here, PARTIAL) or (here != dim and there != here):
                    return False
            elif here != dim:
                return False
        return True

    def _sent(self, value: Value, source: At, target: At) -> float:
        dims = tuple((d.name, d.size) for d in value.type.dims)
        return self.wires.least(dims, value.type.bytes, source).get(target, math.inf)

    def _versions(self, value: Value, live: Live) -> float:
        """The bytes of all versions of a value, each made of what it settled in or of others."""
        settled, needs = live
        others = sorted(needs - {settled})
        makers = [[settled, *(o for o in others if o != need)] for need in others]
        least = math.inf
        for picked in itertools.product(*makers):
            made_of = dict(zip(others, picked, strict=True))
            if all(_is_made(need, made_of, settled) for need in others):
                sent = (self._sent(value, made_of[need], need) for need in others)
                least = min(least, sum(sent))
        return least

    def _ended(self, state: dict[int, Live]) -> float:
        return sum(self._versions(self.types[n], live) for n, live in state.items())


def _is_made(need: At, made_of: Mapping[At, At], settled: At) -> bool:
    """Whether a version is made of what there is at the beginning, in the end."""
    for _ in made_of:
        need = made_of.get(need, settled)
    return need == settled
