"""Methods `layouts` and `exhaustive`: every layout of a space, evaluated by walks or bounded.

General rules that divide the work (`space.py`) are ordered by what the tables say (`tables.py`) and
placed by the walk `deferred`, and by `immediate` as long as that may be better; each with rules for
storage (`storage_rules.py`) as far as these can lead to something better. `exhaustive` is the same
without bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import field
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

from meshdsl.diagnostics import DiagnosticError, fail
from meshdsl.option_edits import give
from meshdsl.pipeline import lower_placed
from meshdsl.records import dataclass
from meshdsl.search.budget import LISTING
from meshdsl.search.candidate import Candidate, Rules, first_of_each
from meshdsl.search.hill_climbing import climbed
from meshdsl.search.lower_bounds import ROUNDING, Beyond
from meshdsl.search.practice import practised
from meshdsl.search.problem import Count, Problem, SearchResult
from meshdsl.search.space import LayoutSpace, Weigh, seconds
from meshdsl.search.storage_rules import on_other_dims, stored, stored_rules, uniform
from meshdsl.search.tables import Tables
from meshdsl.syntax.symbols import ROLES

MOST = 64
"""The layouts of general rules, and those with rules for storage, that `layouts` places at most.

The first by the tables; the others are left, and nothing is proven. `exhaustive` places them too.
"""

LISTED = 10_000
"""The layouts that `layouts` lists; of a larger space it climbs (`hill_climbing.py`)."""

STORED = 8_000
"""The operators in those with rules for storage, where a layout without them fits already.

