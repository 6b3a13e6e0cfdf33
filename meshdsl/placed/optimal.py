"""The optimal plan: all placements of a program at once, by 0-1 integer programming.

The model is that of Alpa's intra-operator parallelism (Zheng et al., OSDI 2022, section 4): each
operator chooses one strategy, and the cost of resharding between two choices is linearised by
variables for the edges. Ours are the partial values, loops, and versions that readers share.

Variables, 0 or 1. A combination c of operator o is a legal row per mesh axis, hence the placements
it needs its operands in and those it yields. Value v is yielded in placement y and settles in s; a
reader r of v (an operator, a loop, an output, an update) needs it in n:

    x[o,c]    o chooses c
    z[v,y,s]  v is yielded in y and settles in s
    S[v,s]    v settles in s; no variable, but the sum over y of z[v,y,s]
    f[r,s,n]  r needs in n what settled in s
    g[r,k,n]  the part of f[r,s,n] that r makes of version k of the same s, with nothing sent: a
              slice of it, or itself among zeros; where n has a window, of a wider one; or, where
              it has windows of the blocks k, by a halo
    m[v,s,n]  version n of v is made from s

Constraints, for all indices that are not summed over:

    sum over c of x[o,c] = 1
    sum over s of z[v,y,s] = sum of the x[o,c] that yield y    a yielded value settles somewhere
    sum over n of f[r,s,n] = S[v,s]                            the flow of a reader is a transport
    sum over s of f[r,s,n] = sum of the x[o,c] that need n     problem, from s to n
    sum over k of g[r,k,n] <= f[r,s,n]
    f[r,s,n] - sum over k of g[r,k,n] + sum over k of g[r,n,k] <= m[v,s,n]

The last makes a reader take one version at a time: halves of a version do not serve two of its
needs at once. A carried value has one S inside and outside, that its entry and its end need.

Objective: the least sum, over z, g and m, of the `Price` of the reshard times its iterations (of
the loops around it). So a version is paid for once, however many read it. Price counts bytes first
of all, along the cheapest route (`reshard.py`); ties go to fewer collectives, then fewer local
steps and FLOPs; all of them together weigh less than a byte. Where Price counts time, each x has
that of its operator, too.

HiGHS (Huangfu and Hall, 2018) solves the relaxation first, and branches on x, z, carried S and m
with parts only where that leaves fractions. Nearly every relaxation is tight: given x and S, the
flows are transport problems. A choice of one option is a constant, and placements that are nowhere
cheaper than another are left out.

Proven, as `Plan.least`: of the space that was searched, no plan costs less, by the solver's bound.
That is the widest of three spaces that is small enough. Values keep the splits that rules demand,
and operators the rows that keep them (`Space._rows`); on axes without a rule, values may be whole,
partial or split; else split only as some rule splits that dim elsewhere; else not split. Not
proven: other orders of products of many operands (one is given), and what a stack that is split
along its loop might have become before it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from meshdsl.ir import program as ir
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.ops.opdef import ReduceOp, lookup
from meshdsl.placed.choose import Choice, Chooser, Want, allowed_rows, flops
from meshdsl.placed.ir import EVERY
from meshdsl.placed.request import Request, loops
from meshdsl.placed.reshard import Price, Route, route
from meshdsl.placed.rows import Row, call_of, legal_rows
from meshdsl.placed.sbp import B, Component, Partial, Placement, Split, placement
from meshdsl.placed.storage import is_load

if TYPE_CHECKING:
    import highspy


# --- the 0-1 program ----------------------------------------------------------------------------


Terms = dict[int, float]
"""A quantity: coefficients by variable; the coefficient of `ONE` is a constant."""

ONE = -1
ALWAYS: Terms = {ONE: 1.0}

MOST_NODES = 200
"""Nodes of the branch and bound tree: nearly every program is solved without one."""

MOST_ITERATIONS = 50_000
"""Iterations of the simplex method on the relaxation."""

TOLERANCE = 1e-6
"""The tolerance for values that count as 0 or 1."""


SOLVER = "highspy 1.15"
"""The solver and its version: another one may find another plan of the same cost."""


class NoPlan(Exception):
    """The program has grown larger than it may, or nothing satisfies it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Values of the variables, their cost, and whether no others cost less."""

    values: Sequence[float]
    cost: float
    proven: bool

    def of(self, terms: Terms) -> int:
        """The value of a 0-1 quantity."""
        return round(sum(c * (self.values[i] if i >= 0 else 1) for i, c in terms.items()))


@dataclass(slots=True)
class ZeroOne:
    """A 0-1 program under construction: costs per variable and linear constraints.

    Raises NoPlan when it has more than `most` coefficients, or a constraint that cannot be met.
    """

    most: int
    whole: list[bool] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rows: list[Terms] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    coefficients: int = 0
    paid: float = 0.0

    def variable(self, whole: bool = True) -> Terms:
        """A new 0-1 variable; one that is not `whole` is 0 or 1 by itself once the others are."""
        self.costs.append(0.0)
        self.whole.append(whole)
        return {len(self.costs) - 1: 1.0}

    def choice(self, options: int) -> list[Terms]:
        """Quantities of which exactly one is 1."""
        if options == 1:
            return [ALWAYS]
        made = [self.variable() for _ in range(options)]
        self.equal(total(made), ALWAYS)
        return made

    def pay(self, terms: Terms, cost: float) -> None:
        """Add `cost` times a quantity to the objective."""
        for variable, coefficient in terms.items():
            if variable == ONE:
                self.paid += cost * coefficient
            else:
                self.costs[variable] += cost * coefficient

    def equal(self, left: Terms, right: Terms) -> None:
        """`left` = `right`."""
        self._constrain(left, right, 0.0)

    def at_most(self, left: Terms, right: Terms) -> None:
        """`left` <= `right`."""
        self._constrain(left, right, -float("inf"))

    def _constrain(self, left: Terms, right: Terms, low: float) -> None:
        row = total([left, {i: -c for i, c in right.items()}])
        bound = -row.pop(ONE, 0.0)
        row = {i: c for i, c in row.items() if c}
        if not row:
            if not low + bound <= 0 <= bound:
                raise NoPlan
            return
        self.rows.append(row)
        self.lows.append(low + bound)
        self.highs.append(bound)
        self.coefficients += len(row)
        if self.coefficients > self.most:
            raise NoPlan

    def minimise(self) -> Answer | None:
        """The least values; None where no point was found within the limits, NoPlan if none exists.

        The relaxation comes first: where its values are 0 and 1, there is nothing to branch on.
        """
        if not self.costs:
            return Answer((), self.paid, proven=True)
        import highspy
        import numpy as np

        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in _OPTIONS.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        solver.run()
        optimal = highspy.HighsModelStatus.kOptimal
        _refuse_infeasible(solver)
        if solver.getModelStatus() != optimal:
            return None
        if not self._is_whole(solver.getSolution().col_value):
            solver.changeColsIntegrality(
                len(self.whole), np.arange(len(self.whole)), np.array(self.whole, np.uint8)
            )
            solver.run()
            _refuse_infeasible(solver)
        values = solver.getSolution().col_value
        proven = solver.getModelStatus() == optimal
        cost = self.paid + sum(c * v for c, v in zip(self.costs, values, strict=True))
        return Answer(tuple(values), cost, proven) if self._is_whole(values) else None

    def _is_whole(self, values: Sequence[float]) -> bool:
        pairs = zip(values, self.whole, strict=True)
        return all(min(value, 1 - value) < TOLERANCE for value, whole in pairs if whole)

    def _model(self) -> highspy.HighsLp:
        import highspy
        import numpy as np

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.rows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.ones(len(self.costs))
        model.row_lower_, model.row_upper_ = np.array(self.lows), np.array(self.highs)
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *map(len, self.rows)])
        matrix.index_ = np.array([i for row in self.rows for i in row])
        matrix.value_ = np.array([c for row in self.rows for c in row.values()])
        return model


_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "presolve": "off",  # choices of one option are constants already
    "simplex_iteration_limit": MOST_ITERATIONS,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-6,
    "mip_max_nodes": MOST_NODES,
}


def _refuse_infeasible(solver: highspy.Highs) -> None:
    """Raise NoPlan where the solver has found that nothing satisfies the constraints."""
    import highspy

    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        raise NoPlan


def total(parts: Iterable[Terms]) -> Terms:
    """The sum of quantities."""
    found: Terms = {}
    for part in parts:
        for variable, coefficient in part.items():
            found[variable] = found.get(variable, 0.0) + coefficient
    return found


# --- the model ----------------------------------------------------------------------------------


MOST_COMBINATIONS = 4_000
"""Combinations of rows of all operators together that a search may consider."""

MOST_PAIRS = 56_000
"""Pairs of placements that a search may price: of values as yielded, settled and needed.

