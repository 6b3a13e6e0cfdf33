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
from dataclasses import dataclass

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
        free = [a for a in every if a not in partial and not any(a in s for s in splits.values())]
        for count in range(1, len(every) + 1):
            for axes in itertools.combinations(every, count):
                ways = self.ways(axes)
                if set(axes) <= set(partial):
                    left = tuple(a for a in partial if a not in axes)
                    yield -(-2 * (ways - 1) * block // ways), at(splits, left)
                    for dim in self._fitting(dims, splits, axes):
                        more = {**splits, dim: (*splits.get(dim, ()), *axes)}
                        yield -(-(ways - 1) * block // ways), at(more, left)
                for dim, over in splits.items():
                    if over[-count:] != axes:
                        continue
                    less = {**splits, dim: over[:-count]}
                    yield (ways - 1) * block, at(less, partial)
                    for other in self._fitting(dims, less, axes):
                        if other != dim:
                            more = {**less, other: (*less.get(other, ()), *axes)}
                            yield -(-(ways - 1) * block // ways), at(more, partial)
        for axis in free:
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


def allowed(op: NamedOp, rules: Mapping[str, str], axis: str) -> list[Row]:
    """The rows of an operator that a plan of a layout may take along an axis.

    Those that split every operand and the result as rules do, where there are such: a ruled operand
    may also be partial, and a ruled result partial, or whole where no operand is ruled. Beside them
    whole operands are allowed where every row leaves a large result to be reduced. A product that
    computes much takes nothing partial in place of a split, nor anything whole, and keeps at least
    the splits of its result.
    """
    every = rows(op)
    asked = [ruled(v, rules, axis) for v in op.ins]
    want = ruled(op.out, rules, axis)
    suiting = [r for r in every if want is None or r[1] in (want, PARTIAL, COPY)]
    if not any(asked):
        return suiting or every
    keeping = [
        (ins, out)
        for ins, out in suiting
        if all(
            a is None or i == a or (i == PARTIAL and is_light(op))
            for i, a in zip(ins, asked, strict=True)
        )
    ]
    if not keeping:
        return every if is_light(op) or not suiting else suiting
    split = [
        [v for v, i in zip(op.ins, ins, strict=True) if i != COPY]
        for ins, _ in keeping
        if PARTIAL not in ins
    ]
    is_small = any(sum(v.type.bytes for v in vs) < 2 * op.out.type.bytes for vs in split)
    if all(out == PARTIAL for _, out in keeping) and is_small and is_light(op):
        keeping.append(every[0])
    return keeping


def is_light(op: NamedOp) -> bool:
    """Whether an operator computes at most eight times for each number that it reads or writes."""
    tensors = (*op.ins, op.out)
    loops = {d.name: d.size for v in tensors for d in v.type.dims}
    moved = sum(v.type.elements for v in tensors)
    return op.name != "einsum" or 2 * math.prod(loops.values()) <= 8 * moved


def ruled(value: Value, rules: Mapping[str, str], axis: str) -> str | None:
    """The dim of a value that rules split over an axis."""
    return next((d for d in value.type.names if rules.get(d) == axis), None)


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
        self.ops = list(walk(program.body))
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
        self.outputs = {o.value for o in program.outputs}
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
        return min((cost for cost in ends if cost <= self.most), default=None)

    def _taken(
        self, index: int, op: NamedOp, state: dict[int, Live]
    ) -> Iterator[tuple[State, int]]:
        for needs, yielded in self._combined(op):
            read = dict(state)
            possible = True
            for value, need in zip(op.ins, needs, strict=True):
                settled, seen = read[self.numbers[value]]
                possible = possible and self._may_read(value, settled, need)
                read[self.numbers[value]] = settled, seen | {need}
            if not possible:
                continue
            done, sent = {}, 0
            for number, live in read.items():
                value = self.types[number]
                if self.last.get(value, -1) <= index and value not in self.outputs:
                    sent += self._versions(value, live)
                else:
                    done[number] = live
            if math.isinf(sent):
                continue
            for settled in self._settling(op.out, yielded):
                way = self._sent(op.out, yielded, settled)
                if way < math.inf:
                    live = {**done, self.numbers[op.out]: (settled, frozenset[At]())}
                    yield tuple(sorted(live.items())), int(sent + way)

    def _combined(self, op: NamedOp) -> Iterator[tuple[tuple[At, ...], At]]:
        """The placements of operands and result of each combination of rows."""
        options = [allowed(op, self.rules, axis) for axis, _ in self.mesh]
        axes = [axis for axis, _ in self.mesh]
        seen = set()
        for picked in itertools.product(*options):
            ins = tuple(
                joined({a: row[0][i] for a, row in zip(axes, picked, strict=True)})
                for i in range(len(op.ins))
            )
            out = joined({a: row[1] for a, row in zip(axes, picked, strict=True)})
            fits = map(self._divides, (*op.ins, op.out), (*ins, out))
            if all(fits) and (ins, out) not in seen:
                seen.add((ins, out))
                yield ins, out

    def _divides(self, value: Value, placed: At) -> bool:
        return all(value.type.size(d) % self.wires.ways(axes) == 0 for d, axes in placed[0])

    def _settled(self, value: Value) -> At:
        """Where rules have a value that enters or is returned."""
        asked = {a: ruled(value, self.rules, a) or COPY for a, _ in self.mesh}
        return joined(asked)

    def _settling(self, value: Value, yielded: At) -> Iterator[At]:
        """Where a result may settle: as rules say, or partial as it is yielded; else anywhere."""
        if value in self.outputs:
            yield self._settled(value)
            return
        options = []
        for axis, _ in self.mesh:
            dim = ruled(value, self.rules, axis)
            left = part(yielded, axis) == PARTIAL
            free = [COPY, PARTIAL, *value.type.names]
            options.append([dim, *[PARTIAL] * left] if dim else free)
        for picked in itertools.product(*options):
            placed = joined({a: k for (a, _), k in zip(self.mesh, picked, strict=True)})
            if self._divides(value, placed):
                yield placed

    def _may_read(self, value: Value, settled: At, need: At) -> bool:
        """What is partial in place of a split that rules demand is read so, or as they say."""
        return all(
            part(need, axis) in (dim, PARTIAL)
            for axis in settled[1]
            if (dim := ruled(value, self.rules, axis))
        )

    def _sent(self, value: Value, source: At, target: At) -> float:
        dims = tuple((d.name, d.size) for d in value.type.dims)
        return self.wires.least(dims, value.type.bytes, source).get(target, math.inf)

    def _versions(self, value: Value, live: Live) -> float:
        """What it takes to make all versions of a value, each of what it settled in or of others."""
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
