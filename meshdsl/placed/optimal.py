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

Bytes of a route are those of the device that sends most by it; what counts of a program is what its
busiest device sends in all. These are the same where one device sends the most by every route.

Proven, as `PlacementPlan.least`: of the space that was searched, no plan costs less, by the
solver's bound, and there is such a device. The space is the widest of three spaces that is small
enough. Operators take the rows that keep the splits of rules (`PlanSpace._rows`). A value settles
in the splits that rules demand, or stays as it is made for readers that pass it on
(`PlanSpace._waiting`). On axes without a rule, values may be whole, partial or split; else split
only as some rule splits that dim elsewhere; else not split. Not proven: other orders of products of
many operands (one is given), and what a stack that is split along its loop might have become before
it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from meshdsl.ir import program as ir
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.named.ir import NamedOp, Value
from meshdsl.placed.ilp_candidates import PlanProblem, PlanSpace, RouteKey, Splits
from meshdsl.placed.ir import EVERY
from meshdsl.placed.placements import Placement
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import Price
from meshdsl.placed.strategies import Choice, Chooser
from meshdsl.placed.zero_one import ALWAYS, Answer, NoPlan, Terms, ZeroOne, total
from meshdsl.records import dataclass

MOST_COEFFICIENTS = 250_000
"""The largest 0-1 program attempted, in coefficients."""

MOST_DEVICES = 16
"""The most devices among which one is looked for that sends the most by every route."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The placements of a whole program, decided at once: a `Decider`.

    choices: operand and result placements of each operator, and where its results settle. carried:
    the placements of what loops carry and collect. sent: per value, the versions that something is
    sent for. `cost` is that of all reshards, and operators, by `price`, in all iterations.
    `least`: no other plan costs less, of those that were `searched`.
    """

    choices: dict[NamedOp, Choice]
    carried: dict[Value, Placement]
    sent: dict[Value, tuple[Placement, ...]]
    price: Price
    cost: int
    least: bool
    searched: str = ""
    policy: str = "optimal"
    foresees: ClassVar[bool] = True

    def choice(self, op: NamedOp, chooser: Chooser) -> Choice | None:
        """The choice for an operator, whatever the chooser would have taken."""
        return self.choices[op]

    def carries(self, loop: named.NamedLoop) -> Mapping[Value, Placement] | None:
        """The placements of all carries and collected values."""
        return self.carried

    def versions(self, value: Value) -> tuple[Placement, ...]:
        """The versions that something is sent for."""
        return self.sent.get(value, ())


def solve(request: Request, price: Price) -> PlacementPlan | None:
    """The plan of least cost; None where the search is too large.

    The program of `request` is rewritten: it has no composite whose own dim is split, and no n-ary
    einsum. The widest space that is not too large is searched; the plan is the least of that space.
    Of a stage nothing is proven for all stages, so not every split is looked at.
    """
    spaces: dict[str, Splits | None] = {EVERY: None, KNOWN: request.known, NONE: frozenset()}
    if request.one_stage is not None:
        del spaces[EVERY]
    problem = PlanProblem(request, price)
    for searched, splits in spaces.items():
        try:
            plan = Model(PlanSpace(problem, splits)).plan()
        except NoPlan:
            continue
        if plan is not None:
            return replace(plan, searched=searched)
    return None