Each counts as often as there are axes, squared: over more axes a route passes more placements.
"""

MOST_COEFFICIENTS = 250_000
"""The largest 0-1 program attempted, in coefficients."""

MOST_PLACEMENTS = 40
"""Placements considered of one value; where there are more, splits are left out."""

LIGHT = 8
"""An operator of fewer FLOPs per element that it reads or writes may run on every device."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The placements of a whole program, decided at once: a `Decider`.

    choices: operand and result placements of each operator, and where its results settle. carried:
    the placements of what loops carry and collect. sent: per value, the versions that something is
    sent for. `cost` is that of all reshards, and operators, by `price`, in all iterations.
    `least`: no other plan costs less, of those that were `searched`.
    """

    choices: dict[Op, Choice]
    carried: dict[Value, Placement]
    sent: dict[Value, tuple[Placement, ...]]
    price: Price
    cost: int
    least: bool
    searched: str = ""
    policy: str = "optimal"
    foresees: ClassVar[bool] = True

    def choice(self, op: Op, chooser: Chooser) -> Choice | None:
        """The choice for an operator, whatever the chooser would have taken."""
        return self.choices[op]

    def carries(self, loop: named.Loop) -> Mapping[Value, Placement] | None:
        """The placements of all carries and collected values."""
        return self.carried

    def versions(self, value: Value) -> tuple[Placement, ...]:
        """The versions that something is sent for."""
        return self.sent.get(value, ())


def solve(request: Request, price: Price) -> Plan | None:
    """The plan of least cost; None where the search is too large.

    The program of `request` is rewritten: it has no composite whose own dim is split, and no n-ary
    einsum. The widest space that is not too large is searched; the plan is the least of that space.
    """
    spaces: dict[str, Splits | None] = {EVERY: None, KNOWN: request.known, NONE: frozenset()}
    for searched, splits in spaces.items():
        try:
            plan = Model(Space(request, price, splits)).plan()
        except NoPlan:
            continue
        if plan is not None:
            return replace(plan, searched=searched)
    return None


Splits = frozenset[tuple[str, str]]
"""Pairs (dim, axis)."""

KNOWN, NONE = ("splits that rules know", "whole and partial values only")
"""The spaces searched, short of `EVERY`, on axes without a rule."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination of rows of an operator, the FLOPs of a device, and their price."""

    needs: tuple[Placement, ...]
    yields: tuple[Placement, ...]
    flops: int
    cost: int


