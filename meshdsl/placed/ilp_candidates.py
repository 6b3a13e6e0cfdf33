"""The space of plans that `optimal` searches: what operators may choose, and where values settle.

Operators take the rows that keep the splits of rules, and pass on what is made otherwise where they
are linear in it (`PlanSpace._rows`). Values settle in the splits that rules demand, or stay as they
are made for such operators; on axes without a rule, they may be whole, partial or split as the
search considers it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from meshdsl.ir import program as ir
from meshdsl.ir.program import OpKind
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.ir import NamedOp, Value, loops_of
from meshdsl.ops.opdef import ReduceOp, lookup
from meshdsl.placed.pipelined import in_each_batch
from meshdsl.placed.placements import B, Component, Partial, Placement, Split, placement
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import MOST_TOGETHER, Price, Route, has_many_axes, route
from meshdsl.placed.sharding_rules import Call, Row, call_of, legal_rows
from meshdsl.placed.strategies import Chooser, Want, adding_first, allowed_rows, flops
from meshdsl.placed.zero_one import NoPlan
from meshdsl.records import dataclass

MOST_COMBINATIONS = 4_000
"""Combinations of rows of all operators together that a search may consider."""

MOST_PAIRS = 56_000
"""Pairs of placements that a search may price: of values as yielded, settled and needed.

Each counts as often as there are axes, squared: over more axes a route passes more placements.
"""

MOST_ROUTES = 40_000
"""Routes of different types and placements that a search may look for, counted as `MOST_PAIRS` are.

One between blocks of several sizes counts as `UNEVEN`: its bytes are added up device by device.
"""

UNEVEN = 4

OVER_MANY = 25
"""The weight of a route in the limit, where its two ends together use many axes of the mesh."""

RouteKey = tuple[TensorType, Placement, Placement]
"""A tensor's type, where it is, and where it goes."""

MOST_PLACEMENTS = 40
"""Placements considered of one value; where there are more, splits are left out."""

LIGHT = 8
"""An operator of fewer FLOPs per element that it reads or writes may run on every device."""


Splits = frozenset[tuple[str, str]]
"""Pairs (dim, axis)."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination of rows of an operator, the FLOPs of a device, and their price."""

    needs: tuple[Placement, ...]
    yields: tuple[Placement, ...]
    flops: int
    cost: int


@dataclass(frozen=True, slots=True)
class PossibleRows:
    """The rows of a call along one axis, under what rules demand.

    every: those that are allowed. suiting: those that split no result otherwise than demanded.
    others: of each of `every`, the operands that it takes otherwise than rules split them.
    is_split: whether rules split an operand along the axis.
    """

    every: list[Row]
    suiting: list[Row]
    others: list[list[int]]
    is_split: bool


@dataclass(frozen=True, slots=True)
class Demands:
    """What a request says of an operator, and its possible rows by axis.

    ruled: the placements in which rules want the operands. is_known: whether they say so of each of
    them. among: operators of which this is equal have the same legal combinations of rows.
    """

    ruled: tuple[Placement, ...]
    wants: tuple[Want, ...]
    pins: tuple[Placement | None, ...]
    is_known: bool
    is_light: bool
    possible: tuple[PossibleRows, ...]
    among: tuple[object, ...]


