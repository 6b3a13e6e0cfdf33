"""Methods `layouts` and `exhaustive`: every layout of a space, evaluated by walks or bounded.

General rules that divide the work (`space.py`) are ordered by what the tables say (`tables.py`) and
placed by the walk `deferred`, or `immediate` where that one does not do; each with rules for
storage (`storage.py`) as far as these can lead to something better. `exhaustive` is the same
without bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

from meshdsl.diagnostics import DiagnosticError, fail
from meshdsl.pipeline import lower_placed
from meshdsl.search.plan import Plan, Rules, layout_of
from meshdsl.search.problem import Count, Found, Problem
from meshdsl.search.space import Space, seconds
from meshdsl.search.storage import stored
from meshdsl.search.tables import Tables

MOST = 64
"""The layouts of general rules, and those with rules for storage, that `layouts` places at most.

The first by the tables; the others are left, and nothing is proven. `exhaustive` places them too.
"""


ROUNDING = 1e-6
"""The part by which a simulated time may lie below the sum of its events: each is rounded."""

FIRST = 4
"""The layouts that are placed to know a time that others have to stay below."""

Placed = list[tuple[Rules, list[Plan]]]
"""Layouts of general rules, with their plans."""


@dataclass(slots=True)
class _Run:
    """One search: what was evaluated so far, and the best that fits."""

    problem: Problem
    tables: Tables
    most_work: float
    most: float
    plans: list[Plan] = field(default_factory=list)
    best: Plan | None = None
    valid: int = 0
    evaluated: int = 0
    bounded: int = 0
    refused: DiagnosticError | None = None

    @property
    def reached(self) -> float:
        """The value that a plan has to be below, or equal to, to be of interest."""
        best = math.inf if self.best is None else self.problem.value(self.best)
        return min(best, self.problem.below)

    def consider(self, rules: Rules, most: float = math.inf) -> list[Plan]:
        """Place a layout by the first walk that does; its plans, also those that are out of limits.

        A walk does if it divides the work, fits, and sends no more than `most`, what the tables
        say. None where it cannot be placed: two rules may meet in a tensor that only the expansion
        of an operator has.
        """
        problem, made = self.problem, list[Plan]()
        try:
            for policy in problem.policies:
                made.append(problem.plan(rules, policy))
                sends = made[-1].sent_at_least
                if sends <= most and self._divides(made[-1]) and self._fits(made[-1]):
                    break
        except DiagnosticError as error:
            self.refused = self.refused or error
            self.valid -= 1
            return []
        self.evaluated += 1
        divided = [plan for plan in made if self._divides(plan)]
        self.plans += divided
        for plan in divided:
            if problem.is_better(plan, self.best):
                self.best = plan
        return made

    def _divides(self, plan: Plan) -> bool:
        """Whether a plan divides the work as far as asked."""
        return self.most_work == math.inf or plan.flops <= self.most_work

    def _fits(self, plan: Plan) -> bool:
        """Whether no other walk is needed for the sake of memory."""
        if self.problem.objective == "memory" or self.problem.front:
            return False
        return self.problem.fits(plan)

    def general(self, layouts: list[Rules]) -> Placed:
        """Place layouts of general rules in order; those that could be placed, the best first."""
        found = []
        self.valid += len(layouts)
        for rules in layouts:
            if self.evaluated >= self.most or (self.evaluated and self.problem.expired()):
                break
            if made := self.consider(rules, self.tables.sent(rules)):
                found.append((rules, made))
        return sorted(found, key=lambda f: min(map(self.problem.at_least, f[1])))

    def storage(self, placed: Placed, space: Space) -> None:
        """Place them with rules for storage, too, unless that cannot be better."""
        problem, before = self.problem, self.evaluated
        for rules, plans in placed:
            for more in stored(problem.program, problem.mesh, rules, space.exchanged):
                whole = (*rules, *more)
                if not more or not _is_short(whole, problem):
                    continue
                self.valid += 1
                if self._is_bounded(plans, whole):
                    self.bounded += 1
                elif self.evaluated - before < self.most and not problem.expired():
                    self.consider(whole)

    def _is_bounded(self, plans: list[Plan], rules: Rules) -> bool:
        """Whether `plans` cannot become better than the best, or fit, by rules for storage.

        What is stored in parts is gathered where it is read: bytes do not become fewer, unless
        what is stored is wider than what is computed with.
        """
        problem = self.problem
        if self.most == math.inf or problem.front:
            return False
        held = held_at_least(problem, rules)
        if problem.limits.memory is not None and held > problem.limits.memory:
            return True
        reached = self.reached
        if problem.objective == "memory":
            return held > reached
        if problem.objective == "time":
            least = min(plan.computing - plan.updating for plan in plans)
        else:
            least = min(plan.sent_at_least for plan in plans) * narrowing(problem)
        return least > reached


def held_at_least(problem: Problem, rules: Rules) -> int:
    """The bytes of parameters, states and inputs on a device."""
    layout = layout_of(rules, problem.mesh)
    program = problem.program
    params, states = (p.value for p in program.params), (s.value for s in program.states)
    values = (*program.inputs, *params, *states)
    placed = ((v, layout.bind(v, stored=v.role != "input")) for v in values)
    return sum(p.placement(problem.mesh).local(v.type, problem.mesh).bytes for v, p in placed)


def narrowing(problem: Problem) -> float:
    """The least part of the bytes of stored numbers that is sent where they are computed with."""
    widths = {p.value.type.dtype.bytes for p in problem.program.params}
    widths |= {s.value.type.dtype.bytes for s in problem.program.states}
    return min(widths) / max(widths)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Every layout of general rules, with those for storage; with `bounds`, unless proven worse."""

    bounds: bool = True

    def solve(self, problem: Problem) -> Found:
        """The best layouts. Raises MD0641 where none divides the work as far as asked."""
        limits = problem.limits
        space = problem.space
        least = problem.least_work
        tables, most = Tables(space), MOST if self.bounds else math.inf
        run = _Run(problem, tables, least * (1 + limits.replicated), most)
        every = space.within(run.most_work)
        divided = [rules for _, rules in every if _is_short(rules, problem)]
        divided.sort(key=tables.sent)
        if problem.objective == "time":
            placed = self._by_time(run, space, divided)
        else:
            placed = run.general(divided)
        if limits.storage and problem.program.params:
            run.storage(placed, space)
        if not run.plans and not run.bounded:
            _refuse(run, placed, least)
        level = "L1" if limits.storage else "L0"
        count = Count(level, run.valid, run.evaluated, run.bounded, space.symmetry)
        plans = best_first(problem, run.plans)
        for plan in plans[:1]:
            lower_placed(plan.placed)  # verified: all were compared without
        bound = 0.0
        if count.is_whole and (plans or run.bounded):
            bound = min([problem.below, *map(problem.value, plans[:1])])
        return Found(problem, plans, tuple(run.plans), count, bound)

    def _by_time(self, run: _Run, space: Space, divided: list[Rules]) -> Placed:
        """Place the first layouts that divide the work, then all that could be faster than these.

        A layout cannot be faster than its operators are without any communication.
        """
        problem = run.problem
        assert problem.timing is not None
        run.most_work = math.inf
        weigh = seconds(problem.timing)
        if self.bounds and space.least(weigh) * (1 - ROUNDING) > problem.below:
            run.valid = run.bounded = sum(1 for _ in space.every())
            return []
        placed = run.general(divided[:FIRST])
        first = {rules for rules, _ in placed}
        known = run.reached * (1 + ROUNDING) if self.bounds else math.inf
        faster = sorted(space.within(known, weigh), key=lambda found: found[0])
        for bound, rules in faster:
            if rules in first or not _is_short(rules, problem):
                continue
            if self.bounds and bound * (1 - ROUNDING) > run.reached:
                run.valid, run.bounded = run.valid + 1, run.bounded + 1
            else:
                placed += run.general([rules])
        return placed