class Space:
    """The search space: combinations of every operator, and where values may settle.

    readers: every placement that a reader may need a value in. trips: how often a value is made.
    sliced: the dims of loops that slice or collect a value. splits: those that are considered on
    axes without a rule; None for all.
    """

    def __init__(self, request: Request, price: Price, splits: Splits | None) -> None:
        self.request, self.price, self.splits = request, price, splits
        self.program = program = request.program
        self.mesh = request.mesh
        self.combinations: dict[Op, tuple[Combination, ...]] = {}
        self.readers: dict[Value, dict[Placement, None]] = {}
        self.loops = tuple(loops(program))
        self.pairs = 0
        self.stored = (*program.inputs, *(p.value for p in program.params))
        self.stored += tuple(s.value for s in program.states)
        self._combined = 0
        left = {o.value: request.output(o.value) for o in program.outputs}
        self.outputs = {value: p for value, p in left.items() if p is not None}
        self.trips = self._trips()
        self.sliced = self._sliced()
        # Without demands nothing is partial either: such axes are left alone.
        asked = self._asked_axes()
        self.axes = tuple(a for a, n in self.mesh.axes if n > 1 and a in asked)
        self.ops = self._arising()
        ruled = ((v, request.ruled(v)) for v in self.trips)
        self.uneven = any(p.splits_unevenly(v.type, self.mesh) for v, p in ruled)
        for op in named.walk(program.body):
            self.combinations[op] = self._of(op)
        self._collect_readers()

    def route(self, value: Value, source: Placement, target: Placement) -> Route | None:
        """The cheapest route from one placement of a value to another."""
        return route(value.type, source, target, self.mesh, self.price)

    # --- the program -------------------------------------------------------------------------

    def _trips(self) -> dict[Value, int]:
        found = dict.fromkeys(self.stored, 1)
        for node, trips in ir.counted(self.program.body):
            found.update(dict.fromkeys(node.makes, trips))
            if isinstance(node, named.Loop):
                found.update(dict.fromkeys(node.enters, trips * node.dim.size))
        return found

    def _sliced(self) -> dict[Value, set[str]]:
        found: dict[Value, set[str]] = defaultdict(set)
        # Dims that an inner loop slices count for the stack of the outer loop too.
        for loop in reversed(self.loops):
            for made in loop.collected:
                found[made.outer].add(loop.dim.name)
            for item in loop.stacked:
                found[item.outer] |= {loop.dim.name} | found[item.inside]
        return found

    def _asked_axes(self) -> set[str]:
        made = [v for op in named.walk(self.program.body) for v in op.outs]
        asked = [self.request.ruled(v) for v in (*self.stored, *made)]
        pins = (p for op in named.walk(self.program.body) for p in self.request.pins(op))
        asked += [p for p in pins if p is not None]
        return {a for p in asked for a in (*p.partial, *(a for _, axes in p.splits for a in axes))}

    def _arising(self) -> set[ReduceOp]:
        """Operations of the partial values that can arise: sums, and those of reductions here."""
        calls = {call_of(op) for op in named.walk(self.program.body)}
        made = [r for c in calls for r in legal_rows(c) if not _partial_ops(r.ins)]
        asked = {self.request.ruled(v).op for v in self.trips}
        sums: set[ReduceOp] = {"sum"}
        return sums.union(*(_partial_ops(row.outs) for row in made), {op for op in asked if op})

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

    def _of(self, op: Op) -> tuple[Combination, ...]:
        """The legal combinations of rows over the axes."""
        pins = self.request.pins(op)
        wants = self.request.wants(op)
        ruled = tuple(p or self.request.ruled(v) for p, v in zip(pins, op.ins, strict=True))
        options = [self._rows(op, axis, ruled, wants) for axis in self.axes]
        self._combined += math.prod(map(len, options))
        if self._combined > MOST_COMBINATIONS:
            raise NoPlan
        versions = tuple((p,) for p in ruled)
        by = (self.mesh, "deferred", self.price, False, self.uneven)
        chooser = Chooser(call_of(op), versions, wants, pins, *by)
        found: dict[tuple[object, ...], Combination] = {}
        for rows in itertools.product(*options):
            made = chooser.placements(dict(zip(self.axes, rows, strict=True)))
            if made is None or (is_load(op) and made[0] != ruled):
                continue
            work = chooser.flops(*made)
            cost = self.price.operator(lookup(op.name), chooser.local(*made), work)
            found.setdefault(made, Combination(*made, work, cost))
        if not found:
            raise NoPlan
        return tuple(found.values())

    def _rows(
        self, op: Op, axis: str, ruled: tuple[Placement, ...], wants: tuple[Want, ...]
    ) -> list[Row]:
        """Rows along one axis that suit the demands on the result, or the splits of the operands.

        Where a row does both, no other is considered but one that spares reducing a large result of
        small operands.
        """
        legal = allowed_rows(legal_rows(call_of(op)), wants, axis)
        every = [r for r in legal if _partial_ops((*r.ins, *r.outs)) <= self.ops]
        split_here = any(isinstance(p.component(axis), Split) for p in ruled)
        standing = [row for row in every if split_here and _stands(row, axis, ruled)]
        suiting = [row for row in every if _agrees(row, axis, wants)]
        known = all(map(self.request.is_known, op.ins))
        both = [row for row in standing if row in suiting and known]
        if both:
            return both + [r for r in every[:1] if r not in both and _spares(op, both)]
        found = [r for r in every if r in standing or r in suiting] or every
        return [r for r in found if r in standing or self._is_considered(r, axis)] or found

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
        found = list(dict.fromkeys(self._completed(value, ruled, yields, splits=True)))
        if len(found) > MOST_PLACEMENTS:
            found = list(dict.fromkeys(self._completed(value, ruled, yields, splits=False)))
        self.pairs += len(found) * (len(yields) + len(self.readers.get(value, ())))
        if self.pairs * len(self.axes) ** 2 > MOST_PAIRS:
            raise NoPlan
        if self.request.waits(value):
            # A gradient keeps its first placement until the update reads it.
            return [p for p in found if p in yields] or found
        return found

    def kept(self, item: ir.Collected[Value], loop: str) -> list[Placement]:
        """Where a collected value may settle: like its parts, or in a version that exists anyway.

        That is one which readers of the parts need, in this loop and in those that slice the whole:
        what the backward pass reads of the forward one. It takes no more memory.
        """
        found = self.targets(item.outer, (), without=loop)
        if item.outer.follows is None or self.request.is_settled(item.outer):
            return found
        ruled = self.request.ruled(item.outer).without_dim(loop)
        most = ruled.local(item.inside.type, self.mesh).elements
        slices = [s.inside for other in self.loops for s in other.stacked if s.outer is item.outer]
        again = {p for s in slices for p in self.readers.get(s, ())}
        sliced = self.sliced[item.outer]
        for p in self.readers.get(item.inside, ()):
            small = p.local(item.inside.type, self.mesh).elements <= most
            if p in again and small and not (p.windows or any(p.axes_of(d) for d in sliced)):
                found.append(p)
        return list(dict.fromkeys(found))

    def results(self, op: Op, index: int) -> list[Placement]:
        """Where a result of an operator may settle."""
        yields = dict.fromkeys(c.yields[index] for c in self.combinations[op])
        return self.targets(op.outs[index], tuple(yields))

    def _completed(
        self, value: Value, ruled: Placement, yields: tuple[Placement, ...], splits: bool
    ) -> Iterator[Placement]:
        """The demanded splits, with the free axes whole, partial or split."""
        taken = {a for _, axes in ruled.splits for a in axes}
        free = [a for a in self.axes if a not in taken]
        for op in _sorted_ops(p.op for p in yields):
            ways = [self._along(value, axis, yields, op, splits) for axis in free]
            for picked in itertools.product(*ways):
                made = self._with(ruled, dict(zip(free, picked, strict=True)), op)
                if self._is_tried(value.type, made, (ruled, *yields)):
                    yield made

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
            found = (c for c in came if isinstance(c, Split))
            return [B, *sorted(found, key=lambda c: value.type.index(c.dim))]
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