class PlanProblem:
    """What all spaces of one request have in common.

    trips: how often a value is made. read_as: the splits that rules request of it where it is read.
    joined: those of which, partial, later operators may make less to reduce. sliced: the dims of
    loops that slice or collect a value.
    """

    def __init__(self, request: Request, price: Price) -> None:
        self.request, self.price = request, price
        self.program = program = request.program
        self.mesh = request.mesh
        self.operators = tuple(named.walk(program.body))
        self.loops = tuple(loops_of(program))
        self.stored = (*program.inputs, *(p.value for p in program.params))
        self.stored += tuple(s.value for s in program.states)
        left = {o.value: request.output(o.value) for o in program.outputs}
        self.outputs = {value: p for value, p in left.items() if p is not None}
        self.trips = self._trips()
        self.sliced = self._sliced()
        self.joined = self._joined()
        # Without demands nothing is partial either: such axes are left alone.
        asked = self._asked_axes()
        self.axes = tuple(a for a, n in self.mesh.axes if n > 1 and a in asked)
        self.ops = self._arising()
        ruled = ((v, request.ruled(v)) for v in self.trips)
        self.uneven = any(p.splits_unevenly(v.type, self.mesh) for v, p in ruled)
        self.read_as: dict[Value, set[Placement]] = defaultdict(set)
        self._demands: dict[NamedOp, Demands] = {}
        self._rows_of_alike: dict[tuple[object, ...], PossibleRows] = {}
        self._of_alike: dict[tuple[object, ...], tuple[Combination, ...]] = {}

    # --- the program -------------------------------------------------------------------------

    def _trips(self) -> dict[Value, int]:
        trips_of = dict.fromkeys(self.stored, 1)
        for node, trips in ir.counted(self.program.body):
            trips_of.update(dict.fromkeys(node.makes, trips))
            if isinstance(node, named.NamedLoop):
                trips_of.update(dict.fromkeys(node.enters, trips * node.dim.size))
        pipe = self.request.one_stage
        times = {} if pipe is None else in_each_batch(self.program, pipe)
        return {value: trips * times.get(value, 1) for value, trips in trips_of.items()}

    def _sliced(self) -> dict[Value, set[str]]:
        sliced_dims: dict[Value, set[str]] = defaultdict(set)
        # Dims that an inner loop slices count for the stack of the outer loop too.
        for loop in reversed(self.loops):
            for part in loop.collected:
                sliced_dims[part.outer].add(loop.dim.name)
            for item in loop.stacked:
                sliced_dims[item.outer] |= {loop.dim.name} | sliced_dims[item.inside]
        return sliced_dims

    def _asked_axes(self) -> set[str]:
        results = [v for op in self.operators for v in op.outs]
        asked = [self.request.ruled(v) for v in (*self.stored, *results)]
        pins = (p for op in self.operators for p in self.request.pins(op))
        asked += [p for p in pins if p is not None]
        return {a for p in asked for a in (*p.partial, *(a for _, axes in p.splits for a in axes))}

    def _arising(self) -> set[ReduceOp]:
        """Operations of the partial values that can arise: sums, and those of reductions here."""
        calls = {call_of(op) for op in self.operators}
        beginning = [r for c in calls for r in legal_rows(c) if not _partial_ops(r.ins)]
        asked = {self.request.ruled(v).op for v in self.trips}
        sums: set[ReduceOp] = {"sum"}
        return sums.union(
            *(_partial_ops(row.outs) for row in beginning), {op for op in asked if op}
        )

    def _joined(self) -> set[Value]:
        """The values of which, partial, linear operators after them may make less to reduce."""
        joined: set[Value] = set()
        for op in reversed(self.operators):
            for row in legal_rows(call_of(op)):
                taken = {v for v, c in zip(op.ins, row.ins, strict=True) if isinstance(c, Partial)}
                if len(taken) > 1 or _shrinks(op, taken) or not joined.isdisjoint(op.outs):
                    joined |= taken
        return joined

    # --- operators ---------------------------------------------------------------------------

    def demands(self, op: NamedOp) -> Demands:
        """What is requested of an operator and of what it reads."""
        if op not in self._demands:
            self._demands[op] = self._demanded(op)
        return self._demands[op]

    def _demanded(self, op: NamedOp) -> Demands:
        call, pins, wants = call_of(op), self.request.pins(op), self.request.wants(op)
        ruled = tuple(p or self.request.ruled(v) for p, v in zip(pins, op.ins, strict=True))
        for value in op.ins:
            self.read_as[value].add(self.request.read(value, op))
        alike = (call, ruled, wants, self.request.added_first(op))
        possible = tuple(self._possible(axis, *alike) for axis in self.axes)
        is_known = all(map(self.request.is_known, op.ins))
        among = (call, op.kind, ruled, wants, pins)
        return Demands(ruled, wants, pins, is_known, _is_light_call(call), possible, among)

    def _possible(
        self,
        axis: str,
        call: Call,
        ruled: tuple[Placement, ...],
        wants: tuple[Want, ...],
        added_first: frozenset[str],
    ) -> PossibleRows:
        """The rows of an operator along one axis, the same for all operators of a call."""
        key = (call, axis, ruled, wants, added_first)
        if key not in self._rows_of_alike:
            legal = adding_first(allowed_rows(legal_rows(call), wants, axis), axis, added_first)
            every = [r for r in legal if _partial_ops((*r.ins, *r.outs)) <= self.ops]
            suiting = [r for r in every if _agrees(r, axis, wants)]
            others = [
                [i for i, p in enumerate(ruled) if not _takes(r.ins[i], p, axis)] for r in every
            ]
            is_split = any(_is_split(p, axis) for p in ruled)
            self._rows_of_alike[key] = PossibleRows(every, suiting, others, is_split)
        return self._rows_of_alike[key]

    def combinations(self, op: NamedOp, options: list[list[Row]]) -> tuple[Combination, ...]:
        """The legal combinations of these rows, the same for all operators of a call."""
        demands = self.demands(op)
        # Rows are those of `_rows_of_alike`, so that each is one object.
        key = (*demands.among, tuple(tuple(map(id, rows)) for rows in options))
        if key not in self._of_alike:
            self._of_alike[key] = self._legal(op, demands, options)
        return self._of_alike[key]

    def _legal(
        self, op: NamedOp, demands: Demands, options: list[list[Row]]
    ) -> tuple[Combination, ...]:
        versions = tuple((p,) for p in demands.ruled)
        by = (self.mesh, "deferred", self.price, False, self.uneven)
        chooser = Chooser(call_of(op), versions, demands.wants, demands.pins, *by)
        combinations: dict[tuple[object, ...], Combination] = {}
        for rows in itertools.product(*options):
            placed = chooser.placements(dict(zip(self.axes, rows, strict=True)))
            if placed is None or (op.kind is OpKind.LOAD and placed[0] != demands.ruled):
                continue
            work = chooser.flops(*placed)
            cost = self.price.operator(lookup(op.name), chooser.local(*placed), work)
            combinations.setdefault(placed, Combination(*placed, work, cost))
        if not combinations:
            raise NoPlan
        return tuple(combinations.values())