On lm, nmt, dlrm, mlp and moe, four devices, two meshes and two clusters, the first 8 layouts find
what 64 do. Half of these operators found layouts up to 7 % slower for the rows of `docs/costs.md`.
"""

BY_WORK = 500
"""The layouts that are placed by work at most, to find one that divides it as far as asked."""

PRACTICE = 6
"""The layouts of practitioners that are placed in a space of which not all are."""

FIRST = 4
"""The layouts that are placed to know a time that others have to stay below."""

T = TypeVar("T")

Key = Callable[[Rules], Any]
"""What layouts are ordered by: a number, or several, the first of them first."""

Placed = list[tuple[Rules, list[Candidate]]]
"""Layouts of general rules, with their plans; none of one that was not placed to its end."""

SHOWN = 6
"""The plans that are ordered exactly: the best, and those that come next."""


@dataclass(slots=True)
class _Enumeration:
    """One search: what was evaluated so far, and the best that fits.

    `ended` are layouts of which a walk is worse than another one, or than the `first` values of all
    that fit, and the bytes it had sent when this was seen; of `unplaced` ones that is so of each
    walk. `kept` are the seconds of such a walk that rules for storage cannot change: where such
    rules are tried (`stores`), it goes on until these seconds alone make it worse. It is `cut`
    where the time is over before all are listed.
    """

    problem: Problem
    tables: Tables
    most_work: float
    most: float
    stores: bool = False
    plans: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None
    valid: int = 0
    evaluated: int = 0
    bounded: int = 0
    ended: dict[Rules, float] = field(default_factory=dict)
    unplaced: int = 0
    stored: int = 0
    kept: dict[tuple[Rules, str], float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    listed: list[tuple[float, Rules]] = field(default_factory=list)
    cut: bool = False

    def in_time(self, items: Iterable[T]) -> Iterator[T]:
        """The items that are asked for before the time is over; the first at least."""
        for item in items:
            yield item
            self.problem.budget.spend(LISTING)
            if self.problem.expired():
                self.cut = True
                return

    def held(self, rules: Rules) -> tuple[int, int]:
        """What a layout holds on a device at least, then what it sends at most."""
        plan = self.problem.plan(rules, self.problem.policies[0])
        return plan.held_at_least, self.tables.sent(rules)

    def ordered(self, layouts: Iterable[Rules], key: Key) -> list[Rules]:
        """Layouts by a key, as far as there is time to compute it."""
        keyed = [(key(rules), number, rules) for number, rules in enumerate(self.in_time(layouts))]
        return [rules for _, _, rules in sorted(keyed)]

    @property
    def reached(self) -> float:
        """The value that a plan has to be below, or equal to, to be of interest."""
        best = math.inf if self.best is None else self.problem.value(self.best)
        return min(best, self.problem.below)

    @property
    def _tried(self) -> int:
        return self.evaluated + self.unplaced

    @property
    def worth(self) -> float:
        """The value beyond which a plan is not among the first, nor better than another mesh."""
        problem = self.problem
        if self.most == math.inf or problem.request.front or problem.objective == "memory":
            return math.inf
        last = self.first[SHOWN - 1] if len(self.first) >= SHOWN else math.inf
        return min(last, problem.below)

    def consider(self, rules: Rules) -> list[Candidate] | None:
        """Place a layout by each walk that may be better; its plans, also those out of limits.

        None where it cannot be placed: two rules may meet in a tensor that only the expansion
        of an operator has. A layout that is not among the first has no plans.
        """
        try:
            placed = self._made(rules)
        except DiagnosticError:
            self.problem.drop(rules)
            self.valid -= 1
            return None
        if not placed:
            self.bounded, self.unplaced = self.bounded + 1, self.unplaced + 1
            return placed
        self.evaluated += 1
        divided = [plan for plan in placed if self._divides(plan)]
        self.plans += divided
        for plan in divided:
            if self.problem.is_better(plan, self.best):
                self.best = plan
        self._rank(divided)
        return placed

    def _made(self, rules: Rules) -> list[Candidate]:
        """The plans of a layout; none where each sends too much to be among the first.

        Where one walk divides the work and fits, another one is placed as long as it may be better.
        """
        placed, ended = list[Candidate](), list[Beyond]()
        timed = self.problem.objective == "time"
        computing = self.problem.computing(rules) if timed else None
        least, worth, kept = math.inf, self.worth, self._most_kept(rules)
        self._ask([rules])
        self.problem.spend()
        for policy in self.problem.policies:
            plan = self.problem.plan(rules, policy)
            if beyond := self.problem.within(plan, min(worth, least), computing, kept):
                ended.append(beyond)
                self.kept[rules, policy] = beyond.kept
                continue
            placed.append(plan)
            if self.most < math.inf and self._divides(plan) and self._fits(plan):
                least = min(least, plan.seconds if timed else plan.sent_at_most)
        if ended:
            self.ended[rules] = min(beyond.bytes for beyond in ended)
        return placed

    def _most_kept(self, rules: Rules) -> float:
        """The seconds of a layout that is worse which no rules for storage may make better."""
        return self.reached if self.stores and not stored_rules(rules) else -math.inf

    def _ask(self, layouts: list[Rules]) -> None:
        """Let the second process place layouts while this one does."""
        timed = self.problem.objective == "time"
        for rules in layouts:
            computing = self.problem.computing(rules) if timed else None
            kept = self._most_kept(rules)
            self.problem.ask(rules, self.worth, computing, self.worth, kept)

    def _rank(self, plans: list[Candidate]) -> None:
        """Note the value of a layout, if it is among the first."""
        problem = self.problem
        if self.worth == math.inf and (self.most == math.inf or problem.request.front):
            return
        near = (plan for plan in plans if problem.at_least(plan) <= self.worth)
        values = [problem.at_most(plan) for plan in near if problem.fits(plan)]
        if values:
            self.first = sorted([*self.first, min(values)])[:SHOWN]

    def _divides(self, plan: Candidate) -> bool:
        """Whether a plan divides the work as far as asked."""
        return self.most_work == math.inf or plan.flops <= self.most_work

    def _fits(self, plan: Candidate) -> bool:
        """Whether no other walk is needed for the sake of memory."""
        if self.problem.objective == "memory" or self.problem.request.front:
            return False
        return self.problem.fits(plan)

    def general(self, layouts: list[Rules]) -> Placed:
        """Place layouts of general rules in order; those that could be placed, the best first.

        What is known to be too large is not placed: rules for storage may make it fit.
        """
        problem, ranked = self.problem, Placed()
        bounds = problem.objective == "time" and self.most < math.inf and not problem.request.front
        self.valid += len(layouts)
        for rules in layouts:
            if self._tried - self.stored >= self.most:
                break
            if self._tried and problem.expired():
                break
            if bounds and problem.is_too_large(problem.plan(rules, problem.policies[0])):
                self.bounded += 1
                ranked.append((rules, []))
                continue
            plans = self.consider(rules)
            if plans is not None:
                ranked.append((rules, plans))
        return sorted(ranked, key=self.least)

    def practised(self, space: LayoutSpace, key: Key, storage: bool) -> Placed:
        """Place the best layouts of practitioners, by a key; what does not fit is stored in parts.

        Of ZeRO's stages over all axes the first is taken that fits.
        """
        problem, placed = self.problem, Placed()
        every = [r for r in practised(space) if _is_short(r, problem)]
        if self.most_work < math.inf and not _is_narrow(problem):
            every = [rules for rules in every if space.of(rules) <= self.most_work]
        may_fit = [r for r in every if not all(map(self._is_too_large, self._repaired(r, storage)))]
        for rules in self.ordered(may_fit, key)[:PRACTICE]:
            if self._tried and problem.expired():
                break
            plans = list[Candidate]()
            for extended in self._repaired(rules, storage):
                self.valid += 1
                if self._is_too_large(extended):
                    self.bounded += 1
                    continue
                candidates = self.consider(extended)
                plans = candidates or [] if extended == rules else plans
                if extended in self.ended or any(map(problem.fits, candidates or ())):
                    break
            placed.append((rules, plans))
        return placed

    def _repaired(self, rules: Rules, storage: bool) -> Iterator[Rules]:
        """Rules as they are, then with what is stored in parts over all axes."""
        yield rules
        for more in uniform(self.problem.program, self.problem.mesh, rules) if storage else ():
            if _is_short(extended := (*rules, *more), self.problem):
                yield extended

    def by_work(
        self, listed: list[tuple[float, Rules]], counted: Collection[Rules], placed: Placed
    ) -> Placed:
        """Place the first layout listed, then by work, until one divides it as far as asked.

        A search whose time is over at once answers with that one; a longer one is never worse.
        Those `counted` are known to be valid; those `placed` are not placed again.
        """
        plans_of, more = dict(placed), Placed()
        ordered = [*listed[:1], *sorted(listed, key=lambda w: w[0])[:BY_WORK]]
        for _, rules in ordered:
            if rules not in plans_of:
                self.valid += rules not in counted
                plans = self.consider(rules)
                more += [] if plans is None else [(rules, plans)]
                plans_of[rules] = plans or []
            if rules in self.ended or any(map(self._divides, plans_of[rules])):
                break
            if self.plans and self.problem.expired():
                break
        return more

    def least(self, found: tuple[Rules, list[Candidate]]) -> float:
        """What is known of the value of a layout: in bytes, a lower bound."""
        rules, plans = found
        ended = self.ended.get(rules, math.inf) if self.problem.objective == "bytes" else math.inf
        return min([*map(self.problem.at_least, plans), ended])

    def best_whole(self, placed: Placed) -> Placed:
        """Layouts by their value without storage rules, best first, whether they fit or not.

        The order is by bounds. The first few, whose bounds are nearly equal, are ordered exactly.
        """
        problem = self.problem
        known = [(r, [p for p in problem.plans(r) if p.is_known]) for r, _ in placed]
        order = {rules: (self.least((rules, plans)), plans) for rules, plans in known}
        every = sorted(placed, key=lambda found: order[found[0]][0])

        def value(found: tuple[Rules, list[Candidate]]) -> float:
            return min(map(problem.value, order[found[0]][1]), default=math.inf)

        return [*sorted(every[:SHOWN], key=value), *every[SHOWN:]]

    def storage(self, placed: Placed, space: LayoutSpace) -> None:
        """Place them with rules for storage, too, unless that cannot be better."""
        problem, most, best = self.problem, self.most, self.best
        fits_whole = best is not None and not stored_rules(best.rules)
        if fits_whole and not problem.request.front and problem.objective != "memory":
            most = most if most == math.inf else min(most, STORED // max(1, problem.operators))
        for rules, plans in placed:
            every = stored(problem.program, problem.mesh, rules, space.exchanged)
            wholes = [w for m in every if m and _is_short(w := (*rules, *m), problem)]
            fitting = [extended for extended in wholes if not self._is_too_large(extended)]
            self.valid, self.bounded = self.valid + len(wholes), self.bounded + len(wholes)
            for number, extended in enumerate(fitting):
                if self._is_bounded((rules, plans), len(fitting)):
                    problem.drop(extended)
                    continue
                self.bounded -= 1
                if self.stored < most and not problem.expired():
                    self.stored += 1
                    self._ask(fitting[number : number + 2])
                    self.consider(extended)

    def other_dims(self) -> None:
        """Place the best layout with what it stores in parts divided by other dims.

        Where none fits, the one that holds the least.
        """
        problem, base = self.problem, self.best
        if base is None and problem.request.memory is not None:
            base = min(self.plans, key=lambda plan: plan.peak, default=None)
        free = () if base is None else (r for r in base.rules if r not in problem.fixed)
        role_rules = stored_rules(tuple(free))
        if base is None or not role_rules or problem.expired():
            return
        general = tuple(rule for rule in base.rules if rule not in role_rules)
        for moved in on_other_dims(problem.program, problem.mesh, general, role_rules):
            extended = (*general, *moved)
            if _is_short(extended, problem) and not self._is_too_large(extended):
                self.valid += 1
                self.consider(extended)

    def _is_too_large(self, rules: Rules) -> bool:
        """Whether it is known that rules do not fit, or need more memory than others."""
        problem = self.problem
        if self.most == math.inf or problem.request.front:
            return False
        plan = problem.plan(rules, problem.policies[0])
        if problem.objective == "memory" and plan.held_at_least > self.reached:
            return True
        return problem.is_too_large(plan)

    def _is_bounded(self, found: tuple[Rules, list[Candidate]], several: int) -> bool:
        """Whether what was `found` cannot become better by any of `several` rules for storage.

        What is stored in parts is gathered where it is read: bytes do not become fewer, unless
        what is stored is wider than what is computed with, or stored in parts already: a loop's
        dim that is fixed is split where it is stored.
        """
        problem, reached = self.problem, self.reached
        if self.most == math.inf or problem.request.front or problem.objective == "memory":
            return False
        if any(rule.dim in problem.space.loops and rule.axes for rule in found[0]):
            return False
        if problem.objective == "bytes":
            return self.least(found) * narrowing(problem) > reached
        if problem.computing(found[0]) * (1 - ROUNDING) > reached:
            return True
        return all(least * (1 - ROUNDING) > reached for least in self._kept(*found, several > 1))

    def _kept(self, rules: Rules, plans: list[Candidate], worth_it: bool) -> Iterator[float]:
        """Seconds of each walk that no rules for storage change, at least.

        One that was left out is done where that is `worth_it`.
        """
        problem, placed = self.problem, {plan.policy for plan in plans}
        yield from (plan.kept_at_least for plan in plans)
        for policy in (p for p in problem.policies if p not in placed):
            if worth_it and (rules, policy) not in self.kept:
                self.kept[rules, policy] = self._kept_of(problem.plan(rules, policy))
            yield self.kept.get((rules, policy), 0.0)

    def _kept_of(self, plan: Candidate) -> float:
        computing = self.problem.computing(plan.rules)
        try:
            beyond = plan.within(self.reached, computing, self.reached)
        except DiagnosticError:
            return 0.0
        return plan.kept_at_least if beyond is None else beyond.kept


def narrowing(problem: Problem) -> float:
    """The least part of the bytes of stored numbers that is sent where they are computed with."""
    widths = {p.value.type.dtype.bytes for p in problem.program.params}
    widths |= {s.value.type.dtype.bytes for s in problem.program.states}
    return min(widths) / max(widths)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Every layout of general rules, with those for storage; with `bounds`, unless proven worse."""

    bounds: bool = True

    def solve(self, problem: Problem) -> SearchResult:
        """The best layouts. Raises MD0641 where none divides the work as far as asked."""
        request = problem.request
        space = problem.space
        tables, most = problem.tables(), MOST if self.bounds else math.inf
        storage = request.storage and bool(problem.program.params)
        stores = storage and problem.objective == "time"
        run = _Enumeration(problem, tables, problem.most_work, most, stores)
        by_memory = problem.objective == "memory"
        if problem.objective == "time":
            placed = self._by_time(run, space, storage)
        else:
            layouts, is_complete = self._divided(run, space, run.held if by_memory else tables.sent)
            run.cut = run.cut or not is_complete
            placed = Placed()
            if not is_complete or len(layouts) > most:
                placed += run.practised(space, run.held if by_memory else tables.sent, storage)
            done = {rules for rules, _ in placed}
            placed += run.general([rules for rules in layouts if rules not in done])
            if not is_complete or len(layouts) > most:
                placed += run.by_work(run.listed, {*layouts}, placed)
                placed.sort(key=run.least)
            if storage:
                run.storage(placed, space)
        if storage and not request.front:
            run.other_dims()
        if not run.plans and not run.bounded and problem.expired():
            run.cut = True
            most_work = math.inf if _is_narrow(problem) else run.most_work
            within = (w for w in space.within(most_work) if _is_short(w[1], problem))
            listed = [*itertools.islice(within, LISTED)]
            placed += run.by_work(listed, [rules for rules, _ in placed], placed)
        if not run.plans and not run.bounded:
            _refuse(run, placed)
        level = "L1" if request.storage else "L0"
        count = Count(level, run.valid, run.evaluated, run.bounded, space.symmetry, cut=run.cut)
        plans = best_first(problem, run.plans)
        for plan in plans[:1]:
            lower_placed(plan.placed)  # verified: all were compared without
        bound = 0.0
        if count.is_whole and (plans or run.bounded):
            bound = min([problem.below, *map(problem.value, plans[:1])])
        return SearchResult(problem, plans, tuple(run.plans), count, bound)

    def _divided(self, run: _Enumeration, space: LayoutSpace, key: Key) -> tuple[list[Rules], bool]:
        """The layouts that divide the work, by a key, and whether these are all.

        Of a large space they are those that the key leads to.
        """
        # What rules for functions divide is not in the tables.
        most_work = math.inf if _is_narrow(run.problem) else run.most_work
        within = (w for w in space.within(most_work) if _is_short(w[1], run.problem))
        layouts, is_complete = self._listed(run, within)
        run.listed = layouts
        if is_complete:
            return run.ordered((rules for _, rules in layouts), key), True
        # What a search without time would take first, and what divides the work furthest.
        starts = (
            [layouts[0][1]] if run.cut else [layouts[0][1], min(layouts, key=lambda w: w[0])[1]]
        )

        def beyond(rules: Rules) -> float:
            """The work that a layout leaves a device beyond what is asked."""
            return 0.0 if most_work == math.inf else space.of(rules) - most_work

        def by(rules: Rules) -> tuple[float, Any]:
            return max(0.0, beyond(rules)), key(rules)

        seen = climbed(space, by, run.in_time, most_work, starts)
        return [r for r in seen if beyond(r) <= 0 and _is_short(r, run.problem)], False

    def _listed(self, run: _Enumeration, items: Iterator[T]) -> tuple[list[T], bool]:
        """The first of some layouts, and whether these are all; without bounds, all of them."""
        found = list(itertools.islice(run.in_time(items), LISTED + 1 if self.bounds else None))
        return found, not self.bounds or len(found) <= LISTED

    def _by_time(self, run: _Enumeration, space: LayoutSpace, storage: bool) -> Placed:
        """Place the first layouts that divide the work, then all that could be faster than these.

        A layout cannot be faster than its operators are without any communication. Where none of
        the first fits, they have their rules for `storage` before others are looked at. Of the
        others the fixed rules alone come first: more devices are never slower than fewer.
        """
        problem, alone = run.problem, run.problem.fixed
        assert problem.timing is not None
        weigh = seconds(problem.timing)
        if self.bounds and space.least(weigh) * (1 - ROUNDING) > problem.below:
            run.valid = run.bounded = space.count
            return []
        slow, expected = problem.timing.slowest, problem.about

        def at_most(rules: Rules) -> float:
            """About how long it takes, if none are joined."""
            return expected(rules) + run.tables.collectives(rules) * slow.alpha

        # Where another mesh has a value to be below, few may be: all end soon, in any order.
        few = self._few(run, space, weigh)
        seen, is_listed = (few, True) if few else self._divided(run, space, expected)
        placed = Placed()
        if self.bounds and not (is_listed and len(seen) <= MOST):
            placed += run.practised(space, expected, storage)
        done = {rules for rules, _ in placed}
        placed += run.general([rules for rules in seen[:FIRST] if rules not in done])
        begun = placed if storage and run.best is None else []
        run.storage(begun, space)
        first, others = {rules for rules, _ in placed}, Placed() if begun else [*placed]
        ceiling = run.reached * (1 + ROUNDING) if self.bounds else math.inf
        listed, is_complete = self._listed(run, space.within(ceiling, weigh))
        bounds = {rules: bound for bound, rules in listed}
        if not is_complete:
            run.cut = True
            bounds = {rules: space.of(rules, weigh) for rules in [*seen, alone]}
        # Good layouts come first, so that others end soon.
        orders = [
            run.ordered(bounds, expected) if is_complete and not few else [*bounds],
            [] if few else run.ordered(bounds, at_most),
        ]
        ordered = (rules for both in zip_longest(*orders) for rules in both if rules is not None)
        for rules in sorted(dict.fromkeys(ordered), key=lambda rules: rules != alone):
            bound = bounds[rules]
            if rules in first or not _is_short(rules, problem):
                continue
            if self.bounds and bound * (1 - ROUNDING) > run.reached:
                run.valid, run.bounded = run.valid + 1, run.bounded + 1
            else:
                others += run.general([rules])
        if storage:
            run.storage(run.best_whole(others), space)
        return begun + others

    def _few(self, run: _Enumeration, space: LayoutSpace, weigh: Weigh) -> list[Rules]:
        """The layouts that may be faster than what another mesh has, those of least work first.

        None where none has anything, or where they are more than are placed.
        """
        problem = run.problem
        if not self.bounds or problem.below == math.inf or problem.request.front:
            return []
        ceiling = problem.below * (1 + ROUNDING)
        listed = [*itertools.islice(space.within(ceiling, weigh), MOST + 1)]
        few = [rules for _, rules in sorted(listed, key=lambda w: w[0])]
        return few if len(few) <= MOST else []