Pair = tuple[Placement, Placement]
"""A settled placement of a value, and a version made from it."""

Reader = dict[Pair, Terms]
"""The flows to one reader."""

Local = dict[Pair, dict[Pair, Terms]]
"""The parts of the flows to a reader that it makes of other versions."""


class Model:
    """A space as a 0-1 program; see the head of this file for its quantities.

    settled: S by value. kept: the same for collected values, inside their loop. readers: f by value
    and reader, where something is sent. versions: m.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.request, self.price = space, space.request, space.price
        self.lp = ZeroOne(MOST_COEFFICIENTS)
        self.costs: dict[Value, dict[Pair, float]] = {}
        self.picks: dict[Op, list[Terms]] = {}
        self.settled: dict[Value, dict[Placement, Terms]] = {}
        self.kept: dict[Value, dict[Placement, Terms]] = {}
        self.readers: dict[Value, list[Reader]] = {}
        self.versions: dict[Value, dict[Pair, Terms]] = {}
        self.tie = 0.25 / (1 + len(space.trips) + len(space.combinations))
        """The weight of a collective beside a byte; that of a local step is an eighth."""

    def plan(self) -> Plan | None:
        """The least plan; None where none was found."""
        self._settle_all()
        self._read_all()
        for value in self.readers:
            self._make(value)
        answer = self.lp.minimise()
        return None if answer is None else self._plan(answer)

    # --- where values settle -----------------------------------------------------------------

    def _settle_all(self) -> None:
        for value in self.space.stored:
            self.settled[value] = {self.request.ruled(value): ALWAYS}
        for loop in self.space.loops:
            for carry in loop.carries:
                self._settle_carry(carry, loop.dim.name)
        collected = [c for loop in self.space.loops for c in loop.collected]
        apart = [c for c in collected if not self._settles_alike(c)]
        for item in apart:
            self._settle_collected(item)
        stacked = [s for loop in self.space.loops for s in loop.stacked]
        shared = {s.outer for s in stacked} | {c.inside for c in collected if c not in apart}
        # The pairs to price are counted before any is priced.
        results = ((op, i) for op in self.space.combinations for i in range(len(op.outs)))
        targets = {op.outs[i]: self.space.results(op, i) for op, i in results}
        for op in self.space.combinations:
            self._settle_results(op, targets, shared)
        for item in collected:
            if item not in apart:
                self.settled[item.outer] = self.settled[item.inside]
        for piece in stacked:
            self.settled[piece.inside] = self._sliced(piece)

    def _settle_collected(self, item: ir.Collected[Value]) -> None:
        """Place a collected value as its parts; a rule that splits the loop's dim applies later."""
        loop = next(d for d in item.outer.type.names if not item.inside.type.has(d))
        found = self.space.kept(item, loop)
        self.kept[item.outer] = dict(zip(found, self.lp.choice(len(found)), strict=True))
        self.space.need(item.inside, found)
        ruled = self.request.ruled(item.outer)
        if ruled.axes_of(loop):
            self._move(item.outer, self.kept[item.outer], [ruled])
        else:
            self.settled[item.outer] = self.kept[item.outer]

    def _settles_alike(self, item: ir.Collected[Value]) -> bool:
        """Whether a whole gradient keeps the placement in which its parts arise."""
        return item.inside.role == "grad" and self.request.waits(item.outer)

    def _sliced(self, item: ir.Stacked[Value]) -> dict[Placement, Terms]:
        """Placements of a slice: those of the stack, made whole along the dim of the loop."""
        loop = next(d for d in item.outer.type.names if not item.inside.type.has(d))
        return self._whole_along(loop, item.outer)

    def _whole_along(self, loop: str, stack: Value) -> dict[Placement, Terms]:
        found: dict[Placement, list[Terms]] = {}
        for p, here in self.settled[stack].items():
            found.setdefault(p.without_dim(loop), []).append(here)
        return {p: total(parts) for p, parts in found.items()}

    def _settle_among(self, value: Value, found: list[Placement]) -> None:
        self.settled[value] = dict(zip(found, self.lp.choice(len(found)), strict=True))

    def _settle_carry(self, carry: ir.Carry[Value], loop: str) -> None:
        """One placement for the value inside a loop and for the loop's result."""
        found = self.space.targets(carry.inside, ())
        ruled = self.request.ruled(carry.next)
        if self.request.is_settled(carry.next) and ruled in found:
            found = [ruled]
        sliced = self.space.sliced[carry.result]
        found = [p for p in found if not any(p.axes_of(d) for d in (loop, *sliced))]
        self._settle_among(carry.inside, found)
        self.settled[carry.result] = self.settled[carry.inside]
        self.space.need(carry.init, found)
        self.space.need(carry.next, found)

    def _settle_results(
        self, op: Op, targets: Mapping[Value, list[Placement]], shared: set[Value]
    ) -> None:
        """The combination of an operator, and for each result an edge to where it settles."""
        combinations = self.space.combinations[op]
        self.picks[op] = self.lp.choice(len(combinations))
        most = max(c.flops for c in combinations) or 1
        for pick, c in zip(self.picks[op], combinations, strict=True):
            computing = c.cost * self.space.trips[op.outs[0]]
            self.lp.pay(pick, computing + self.tie * c.flops / most / 4)
        for index, value in enumerate(op.outs):
            yields: dict[Placement, list[Terms]] = {}
            for pick, c in zip(self.picks[op], combinations, strict=True):
                yields.setdefault(c.yields[index], []).append(pick)
            found = targets[value]
            if value not in shared:
                found = self._undominated(value, list(yields), found)
            self._move(value, {p: total(picks) for p, picks in yields.items()}, found)

    def _undominated(
        self, value: Value, yields: list[Placement], targets: list[Placement]
    ) -> list[Placement]:
        """Targets less those that are nowhere cheaper than another one."""
        needs = self.space.readers.get(value, {})
        costs: dict[Placement, tuple[float, ...]] = {}
        for p in targets:
            pairs = [*((y, p) for y in yields), *((p, n) for n in needs)]
            costs[p] = tuple(self._cost(value, *pair) for pair in pairs)
        kept: list[Placement] = []
        for p in targets:
            others = [q for q in targets if q != p and (q in kept or costs[q] != costs[p])]
            better = (all(a <= b for a, b in zip(costs[q], costs[p], strict=True)) for q in others)
            if not any(better):
                kept.append(p)
        return kept

    def _move(self, value: Value, yields: dict[Placement, Terms], targets: list[Placement]) -> None:
        """An edge from each yielded placement to each settled one; exactly one is taken."""
        into: dict[Placement, list[Terms]] = {p: [] for p in targets}
        for source, picks in yields.items():
            found = [p for p in targets if self._cost(value, source, p) < math.inf]
            if len(found) == 1:
                edges = [picks]
            elif picks is ALWAYS or len(yields) == 1:
                edges = self.lp.choice(len(found))
            else:
                edges = [self.lp.variable() for _ in found]
                self.lp.equal(total(edges), picks)
            for target, edge in zip(found, edges, strict=True):
                into[target].append(edge)
                self.lp.pay(edge, self._cost(value, source, target))
        self.settled[value] = {p: total(edges) for p, edges in into.items() if edges}

    def _cost(self, value: Value, source: Placement, target: Placement) -> float:
        """The cost of a reshard of a value in all iterations, with its weight among ties."""
        costs = self.costs.setdefault(value, {})
        if (source, target) not in costs:
            costs[source, target] = self._priced(value, source, target)
        return costs[source, target]

    def _priced(self, value: Value, source: Placement, target: Placement) -> float:
        found = self.space.route(value, source, target)
        if found is None:
            return math.inf
        tie = self.tie * (found.collectives + found.kernels / 8)
        return self.price.of(found, value.type) * self.space.trips[value] + tie

    # --- readers -----------------------------------------------------------------------------

    def _read_all(self) -> None:
        for op, combinations in self.space.combinations.items():
            for index, value in enumerate(op.ins):
                wanted: dict[Placement, list[Terms]] = {}
                for pick, c in zip(self.picks[op], combinations, strict=True):
                    wanted.setdefault(c.needs[index], []).append(pick)
                self._read(value, {p: total(picks) for p, picks in wanted.items()})
        for loop in self.space.loops:
            self._read_loop(loop)
        for output in self.space.program.outputs:
            self._read(output.value, {self.space.outputs[output.value]: ALWAYS})
        for update in self.space.program.updates:
            self._read(update.new, {self.request.stored(update.old): ALWAYS})

    def _read_loop(self, loop: named.Loop) -> None:
        for carry in loop.carries:
            self._read(carry.init, self.settled[carry.inside])
            self._read(carry.next, self.settled[carry.inside])
        for made in loop.collected:
            if made.outer in self.kept:
                self._read(made.inside, self.kept[made.outer])
        for piece in loop.stacked:
            self._read_stack(piece, loop.dim.name)

    def _read_stack(self, item: ir.Stacked[Value], loop: str) -> None:
        """A stack that is split along the dim of its loop is made whole along it before."""
        if any(p.axes_of(loop) for p in self.settled[item.outer]):
            self._read(item.outer, self._whole_along(loop, item.outer))

    def _read(self, value: Value, wanted: dict[Placement, Terms]) -> None:
        """One reader: flows from where the value settled to the placements the reader needs."""
        settled = self.settled[value]
        if len(wanted) == 1:
            (need,) = wanted
            flows = {(source, need): here for source, here in settled.items()}
        elif len(settled) == 1:
            (source,) = settled
            flows = {(source, need): picks for need, picks in wanted.items()}
        else:
            flows = self._transport(value, settled, wanted)
        paid: Reader = {}
        for pair, terms in flows.items():
            cost = self._cost(value, *pair)
            if cost == math.inf:
                self.lp.equal(terms, {})
            elif cost:
                paid[pair] = terms
        self.readers.setdefault(value, []).append(paid)

    def _transport(
        self, value: Value, settled: dict[Placement, Terms], wanted: dict[Placement, Terms]
    ) -> Reader:
        pairs = itertools.product(settled, wanted)
        possible = [pair for pair in pairs if self._cost(value, *pair) < math.inf]
        flows = {pair: self.lp.variable(whole=False) for pair in possible}
        for source, here in settled.items():
            self.lp.equal(total(f for (s, _), f in flows.items() if s == source), here)
        for need, picks in wanted.items():
            self.lp.equal(total(f for (_, n), f in flows.items() if n == need), picks)
        return flows

    def _make(self, value: Value) -> None:
        """The versions that are sent, and the one that each reader takes."""
        readers = self.readers[value]
        pairs = list(dict.fromkeys(pair for paid in readers for pair in paid))
        pairs = list(dict.fromkeys([*pairs, *_hulls(pairs)]))
        others = {pair: self._sources(value, pair, pairs) for pair in pairs}
        linked = {pair for pair in pairs if others[pair]}.union(*others.values())
        made = {}
        for pair in pairs:
            here = self.settled[value][pair[0]]
            reading = [paid[pair] for paid in readers if pair in paid]
            made[pair] = self._version(here, reading, pair in linked)
            self.lp.pay(made[pair], self._cost(value, *pair))
        for paid, local in zip(readers, self._local(value, readers, others), strict=True):
            self._take(paid, made, local)
        self.versions[value] = made

    def _local(
        self, value: Value, readers: list[Reader], others: dict[Pair, list[Pair]]
    ) -> list[Local]:
        """By reader g, what it makes of other versions. A window is paid for once, for all."""
        found: list[Local] = []
        for paid in readers:
            found.append({p: {k: self.lp.variable(whole=False) for k in others[p]} for p in paid})
        for pair, sources in others.items():
            for other in sources:
                parts = [local[pair][other] for local in found if pair in local]
                if pair[1].windows and len(parts) > 1:
                    once = self.lp.variable(whole=False)
                    for part in parts:
                        self.lp.at_most(part, once)
                    parts = [once]
                for part in parts:
                    self.lp.pay(part, self._cost(value, other[1], pair[1]))
        return found

    def _sources(self, value: Value, pair: Pair, pairs: list[Pair]) -> list[Pair]:
        """Versions of the same source from which that of `pair` can be made locally."""
        source, need = pair
        same = [(s, n) for s, n in pairs if s == source and n != need]
        if self._is_local(value, source, need):  # but of a wider window nothing is sent
            same = [(s, n) for s, n in same if n.windows]
        return [(s, n) for s, n in same if self._is_local(value, n, need)]

    def _is_local(self, value: Value, source: Placement, target: Placement) -> bool:
        """Whether the route sends nothing; or but a halo, of blocks that others may share."""
        if target.windows and source == target.plain:
            return True
        if not source.may_become(target):
            return False
        found = self.space.route(value, source, target)
        return found is not None and not found.collectives

    def _version(self, here: Terms, reading: list[Terms], linked: bool) -> Terms:
        """The quantity of a version; a variable only where no existing quantity equals it."""
        if linked:
            return self.lp.variable()
        if here in reading:
            return here
        same = all(terms == reading[0] for terms in reading)
        return reading[0] if same else self.lp.variable(whole=False)

    def _take(self, paid: Reader, made: dict[Pair, Terms], local: Local) -> None:
        """Make a reader take one version: of each it takes no more in all than there is."""
        taken: dict[Pair, list[Terms]] = {}
        for pair, terms in paid.items():
            for other, part in local[pair].items():
                taken.setdefault(other, []).append(part)
            made_of = ({i: -c for i, c in part.items()} for part in local[pair].values())
            rest = total([terms, *made_of])
            if local[pair]:
                self.lp.at_most({}, rest)
            taken.setdefault(pair, []).append(rest)
        for pair, parts in taken.items():
            if (terms := total(parts)) != made[pair]:
                self.lp.at_most(terms, made[pair])

    # --- the answer --------------------------------------------------------------------------

    def _plan(self, answer: Answer) -> Plan:
        choices = {op: self._choice(op, answer) for op in self.picks}
        loops = self.space.loops
        carried = {c.inside: self.settled[c.inside] for loop in loops for c in loop.carries}
        collected = (c.outer for loop in loops for c in loop.collected)
        carried |= {v: self.kept.get(v, self.settled[v]) for v in collected}
        carries = {v: _picked(found, answer) for v, found in carried.items()}
        versions = {v: self._sent(v, answer) for v in self.versions}
        # The space has no placements before the loop of a stack that is split along its loop.
        split = any(
            self._settled_in(s.outer, answer).axes_of(loop.dim.name)
            for loop in loops
            for s in loop.stacked
        )
        # All ties together weigh less than one.
        cost, proven = math.floor(answer.cost), answer.proven and not split
        return Plan(choices, carries, versions, self.price, cost, proven)

    def _choice(self, op: Op, answer: Answer) -> Choice:
        picks = zip(self.picks[op], self.space.combinations[op], strict=True)
        picked = next(c for pick, c in picks if answer.of(pick))
        targets = tuple(self._settled_in(v, answer) for v in op.outs)
        return Choice(picked.needs, picked.yields, targets)

    def _settled_in(self, value: Value, answer: Answer) -> Placement:
        return _picked(self.settled[value], answer)

    def _sent(self, value: Value, answer: Answer) -> tuple[Placement, ...]:
        here = self._settled_in(value, answer)
        made = self.versions[value].items()
        return tuple(n for (s, n), terms in made if s == here and answer.of(terms))