class PlanSpace:
    """The search space: combinations of every operator, and where values may settle.

    readers: every placement that a reader may need a value in. made: what an operator may yield a
    value as, along an axis. passed: what operators may take it as, otherwise than rules split it,
    to pass it on. splits: those that are considered on axes without a rule; None for all. unlike:
    the routes by which devices send unequally much.
    """

    def __init__(self, problem: PlanProblem, splits: Splits | None) -> None:
        self.problem, self.request, self.splits = problem, problem.request, splits
        self.price, self.mesh, self.axes = problem.price, problem.mesh, problem.axes
        self.program, self.loops, self.stored = problem.program, problem.loops, problem.stored
        self.outputs, self.trips, self.sliced = problem.outputs, problem.trips, problem.sliced
        self.combinations: dict[NamedOp, tuple[Combination, ...]] = {}
        self.made: dict[tuple[Value, str], set[Component]] = defaultdict(set)
        self.passed: dict[tuple[Value, str], set[Component]] = defaultdict(set)
        self.readers: dict[Value, dict[Placement, None]] = {}
        self.pairs = 0
        self.routes: dict[RouteKey, Route | None] = {}
        self.unlike: list[tuple[Route, TensorType]] = []
        self.work = 0
        # Each operator has one combination at least: too many are known before the last is read.
        self._combined = len(problem.operators)
        for op in problem.operators:
            self.combinations[op] = self._of(op)
            for combination in self.combinations[op]:
                for value, placed in zip(op.outs, combination.yields, strict=True):
                    for axis in self.axes:
                        self.made[value, axis].add(placed.component(axis))
        self._collect_readers()

    def route(self, value: Value, source: Placement, target: Placement) -> Route | None:
        """The cheapest route from one placement of a value to another."""
        key = value.type, source, target
        if key not in self.routes:
            self.work += self._work(*key)
            self._check_work(self.work)
            way = self.routes[key] = route(value.type, source, target, self.mesh, self.price)
            if way is not None and way.unlike:
                self.unlike.append((way, value.type))
        return self.routes[key]

    def expect(self, routes: Iterable[RouteKey]) -> None:
        """Raise NoPlan before the first of many routes is looked for, not after the last.

        `routes` are those that will be priced whatever is chosen; some of them more than once.
        """
        work = 0
        for key in dict.fromkeys(routes):
            work += self._work(*key)
            self._check_work(work)

    def _check_work(self, work: int) -> None:
        if work * len(self.axes) ** 2 > MOST_ROUTES:
            raise NoPlan

    def _work(self, type_: TensorType, source: Placement, target: Placement) -> int:
        """The weight of a route: over many axes, its search passes very many placements."""
        if has_many_axes(self.mesh) and source != target:
            ends = (source, target)
            used = {a for p in ends for _, axes in p.splits for a in axes}.union(
                *(p.partial for p in ends)
            )
            if len(used) > MOST_TOGETHER:
                return OVER_MANY
        uneven = any(p.splits_unevenly(type_, self.mesh) for p in (source, target))
        return UNEVEN if uneven else 1

    # --- readers -----------------------------------------------------------------------------

    def _collect_readers(self) -> None:
        """Note the placements that readers may need."""
        for op, combinations in self.combinations.items():
            for index, value in enumerate(op.ins):
                self.need(value, (c.needs[index] for c in combinations))
        for value, placed in self.outputs.items():
            self.need(value, [placed])
        for update in self.program.updates:
            self.need(update.new, [self.request.stored(update.old)])

    def need(self, value: Value, placements: Iterable[Placement]) -> None:
        """Note that a reader may need a value in these placements."""
        self.readers.setdefault(value, {}).update(dict.fromkeys(placements))

    # --- combinations ------------------------------------------------------------------------

    def _of(self, op: NamedOp) -> tuple[Combination, ...]:
        """The legal combinations of rows over the axes."""
        demands = self.problem.demands(op)
        options = [self._rows(op, axis, at, demands) for at, axis in enumerate(self.axes)]
        self._combined += math.prod(map(len, options)) - 1
        if self._combined > MOST_COMBINATIONS:
            raise NoPlan
        return self.problem.combinations(op, options)

    def _rows(self, op: NamedOp, axis: str, at: int, demands: Demands) -> list[Row]:
        """The rows along one axis that keep the splits that rules demand.

        A row keeps the split of an operand also where it takes what is partial in its place, and
        that of a result where it yields that partial or whole. Beside those that keep the splits of
        operands, one is considered that spares reducing a large result of small operands. Where
        rules contradict each other, an operator that computes much keeps the splits of its results.
        """
        possible = demands.possible[at]
        every, suiting = possible.every, possible.suiting
        if not possible.is_split:
            return self._considered(suiting or every, axis)
        taken = [
            (row, others)
            for row, others in zip(every, possible.others, strict=True)
            if not others or (demands.is_light and self._passes(row, axis, op, others))
        ]
        keeping = [row for row, _ in taken]
        passing = [row for row, others in taken if others]
        for row in passing:
            for value, component in zip(op.ins, row.ins, strict=True):
                self.passed[value, axis].add(component)
        both = [r for r in keeping if r in suiting and r not in passing]
        if both and demands.is_known:
            both += [r for r in every[:1] if r not in both and _spares(op, both + passing)]
            return both + passing
        more = suiting if suiting and not demands.is_light else every
        return keeping + [r for r in self._considered(more, axis) if r not in keeping]

    def _passes(self, row: Row, axis: str, op: NamedOp, others: list[int]) -> bool:
        """Whether the row passes on `others` of the operands as they are made, not as rules split.

        Only where the operator, which does not compute much, is linear in them: it yields them
        added up.
        """
        if all(isinstance(row.ins[i], Partial) for i in others):
            return self._spares_sums(op, row, axis)
        as_made = all(row.ins[i] != B and row.ins[i] in self.made[op.ins[i], axis] for i in others)
        return as_made and _is_linear(op, others)

    def _spares_sums(self, op: NamedOp, row: Row, axis: str) -> bool:
        """Whether less is reduced where operands that rules split are taken partial by a row.

        Only where several of those that it takes so may have been left so, which are added up, or
        where one was and less is reduced of what is made of it, here or later. Else it is reduced
        before, which sends as much.
        """
        taken = {(v, c) for v, c in zip(op.ins, row.ins, strict=True) if isinstance(c, Partial)}
        left = {value for value, component in taken if component in self.made[value, axis]}
        return len(left) > 1 or (
            bool(left) and (_shrinks(op, left) or not self.problem.joined.isdisjoint(op.outs))
        )

    def _considered(self, rows: list[Row], axis: str) -> list[Row]:
        """The rows that split dims only as the search considers it; all, where none does."""
        return [row for row in rows if self._is_considered(row, axis)] or rows

    def _is_considered(self, row: Row, axis: str) -> bool:
        """Whether a row splits dims only as the search considers it."""
        dims = (c.dim for c in (*row.ins, *row.outs) if isinstance(c, Split))
        return all(self._may_split(d, axis) for d in dims)

    def _may_split(self, dim: str, axis: str) -> bool:
        return self.splits is None or (dim, axis) in self.splits

    # --- where values settle -----------------------------------------------------------------

    def targets(
        self, value: Value, yields: tuple[Placement, ...], without: str = ""
    ) -> list[Placement]:
        """Where a value may settle; carried and collected values have no `yields`.

        The dim `without` stays whole, whatever rules demand.
        """
        ruled = self.request.ruled(value).without_dim(without)
        if self.request.is_settled(value):
            return [self.outputs.get(value, ruled).without_dim(without)]
        candidates = list(dict.fromkeys(self._completed(value, ruled, yields, splits=True)))
        if len(candidates) > MOST_PLACEMENTS:
            candidates = list(dict.fromkeys(self._completed(value, ruled, yields, splits=False)))
        self.pairs += len(candidates) * (len(yields) + len(self.readers.get(value, ())))
        if self.pairs * len(self.axes) ** 2 > MOST_PAIRS:
            raise NoPlan
        if self.request.waits(value):
            # A gradient keeps its first placement until the update reads it.
            return [p for p in candidates if p in yields] or candidates
        return candidates

    def kept(self, item: ir.Collected[Value], loop: str) -> list[Placement]:
        """Where a collected value may settle: like its parts, or in a version that exists anyway.

        That is one which readers of the parts need, in this loop and in those that slice the whole:
        what the backward pass reads of the forward one. It takes no more memory than rules request
        of it where it is read.
        """
        candidates = self.targets(item.outer, (), without=loop)
        if item.outer.rules_from is None or self.request.is_settled(item.outer):
            return candidates
        ruled = self.request.ruled(item.outer).without_dim(loop)
        slices = [s.inside for other in self.loops for s in other.stacked if s.outer is item.outer]
        requested = {ruled}.union(*(self.problem.read_as[s] for s in slices))
        most = max(p.local(item.inside.type, self.mesh).elements for p in requested)
        again = {p for s in slices for p in self.readers.get(s, ())}
        sliced = self.sliced[item.outer]
        for p in self.readers.get(item.inside, ()):
            small = p.local(item.inside.type, self.mesh).elements <= most
            if p in again and small and not (p.windows or any(p.axes_of(d) for d in sliced)):
                candidates.append(p)
        return list(dict.fromkeys(candidates))

    def results(self, op: NamedOp, index: int) -> list[Placement]:
        """Where a result of an operator may settle."""
        yields = dict.fromkeys(c.yields[index] for c in self.combinations[op])
        return self.targets(op.outs[index], tuple(yields))

    def _completed(
        self, value: Value, ruled: Placement, yields: tuple[Placement, ...], splits: bool
    ) -> Iterator[Placement]:
        """The demanded splits, or partial in their place; the free axes whole, partial or split."""
        taken = {a for _, axes in ruled.splits for a in axes}
        free = [a for a in self.axes if a not in taken]
        for op in _sorted_ops(p.op for p in yields):
            ways = [self._along(value, axis, yields, op, splits) for axis in free]
            for waiting in self._waiting(value, ruled, yields, op):
                for picked in itertools.product(*ways):
                    components = {**waiting, **dict(zip(free, picked, strict=True))}
                    completed = self._with(_without_axes(ruled, waiting), components, op)
                    if self._is_tried(value.type, completed, (ruled, *yields)):
                        yield completed

    def _waiting(
        self, value: Value, ruled: Placement, yields: tuple[Placement, ...], op: ReduceOp
    ) -> Iterator[dict[str, Component]]:
        """What a value may stay along axes over which rules split it: first of all, that split.

        It may stay as it is made where a reader passes it on: what that yields is moved in its
        place. Where the rule is for this value alone, it may only stay partial.
        """
        own = {a for d in self.request.asked(value).own for a in ruled.axes_of(d)}
        others: dict[str, list[Component]] = {}
        for axis in (a for _, axes in ruled.splits for a in axes):
            components = dict.fromkeys(p.component(axis) for p in yields if p.op in (None, op))
            passed = self.passed[value, axis] - {B, ruled.component(axis)}
            passed_on = [component for component in components if component in passed]
            if axis in own:
                passed_on = [c for c in passed_on if isinstance(c, Partial)]
            if passed_on:
                others[axis] = passed_on
        for picked in itertools.product(*([None, *choices] for choices in others.values())):
            pairs = zip(others, picked, strict=True)
            yield {axis: component for axis, component in pairs if component is not None}

    def waits(self, value: Value, settled: Placement) -> bool:
        """Whether a value stays as it is made where rules split it: readers move it, or pass it on.

        Whole is no such: rules are met by a part of that.
        """
        ruled = self.request.ruled(value)
        every = ((settled.component(a), ruled.component(a)) for _, ax in ruled.splits for a in ax)
        return any(here not in (B, there) for here, there in every)

    def may_read(self, value: Value, settled: Placement, need: Placement) -> bool:
        """Whether a reader may need a value so: what stays as it is made, or as rules say."""
        if not self.waits(value, settled):
            return True
        ruled = self.request.ruled(value)
        return all(
            need.component(axis) in (settled.component(axis), ruled.component(axis))
            for _, axes in ruled.splits
            for axis in axes
            if settled.component(axis) not in (B, ruled.component(axis))
        )

    def _is_tried(self, type_: TensorType, made: Placement, given: tuple[Placement, ...]) -> bool:
        """Whether every split is even, or that of a placement demanded or yielded."""
        splits = {split for p in given for split in p.splits}
        return all(
            (dim, axes) in splits or not made.is_uneven(dim, type_.size(dim), self.mesh)
            for dim, axes in made.splits
        )

    def _along(
        self, value: Value, axis: str, yields: tuple[Placement, ...], op: ReduceOp, splits: bool
    ) -> list[Component]:
        """The components of a value along a free axis.

        A value yielded whole or split best stays so, or becomes whole: versions can be made of it.
        """
        came = {p.component(axis) for p in yields}
        if came and not _partial_ops(came):
            may = self.request.may_split(value)
            split = (c for c in came if isinstance(c, Split) and c.dim in may)
            return [B, *sorted(split, key=lambda c: value.type.index(c.dim))]
        sliced = self.sliced[value]
        dims = [d for d in self.request.may_split(value) if splits and d not in sliced]
        return [B, Partial(op), *(Split(d) for d in dims if self._may_split(d, axis))]

    def _with(self, base: Placement, picked: dict[str, Component], op: ReduceOp) -> Placement:
        splits = dict(base.splits)
        for axis, component in picked.items():
            if isinstance(component, Split):
                splits[component.dim] = (*splits.get(component.dim, ()), axis)
        partial = tuple(a for a, c in picked.items() if isinstance(c, Partial))
        return placement(self.mesh, splits, partial, op)


