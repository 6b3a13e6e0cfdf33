"""The problem of a search, what a method answers with, and the interface of methods.

A method is an object with `solve(problem) -> SearchResult`; `methods.py` has them by name. All see
the same `Problem` and answer with the same `Candidate`: rules of the language, placed by a walk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property, total_ordering
from typing import NamedTuple, Protocol

from meshdsl.cluster.timing import Timing
from meshdsl.named import ir as named
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.search.budget import Budget
from meshdsl.search.candidate import (
    AT_ONCE,
    PLAIN,
    POLICIES,
    Candidate,
    Execution,
    Rules,
    StartLayout,
)
from meshdsl.search.lower_bounds import Beyond
from meshdsl.search.request import SearchRequest
from meshdsl.search.space import LayoutSpace, seconds, space_of
from meshdsl.search.speculative import Second
from meshdsl.search.tables import Tables
from meshdsl.syntax.symbols import ROLES

OBJECTIVES = ("time", "bytes", "memory")
"""What is minimised: predicted seconds of a step, bytes sent per device, or held at the peak."""

Circumstances = tuple[Mesh, Timing | None, str]
"""The mesh, the cluster and the execution that rules are placed for."""

ALONE = 10_000
"""The operators that one process places before a second one helps it: about two seconds' worth.