def _is_narrow(problem: Problem) -> bool:
    """Whether rules for functions or tensors are fixed, of which tables know nothing."""
    return any(rule.selector and rule.selector[0] not in ROLES for rule in problem.fixed)


def _is_short(rules: Rules, problem: Problem) -> bool:
    most = problem.request.max_rules
    return most is None or len(rules) <= most


def best_first(problem: Problem, plans: list[Candidate]) -> tuple[Candidate, ...]:
    """The best plans that fit, of each layout the better walk."""
    bound_of = problem.at_least
    left = sorted(plans, key=bound_of)
    best: list[Candidate] = []
    for plan in left:
        last = best[SHOWN - 1] if len(best) >= SHOWN else None
        if last is not None and bound_of(plan) > problem.value(last):
            break
        alike = (other for other in best if other.asked == plan.asked)
        if any(problem.at_most(other) < bound_of(plan) for other in alike):
            continue
        if problem.fits(plan):
            best = first_of_each(sorted([*best, plan], key=problem.key))
    return tuple(best[:SHOWN])


def _refuse(run: _Enumeration, placed: Placed) -> NoReturn:
    """MD0641: no layout that was placed divides the work as far as asked.

    Raises what is wrong with the fixed rules, if these alone cannot be placed.
    """
    asked, least = run.problem.request.replicated, run.problem.least_work
    every: list[float] = [plan.flops for _, plans in placed for plan in plans]
    every = every or [*_beyond(run)]
    message = f"no layout leaves a device at most {1 + asked:.2f} times the least work"
    if not every:
        fail("MD0641", message, help="a larger `--replicated`, or fewer rules by `--fix`")
    percent = math.ceil((min(every) / least - 1) * 100) if least else 100
    more = "" if run.problem.request.max_rules is None else "; more rules may divide it further"
    fix = give("--replicated", f"{percent}%", safe=False)
    help = f"{fix.title}, which the layouts placed reach{more}"
    fail("MD0641", message, help=help, fixes=(fix,))


def _beyond(run: _Enumeration) -> Iterator[float]:
    """The work of the first layout, by work, that can be placed, of all that divide it less."""
    problem, space = run.problem, run.problem.space
    policy, limit = problem.policies[0], run.most_work
    most = problem.fixed_alone()
    while limit < most:
        limit, before = 2 * limit, limit
        for work, rules in sorted(space.within(limit), key=lambda found: found[0]):
            if work <= before or not _is_short(rules, problem):
                continue
            try:
                yield problem.plan(rules, policy).flops
            except DiagnosticError:
                continue
            return