def _without_axes(placed: Placement, axes: Collection[str]) -> Placement:
    """The same splits less some axes."""
    if not axes:
        return placed
    splits = ((d, tuple(a for a in over if a not in axes)) for d, over in placed.splits)
    return Placement(tuple((d, over) for d, over in splits if over))


def _partial_ops(components: Iterable[Component]) -> set[ReduceOp]:
    return {c.op for c in components if isinstance(c, Partial)}


def _sorted_ops(ops: Iterable[ReduceOp | None]) -> list[ReduceOp]:
    """The operations present; sums where there are none."""
    sums: list[ReduceOp] = ["sum"]
    return sorted({op for op in ops if op}) or sums


def _is_split(placed: Placement, axis: str) -> bool:
    return isinstance(placed.component(axis), Split)


def _takes(component: Component, ruled: Placement, axis: str) -> bool:
    """Whether a component is the split that rules demand along the axis, if they demand one."""
    return not _is_split(ruled, axis) or component == ruled.component(axis)


def _is_linear(op: NamedOp, operands: Collection[int]) -> bool:
    """Whether an operator is linear in some operands together: partial, they pass through it."""
    rows = legal_rows(call_of(op))
    return any(all(row.ins[i] == Partial("sum") for i in operands) for row in rows)


def _agrees(row: Row, axis: str, wants: tuple[Want, ...]) -> bool:
    """Whether no result is split otherwise than demanded."""
    pairs = zip(row.outs, (w.placement.component(axis) for w in wants), strict=True)
    return not any(isinstance(c, Split) and isinstance(w, Split) and c != w for c, w in pairs)