def _is_short(rules: Rules, problem: Problem) -> bool:
    most = problem.limits.rules
    return most is None or len(rules) <= most


SHOWN = 6
"""The plans that are ordered exactly: the best, and those that come next."""


def best_first(problem: Problem, plans: list[Plan]) -> tuple[Plan, ...]:
    """The best plans that fit, of each layout the better walk."""
    known = problem.value if problem.objective == "time" else problem.at_least
    left = sorted(plans, key=known)
    found: list[Plan] = []
    for plan in left:
        last = found[SHOWN - 1] if len(found) >= SHOWN else None
        if last is not None and known(plan) > problem.value(last):
            break
        if problem.fits(plan):
            found = sorted([*found, plan], key=problem.key)
            found = list({p.rules: p for p in reversed(found)}.values())[::-1]
    return tuple(found[:SHOWN])


def _refuse(run: _Run, placed: Placed, least: float) -> NoReturn:
    """MD0641: no layout that was placed divides the work as far as asked."""
    asked = run.problem.limits.replicated
    every = [plan.flops for _, plans in placed for plan in plans]
    if not every and run.refused is not None:
        raise run.refused
    message = f"no layout leaves a device at most {1 + asked:.2f} times the least work"
    if not every:
        fail("MD0641", message, help="a larger `--replicated`, or fewer rules by `--fix`")
    found = math.ceil((min(every) / least - 1) * 100)
    fail("MD0641", message, help=f"`--replicated {found}%` is what the layouts placed reach")