KNOWN, NONE = ("splits that rules know", "whole and partial values only")
"""The spaces searched, short of `EVERY`, on axes without a rule."""


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

    def __init__(self, space: PlanSpace) -> None:
        self.space, self.request, self.price = space, space.request, space.price
        self.lp = ZeroOne(MOST_COEFFICIENTS)
        self.costs: dict[Value, dict[Pair, float]] = {}
        self.costs_by_type: dict[tuple[TensorType, int], dict[Pair, float]] = {}
        self.picks: dict[NamedOp, list[Terms]] = {}
        self.settled: dict[Value, dict[Placement, Terms]] = {}
        self.kept: dict[Value, dict[Placement, Terms]] = {}
        self.readers: dict[Value, list[Reader]] = {}
        self.versions: dict[Value, dict[Pair, Terms]] = {}
        self.tie = 0.25 / (1 + len(space.trips) + len(space.combinations))
        """The weight of a collective beside a byte; that of a local step is an eighth."""

    def plan(self) -> PlacementPlan | None:
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
        self.space.expect(self._priced_anyway(targets))
        for op in self.space.combinations:
            self._settle_results(op, targets, shared)
        for item in collected:
            if item not in apart:
                self.settled[item.outer] = self.settled[item.inside]
        for piece in stacked:
            self.settled[piece.inside] = self._sliced(piece)

    def _priced_anyway(self, targets: Mapping[Value, list[Placement]]) -> Iterator[RouteKey]:
        """The routes of stored values to their readers, and of results to where they may settle."""
        for value in self.space.stored:
            for need in self.space.readers.get(value, ()):
                yield value.type, self.request.ruled(value), need
        for op, combinations in self.space.combinations.items():
            for index, value in enumerate(op.outs):
                yields = dict.fromkeys(c.yields[index] for c in combinations)
                for source, target in itertools.product(yields, targets[value]):
                    yield value.type, source, target

    def _settle_collected(self, item: ir.Collected[Value]) -> None:
        """Place a collected value as its parts; a rule that splits the loop's dim applies later."""
        loop = next(d for d in item.outer.type.names if not item.inside.type.has(d))
        candidates = self.space.kept(item, loop)
        self.kept[item.outer] = dict(zip(candidates, self.lp.choice(len(candidates)), strict=True))
        self.space.need(item.inside, candidates)
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
        by_placement: dict[Placement, list[Terms]] = {}
        for p, here in self.settled[stack].items():
            by_placement.setdefault(p.without_dim(loop), []).append(here)
        return {p: total(parts) for p, parts in by_placement.items()}

    def _settle_among(self, value: Value, found: list[Placement]) -> None:
        self.settled[value] = dict(zip(found, self.lp.choice(len(found)), strict=True))

    def _settle_carry(self, carry: ir.Carry[Value], loop: str) -> None:
        """One placement for the value inside a loop and for the loop's result."""
        candidates = self.space.targets(carry.inside, ())
        ruled = self.request.ruled(carry.next)
        if self.request.is_settled(carry.next) and ruled in candidates:
            candidates = [ruled]
        sliced = self.space.sliced[carry.result]
        candidates = [p for p in candidates if not any(p.axes_of(d) for d in (loop, *sliced))]
        self._settle_among(carry.inside, candidates)
        self.settled[carry.result] = self.settled[carry.inside]
        self.space.need(carry.init, candidates)
        self.space.need(carry.next, candidates)

    def _settle_results(
        self, op: NamedOp, targets: Mapping[Value, list[Placement]], shared: set[Value]
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
            candidates = targets[value]
            if value not in shared:
                candidates = self._undominated(value, list(yields), candidates)
            self._move(value, {p: total(picks) for p, picks in yields.items()}, candidates)

    def _undominated(
        self, value: Value, yields: list[Placement], targets: list[Placement]
    ) -> list[Placement]:
        """Targets less those that are nowhere cheaper than another one."""
        needs = self.space.readers.get(value, {})
        costs: dict[Placement, tuple[float, ...]] = {}
        for p in targets:
            pairs = [*((y, p) for y in yields), *((p, n) for n in needs)]
            costs[p] = tuple(self._cost(value, *pair) for pair in pairs)
        # Of targets that cost the same everywhere, the first stands for all.
        first: dict[tuple[float, ...], Placement] = {}
        for p, cost in costs.items():
            first.setdefault(cost, p)
        return [
            p
            for cost, p in first.items()
            if not any(
                other is not cost and all(a <= b for a, b in zip(other, cost, strict=True))
                for other in first
            )
        ]

    def _move(self, value: Value, yields: dict[Placement, Terms], targets: list[Placement]) -> None:
        """An edge from each yielded placement to each settled one; exactly one is taken."""
        into: dict[Placement, list[Terms]] = {p: [] for p in targets}
        for source, picks in yields.items():
            reachable = [p for p in targets if self._cost(value, source, p) < math.inf]
            if len(reachable) == 1:
                edges = [picks]
            elif picks is ALWAYS or len(yields) == 1:
                edges = self.lp.choice(len(reachable))
            else:
                edges = [self.lp.variable() for _ in reachable]
                self.lp.equal(total(edges), picks)
            for target, edge in zip(reachable, edges, strict=True):
                into[target].append(edge)
                # Of plans that cost the same, that which settles values earlier holds less.
                waits = bool(target.partial) or self.space.waits(value, target)
                self.lp.pay(edge, self._cost(value, source, target) + waits * self.tie / 16)
        self.settled[value] = {p: total(edges) for p, edges in into.items() if edges}

    def _cost(self, value: Value, source: Placement, target: Placement) -> float:
        """The cost of a reshard of a value in all iterations, with its weight among ties.

        Values of the same type that are computed equally often share their costs.
        """
        costs = self.costs.get(value)
        if costs is None:
            key = value.type, self.space.trips[value]
            costs = self.costs[value] = self.costs_by_type.setdefault(key, {})
        pair = source, target
        cost = costs.get(pair)
        if cost is None:
            cost = costs[pair] = self._priced(value, source, target)
        return cost

    def _priced(self, value: Value, source: Placement, target: Placement) -> float:
        cheapest_route = self.space.route(value, source, target)
        if cheapest_route is None:
            return math.inf
        tie = self.tie * (cheapest_route.collectives + cheapest_route.kernels / 8)
        return self.price.of(cheapest_route, value.type) * self.space.trips[value] + tie

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

    def _read_loop(self, loop: named.NamedLoop) -> None:
        for carry in loop.carries:
            self._read(carry.init, self.settled[carry.inside])
            self._read(carry.next, self.settled[carry.inside])
        for item in loop.collected:
            if item.outer in self.kept:
                self._read(item.inside, self.kept[item.outer])
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
            cost = self._cost(value, *pair) if self.space.may_read(value, *pair) else math.inf
            if cost == math.inf:
                self.lp.equal(terms, {})
            elif cost:
                paid[pair] = terms
        self.readers.setdefault(value, []).append(paid)

    def _transport(
        self, value: Value, settled: dict[Placement, Terms], wanted: dict[Placement, Terms]
    ) -> Reader:
        pairs = itertools.product(settled, wanted)
        possible = [
            pair
            for pair in pairs
            if self.space.may_read(value, *pair) and self._cost(value, *pair) < math.inf
        ]
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
        sent = {}
        for pair in pairs:
            here = self.settled[value][pair[0]]
            reading = [paid[pair] for paid in readers if pair in paid]
            sent[pair] = self._version(here, reading, pair in linked)
            self.lp.pay(sent[pair], self._cost(value, *pair))
        for paid, local in zip(readers, self._local(value, readers, others), strict=True):
            self._take(paid, sent, local)
        self.versions[value] = sent

    def _local(
        self, value: Value, readers: list[Reader], others: dict[Pair, list[Pair]]
    ) -> list[Local]:
        """By reader g, what it makes of other versions. A window is paid for once, for all."""
        by_reader: list[Local] = []
        for paid in readers:
            by_reader.append(
                {p: {k: self.lp.variable(whole=False) for k in others[p]} for p in paid}
            )
        for pair, sources in others.items():
            for other in sources:
                parts = [local[pair][other] for local in by_reader if pair in local]
                if pair[1].windows and len(parts) > 1:
                    once = self.lp.variable(whole=False)
                    for part in parts:
                        self.lp.at_most(part, once)
                    parts = [once]
                for part in parts:
                    self.lp.pay(part, self._cost(value, other[1], pair[1]))
        return by_reader

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
        cheapest_route = self.space.route(value, source, target)
        return cheapest_route is not None and not cheapest_route.collectives

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
            remainder = total([terms, *made_of])
            if local[pair]:
                self.lp.at_most({}, remainder)
            taken.setdefault(pair, []).append(remainder)
        for pair, parts in taken.items():
            if (terms := total(parts)) != made[pair]:
                self.lp.at_most(terms, made[pair])

    # --- the answer --------------------------------------------------------------------------

    def _plan(self, answer: Answer) -> PlacementPlan:
        choices = {op: self._choice(op, answer) for op in self.picks}
        loops = self.space.loops
        carried = {c.inside: self.settled[c.inside] for loop in loops for c in loop.carries}
        collected = (c.outer for loop in loops for c in loop.collected)
        carried |= {v: self.kept.get(v, self.settled[v]) for v in collected}
        carries = {v: _picked(terms, answer) for v, terms in carried.items()}
        versions = {v: self._sent(v, answer) for v in self.versions}
        # The space has no placements before the loop of a stack that is split along its loop.
        split = any(
            self._settled_in(s.outer, answer).axes_of(loop.dim.name)
            for loop in loops
            for s in loop.stacked
        )
        # All ties together weigh less than one.
        cost, proven = math.floor(answer.cost), answer.proven and not split
        if self.space.unlike and self.price.clock is None:
            proven = proven and self._has_busiest()
        return PlacementPlan(choices, carries, versions, self.price, cost, proven)

    def _has_busiest(self) -> bool:
        """Whether some device sends the most by each route: so it does by all routes of any plan.

        Looked for among `MOST_DEVICES` devices.
        """
        mesh = self.request.mesh
        ranks = range(0, mesh.devices, -(-mesh.devices // MOST_DEVICES))
        devices = [mesh.coordinates(rank) for rank in ranks]
        for way, type_ in self.space.unlike:
            devices = [at for at in devices if way.sent_at(type_, mesh, at) == way.wire_bytes]
        return bool(devices)

    def _choice(self, op: NamedOp, answer: Answer) -> Choice:
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