def _spares(op: NamedOp, rows: list[Row]) -> bool:
    """Whether gathering the operands sends less than reducing what every row leaves partial.

    Only where a whole result on every device is cheap: a lookup's gradient, not a product. Rules
    for the splits of a parameter are followed.
    """
    split = {v for row in rows for v, c in zip(op.ins, row.ins, strict=True) if c != B}
    if not all(_partial_ops(row.outs) for row in rows) or any(v.role == "param" for v in split):
        return False
    gathered = [_split_bytes(op, row) for row in rows if not _partial_ops(row.ins)]
    reduced = 2 * sum(v.type.bytes for v in op.outs)
    return _is_light(op) and min(gathered, default=reduced) < reduced


def _is_light(op: NamedOp) -> bool:
    return _is_light_call(call_of(op))


@functools.lru_cache(maxsize=1 << 13)
def _is_light_call(call: Call) -> bool:
    moved = sum(type_.elements for type_ in (*call.ins, *call.outs))
    return flops(call.opdef, call.signature) <= LIGHT * moved


def _shrinks(op: NamedOp, values: Iterable[Value]) -> bool:
    """Whether an operator yields less than it reads of one of some values."""
    made = sum(v.type.bytes for v in op.outs)
    return any(made < v.type.bytes for v in values)


def _split_bytes(op: NamedOp, row: Row) -> int:
    pairs = zip(op.ins, row.ins, strict=True)
    return sum(v.type.bytes for v, component in pairs if isinstance(component, Split))