It is forked with what is known by then: in less time it would mostly find that again.
"""

AGAIN = 32
"""Plans that a second process keeps: what a rule is good for is asked after what is best."""

Answer = tuple[int, float] | dict[str, object]
"""Where a walk ended (`lower_bounds.Beyond`), or the figures of its plan."""


class Question(NamedTuple):
    """What `Problem.ask` asks the second process."""

    rules: Rules
    policy: str
    most: float
    computing: float | None
    worth: float
    kept: float


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class PlanOrder:
    """Where a plan is among others: by `value`; of equals, fewer bytes, less memory, fewer rules.

    Memory takes a walk of its own: all but the value is asked of equals alone.
    """

    value: float
    plan: Candidate

    def _parts(self) -> Iterator[float]:
        yield self.value
        yield self.plan.sent
        yield self.plan.peak
        yield len(self.plan.rules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlanOrder):
            return NotImplemented
        return all(a == b for a, b in zip(self._parts(), other._parts(), strict=True))

    def __hash__(self) -> int:
        return hash(self.value)

    def __lt__(self, other: PlanOrder) -> bool:
        for mine, its in zip(self._parts(), other._parts(), strict=True):
            if mine != its:
                return mine < its
        return False


@dataclass(frozen=True, eq=False)
class Problem:
    """The layout of `program` on `mesh` that is least by `objective`, in the limits of `request`.

    `timing` is the cluster; `time` needs one. Only where it is another objective has the work to be
    divided: replicated work costs time. `fixed` are rules that every plan has, each is executed as
    `execution` says. `start` is a layout to begin from, `declared` are those of the file: what is
    found is no worse than any of them. `least` is the least work of a device that others are
    measured by, where that is not the least on this mesh.
    `below` is a value reached on another mesh: what is no better need not be placed.
    `budget` is what the search may do. `made` are plans that have been placed, also by searches
    within other limits, `known_tables` what they know of calls,
    `known_splits` what they found beside the stages of a pipeline for a split of the batch.
    """

    program: named.NamedProgram
    mesh: Mesh
    objective: str = "bytes"
    request: SearchRequest = field(default_factory=SearchRequest)
    timing: Timing | None = None
    fixed: Rules = ()
    execution: Execution = PLAIN
    start: StartLayout | None = None
    declared: tuple[StartLayout, ...] = ()
    budget: Budget = field(default_factory=Budget)
    least: float | None = None
    below: float = math.inf
    made: dict[tuple[Circumstances, Rules, str], Candidate] = field(default_factory=dict)
    known_tables: dict[LayoutSpace, Tables] = field(default_factory=dict)
    known_splits: dict[tuple[Mesh, str, Rules], tuple[Rules, ...]] = field(default_factory=dict)

    @property
    def space(self) -> LayoutSpace:
        """The layouts of general rules, with the fixed ones."""
        stored = self.request.storage
        return space_of(self.program, self.mesh, self.fixed, self.timing, stored)

    def tables(self) -> Tables:
        """The bytes of calls in this space, which are computed once for all limits."""
        tables = self.known_tables.setdefault(self.space, Tables(self.space))
        tables.budget = self.budget
        return tables

    @property
    def policies(self) -> tuple[str, ...]:
        """The walks that a layout is evaluated by; of equals the first is taken."""
        return POLICIES if self.request.partial else AT_ONCE

    @cached_property
    def least_work(self) -> float:
        """The FLOPs of a device that others are measured by.

        No layout leaves less; but of operators whose own dim is split the tables count what their
        products do, less than is placed. So an even share of the whole is never too much.
        """
        if self.least is not None:
            return self.least
        return max(self.space.least(), self.space.of(()) / self.mesh.devices)

    @property
    def most_work(self) -> float:
        """The FLOPs that a device may do: replicated work costs time, and else is limited."""
        if self.objective == "time":
            return math.inf
        return self.least_work * (1 + self.request.replicated)

    def divides(self, plan: Candidate) -> bool:
        """Whether a plan divides the work as far as it has to. Raises what placing it raises."""
        return plan.flops <= self.most_work

    def may_divide(self, rules: Rules, execution: Execution) -> bool:
        """Whether it is not known, before placing, that rules divide the work too little."""
        if self.most_work == math.inf or execution.schedule or not self.space.knows(rules):
            return True
        return self.space.kept_work(rules) <= self.most_work

    def value(self, plan: Candidate) -> float:
        """What is minimised."""
        if self.objective == "time":
            return plan.seconds
        return plan.sent if self.objective == "bytes" else plan.peak

    def expired(self) -> bool:
        """Whether all that the search may do is done."""
        return self.budget.is_over

    def spend(self, layouts: int = 1) -> None:
        """Count layouts that are placed by each walk."""
        self.budget.spend(layouts * len(self.policies) * self.operators)

    @cached_property
    def operators(self) -> int:
        """The operators of the program, those of a loop once."""
        return sum(1 for _ in named.walk(self.program.body))

    def plan(self, rules: Rules, policy: str, execution: Execution | None = None) -> Candidate:
        """Rules placed by a walk, executed so: one plan, for all that ask."""
        used = self._execution if execution is None else str(execution)
        key = (self.mesh, self.timing, used), rules, policy
        if key not in self.made:
            self.made[key] = self._new(rules, policy, execution)
        return self.made[key]

    @cached_property
    def _execution(self) -> str:
        return str(self.execution)

    def _new(self, rules: Rules, policy: str, execution: Execution | None = None) -> Candidate:
        execution = self.execution if execution is None else execution
        return Candidate(self.program, self.mesh, rules, policy, self.timing, execution)

    def plans(self, rules: Rules) -> list[Candidate]:
        """Rules placed by each walk."""
        return [self.plan(rules, policy) for policy in self.policies]

    def executed(self, rules: Rules, execution: Execution) -> list[Candidate]:
        """Rules placed by each walk; in stages by the first alone."""
        if execution is self.execution and execution.schedule is None:
            return self.plans(rules)
        policies = self.policies if execution.schedule is None else self.policies[:1]
        return [self._new(rules, policy, execution) for policy in policies]

    @cached_property
    def _answered(self) -> dict[tuple[Rules, str], Candidate]:
        return {}

    @cached_property
    def second(self) -> Second[Question, Answer]:
        """A process that places layouts by the second walk while this one does so by the first."""
        return Second(self._figures)

    def ask(
        self,
        rules: Rules,
        most: float,
        computing: float | None,
        worth: float,
        kept: float = -math.inf,
    ) -> None:
        """Let rules be placed by the second walk, up to `most` (`Candidate.within`).

        A plan that may be `worth` it is timed, if it fits.
        """
        if self.budget.spent < ALONE:
            return
        for policy in self.policies[1:]:
            if self.plan(rules, policy).is_known:
                continue
            question = Question(rules, policy, most, computing, worth, kept)
            self.second.ask((rules, policy), question)

    def within(
        self, plan: Candidate, most: float, computing: float | None, kept: float = -math.inf
    ) -> Beyond | None:
        """`Candidate.within`; a plan that has been asked for has its figures then."""
        if plan.is_known:
            return plan.beyond(most, computing)
        is_asked = plan.execution is self.execution
        speculated = self.second.take((plan.rules, plan.policy)) if is_asked else None
        if speculated is None:
            return plan.within(most, computing, kept)
        if isinstance(speculated, tuple):
            return Beyond(*speculated)
        plan.learn(speculated)
        return plan.beyond(most, computing)

    def drop(self, rules: Rules) -> None:
        """Do without what has been asked of rules."""
        for policy in self.policies[1:]:
            self.second.drop((rules, policy))

    def _figures(self, asked: Question) -> Answer:
        """Answer in the second process, which is asked for more of some plans again."""
        key = asked.rules, asked.policy
        if len(self._answered) > AGAIN:
            self._answered.clear()
        plan = self._answered.setdefault(key, self._new(*key))
        if beyond := plan.within(asked.most, asked.computing, asked.kept):
            return beyond.bytes, beyond.kept
        if self.divides(plan) and self.fits(plan) and self.at_least(plan) <= asked.worth:
            _ = self.value(plan), plan.sent, plan.peak
        return plan.known

    def fixed_alone(self) -> float:
        """The work of the fixed rules without others. Raises what is wrong with them."""
        return self.plan(self.fixed, self.policies[0]).flops

    def at_least(self, plan: Candidate) -> float:
        """A lower bound of `value` that is known from the placed program alone."""
        if self.objective == "time":
            settings = plan.execution.settings
            return plan.seconds_at_least(0.0 if settings else self.computing(plan.rules))
        return plan.sent_at_least if self.objective == "bytes" else 0

    def at_most(self, plan: Candidate) -> float:
        """An upper bound of `value`: in bytes it is known from the placed program alone."""
        if self.objective == "bytes" and not plan.is_piped:
            return plan.sent_at_most
        return self.value(plan)

    def about(self, rules: Rules) -> float:
        """About how many seconds a step takes under general rules, if buckets join collectives."""
        assert self.timing is not None, "no cluster is named"
        return self.computing(rules) + self.tables().sent(rules) / self.timing.slowest.bandwidth

    def computing(self, rules: Rules) -> float:
        """The seconds of all operators at least; rules for storage may divide updates.

        With rules for functions or tensors nothing is known of them.
        """
        narrower = {r.selector[0] for r in rules if r.selector}
        if self.timing is None or not narrower <= (set(ROLES) if self.space.stored else set()):
            return 0.0
        if rules not in self._computing:
            self._computing[rules] = self.space.of(rules, seconds(self.timing))
        return self._computing[rules]

    @cached_property
    def _computing(self) -> dict[Rules, float]:
        return {}

    def key(self, plan: Candidate) -> PlanOrder:
        """The order of plans: by value; of equals, fewer bytes, less memory, fewer rules."""
        return PlanOrder(self.value(plan), plan)

    def fits(self, plan: Candidate) -> bool:
        """Whether a plan keeps to the limit of memory."""
        limit = self.request.memory
        return limit is None or (not self.is_too_large(plan) and plan.peak <= limit)

    def is_too_large(self, plan: Candidate) -> bool:
        """Whether it is known that a plan does not fit, before it is placed."""
        if self.request.memory is None or plan.schedule is not None:
            return False
        return plan.held_at_least > self.request.memory

    def is_better(self, plan: Candidate, than: Candidate | None) -> bool:
        """Whether a plan fits, and comes before another one."""
        if than is None:
            return self.fits(plan)
        if self.objective == "bytes":  # mostly known without the programs of a device
            if self.at_least(plan) > self.at_most(than):
                return False
            if self.at_most(plan) < self.at_least(than):
                return self.fits(plan)
        value = self.value(than)
        if self.at_least(plan) > value or self.value(plan) > value:
            return False
        return self.key(plan) < self.key(than) and self.fits(plan)


def least_value(problem: Problem) -> float:
    """What no plan can be below: of several problems the one of the least is searched first."""
    if problem.objective != "time" or problem.timing is None:
        return 0.0
    return problem.space.least(seconds(problem.timing))


@dataclass(frozen=True, slots=True)
class Count:
    """How many layouts were searched, in the space `level` (L0, L1, L2).

    `valid` divide the work; of these `evaluated` were placed by walks, others are `bounded`: proven
    no better. The rest was not looked at. `symmetry` exchanges of equal axes count once.
    `steps` are layouts with rules for functions and parameters, of which there are too many.
    `pipelines` were placed beside them. With `cut` the budget was over before all were counted.
    `further` says where the best one is from, if it is none of the space. `work` are the steps of
    a method that searches by something else than placing layouts (`Solution.work`).
    """

    level: str
    valid: int
    evaluated: int
    bounded: int
    symmetry: int
    steps: int = 0
    cut: bool = False
    further: str = ""
    pipelines: int = 0
    work: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every layout was evaluated or bounded."""
        looked_at = self.evaluated + self.bounded
        others = self.steps or self.cut or self.pipelines or self.further
        return looked_at == self.valid and not others


@dataclass(frozen=True, slots=True)
class Certificate:
    """No per-tensor plan is below `least` in the objective; `sweeps` raised the bound."""

    least: float
    sweeps: int

    def gap(self, value: float) -> float:
        """How far above all plans a value may be, as a part of it."""
        return max(0.0, 1 - self.least / value) if value else 0.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a method: plans within the limits, the best first; none where none fits.

    `every` has all that were evaluated. No plan of the space is below `bound` in the objective.
    `others` are the results on other meshes of as many devices, the best first: each searched only
    as far as it could be better, without plans where its bound says that it is not. Where nothing
    fits, `least` is the search for the least memory.
    """

    problem: Problem
    plans: tuple[Candidate, ...]
    every: tuple[Candidate, ...]
    count: Count
    bound: float
    others: tuple[SearchResult, ...] = ()
    certificate: Certificate | None = None
    least: SearchResult | None = None

    @property
    def proven(self) -> bool:
        """Whether no plan of the space, and on no other mesh, is better than the best."""
        return self.count.is_whole and all(other.proven for other in self.others)


class Method(Protocol):
    """A way to search."""

    def solve(self, problem: Problem) -> SearchResult:
        """The best plans found. Raises a diagnostic where no layout is valid."""