def _hulls(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Windows that cover two that are read of the same blocks: one exchange serves both readers."""
    windowed = [(s, n) for s, n in pairs if s == n.plain and len(n.windows) == 1]
    for (source, one), (other, two) in itertools.combinations(windowed, 2):
        hull = one.windows[0].hull(two.windows[0]) if source == other else None
        if hull is not None:
            yield source, replace(one, windows=(hull,))


def _picked(options: Mapping[Placement, Terms], answer: Answer) -> Placement:
    return next(p for p, terms in options.items() if answer.of(terms))


def _partial_ops(components: Iterable[Component]) -> set[ReduceOp]:
    return {c.op for c in components if isinstance(c, Partial)}


def _sorted_ops(ops: Iterable[ReduceOp | None]) -> list[ReduceOp]:
    """The operations present; sums where there are none."""
    sums: list[ReduceOp] = ["sum"]
    return sorted({op for op in ops if op}) or sums


def _stands(row: Row, axis: str, ruled: tuple[Placement, ...]) -> bool:
    """Whether the row takes as it is every operand that rules split along the axis."""
    return all(
        not isinstance(p.component(axis), Split) or p.component(axis) == component
        for component, p in zip(row.ins, ruled, strict=True)
    )


def _agrees(row: Row, axis: str, wants: tuple[Want, ...]) -> bool:
    """Whether no result is split otherwise than demanded."""
    pairs = zip(row.outs, (w.placement.component(axis) for w in wants), strict=True)
    return not any(isinstance(c, Split) and isinstance(w, Split) and c != w for c, w in pairs)


def _spares(op: Op, rows: list[Row]) -> bool:
    """Whether gathering the operands sends less than reducing what every row leaves partial.

    Only where a whole result on every device is cheap: a lookup's gradient, not a product. Rules
    for the splits of a parameter are followed.
    """
    split = {v for row in rows for v, c in zip(op.ins, row.ins, strict=True) if c != B}
    if not all(_partial_ops(row.outs) for row in rows) or any(v.role == "param" for v in split):
        return False
    gathered = min(_split_bytes(op, row) for row in rows)
    call = call_of(op)
    moved = sum(v.type.elements for v in (*op.ins, *op.outs))
    light = flops(call.opdef, call.signature) <= LIGHT * moved
    return light and gathered < 2 * sum(v.type.bytes for v in op.outs)


def _split_bytes(op: Op, row: Row) -> int:
    pairs = zip(op.ins, row.ins, strict=True)
    return sum(v.type.bytes for v, component in pairs if isinstance(component, Split))
