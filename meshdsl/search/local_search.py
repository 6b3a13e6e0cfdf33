"""Rules for functions and parameters (space L2), by steps from the best layouts of general rules.

A step adds `selector: dim -> axes`, replaces one, or leaves a rule out. Of all steps the best is
taken, until none is better: no single rule more or less improves what is found. One weird trick
(Krizhevsky 2014) and expert parallelism (GShard, Lepikhin et al. 2020) are such layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

from meshdsl.diagnostics import DiagnosticError
from meshdsl.named import ir as named
from meshdsl.named.ir import values_of
from meshdsl.named.prelude import prelude
from meshdsl.named.selectors import selects
from meshdsl.records import dataclass
from meshdsl.search.candidate import Asked, Candidate, Rules, SearchRule, first_of_each
from meshdsl.search.per_tensor import chosen, named_tensors
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.speculative import AHEAD
from meshdsl.search.storage_rules import stored_rules
from meshdsl.syntax.symbols import ROLES

Selector = tuple[str, ...]

STARTS = 2
"""The layouts of general rules that steps begin from."""

LEAST_SHARE = 0.01
"""The part of all parameters' bytes from which a parameter gets rules of its own."""


def selectors(program: named.NamedProgram) -> tuple[Selector, ...]:
    """The functions of a program, less those of the library, and its larger parameters."""
    library = prelude().functions
    called = (f for v in values_of(program) for f in v.functions)
    functions = dict.fromkeys((f,) for f in called if f not in library)
    params = [p.value for p in program.params]
    least = LEAST_SHARE * sum(v.type.bytes for v in params)
    return (*functions, *dict.fromkeys((v.label,) for v in params if v.type.bytes >= least))


def by_steps(found: SearchResult) -> SearchResult:
    """What steps from the best layouts lead to, as the result of the same problem."""
    problem = found.problem
    starts = {_general(plan.rules): plan for plan in reversed(found.plans)}
    run = _Steps(problem, list(_options(problem)))
    begun = list(starts.values())[::-1][:STARTS]
    begun += [plan for plan in found.plans[:1] if plan not in begun]
    is_per_tensor = problem.request.per_tensor and bool(begun)
    if is_per_tensor and (rules := chosen(problem, _general(begun[0].rules))):
        other = run.placed(rules, begun[0])
        begun += [other] if other is not None else []
    best = [run.descend(plan) for plan in begun]
    level = "L3" if problem.request.per_tensor else "L2"
    count = replace(found.count, level=level, steps=len(run.known))
    return replace(_with(found, best, run), count=count, bound=0)


def less(found: SearchResult) -> SearchResult:
    """The best plan without the rules that it is better without, if any.

    Rules for storage come in groups, of which one may be worth nothing to a parameter or two: these
    are left out first.
    """
    run = _Steps(found.problem, [], {(p.asked, p.policy): p for p in found.every})
    best = run.descend(run.descend(found.plans[0], _is_stored))
    if best is found.plans[0]:
        return replace(found, every=(*found.every, *run.made))
    return _with(found, [best], run)


def onwards(found: SearchResult, plan: Candidate) -> SearchResult:
    """The result with a plan, and what steps from it lead to, as far as these are allowed."""
    problem = found.problem
    options = list(_options(problem)) if problem.request.by_steps else []
    run = _Steps(problem, options)
    request = problem.request
    short = request.max_rules is None or len(plan.rules) <= request.max_rules
    keeps_fixed = all(rule in plan.rules for rule in problem.fixed)
    if not (short and keeps_fixed and problem.fits(plan) and problem.divides(plan)):
        return found
    return _with(found, [run.descend(plan), plan], run)


def _with(found: SearchResult, best: list[Candidate], run: _Steps) -> SearchResult:
    """The result with other plans at its head, and all that were placed for them."""
    plans = first_of_each(sorted((*best, *found.plans), key=found.problem.key))
    return replace(found, plans=tuple(plans), every=(*found.every, *run.made))


def _is_stored(rule: SearchRule) -> bool:
    return bool(stored_rules((rule,)))


def _general(rules: Rules) -> Rules:
    return tuple(rule for rule in rules if not rule.selector)


@dataclass(slots=True)
class _Steps:
    """One search by steps that may add the rules in `options`; `made` are the plans placed.

    `before` are plans that have been placed by walks already.
    """

    problem: Problem
    options: list[SearchRule]
    before: Mapping[tuple[Asked, str], Candidate] = field(default_factory=dict)
    known: dict[Asked, Candidate | None] = field(default_factory=dict)
    made: list[Candidate] = field(default_factory=list)

    def descend(
        self, plan: Candidate, free: Callable[[SearchRule], bool] = lambda rule: True
    ) -> Candidate:
        """The best step from a plan, and from there, until none is better.

        Only rules that are `free` are left out.
        """
        while not self.problem.expired():
            neighbours = self._all_placed(list(self.steps_from(plan.rules, free)), plan)
            better = [p for p in neighbours if p is not None and self.problem.is_better(p, plan)]
            if not better:
                break
            plan = min(better, key=self.problem.key)
        return plan

    def steps_from(self, rules: Rules, free: Callable[[SearchRule], bool]) -> Iterator[Rules]:
        """The rules with one more or less, or with another one in its place.

        Rules that store several roles by one dim also leave together: each alone may be useful only
        because of the others.
        """
        fixed, most = self.problem.fixed, self.problem.request.max_rules
        general = {rule.dim: rule.axes for rule in rules if not rule.selector}
        loose = [rule for rule in rules if rule not in fixed and free(rule)]
        for rule in loose:
            yield tuple(other for other in rules if other is not rule)
        for dim, count in Counter(rule.dim for rule in stored_rules(tuple(loose))).items():
            if count > 1:
                left_out = [rule for rule in stored_rules(tuple(loose)) if rule.dim == dim]
                yield tuple(other for other in rules if other not in left_out)
        for rule in self.options:
            if rule in rules or rule.axes == general.get(rule.dim, ()):
                continue
            others = [r for r in rules if (r.selector, r.dim) != (rule.selector, rule.dim)]
            if all(r in others for r in fixed) and (most is None or len(others) < most):
                yield (*others, rule)

    def _all_placed(self, steps: list[Rules], than: Candidate) -> Iterator[Candidate | None]:
        """The better walk of each, some of which the second process has placed before."""
        problem = self.problem
        ahead = [r for r in steps if replace(than, rules=r).asked not in self.known]
        ahead = ahead if than.execution is problem.execution else []
        for number in range(-AHEAD, len(steps)):
            if number + AHEAD < len(ahead):
                problem.ask(ahead[number + AHEAD], math.inf, None, problem.value(than))
            if number >= 0:
                yield self.placed(steps[number], than)

    def placed(self, rules: Rules, than: Candidate) -> Candidate | None:
        """The better walk of some rules, in stages as `than` is.

        None where they cannot be followed or send too much.
        """
        key = replace(than, rules=rules).asked
        if key not in self.known:
            self.known[key] = self._placed(rules, than)
        return self.known[key]

    def _placed(self, rules: Rules, than: Candidate) -> Candidate | None:
        problem, best = self.problem, None
        try:
            problem.spend()
            for new in problem.executed(rules, than.execution):
                plan = self.before.get((new.asked, new.policy), new)
                problem.within(plan, math.inf, None)
                if not problem.divides(plan) or (plan.schedule and not plan.is_piped):
                    continue
                self.made.append(plan)
                # What sends more than what is known to be better need not be timed.
                if problem.at_least(plan) > problem.value(than):
                    continue
                if problem.is_better(plan, best):
                    best = plan
        except DiagnosticError:
            problem.drop(rules)
            return None
        return best


def _options(problem: Problem) -> Iterator[SearchRule]:
    """A rule for each selector, each dim of what it selects, and each axis that may split it.

    `none` is an option too: it frees what is selected of a general rule. Where memory is what
    counts, rules for roles are options, as they are for all general rules.
    """
    space, values = problem.space, tuple(values_of(problem.program))
    every = named_tensors(problem.program) if problem.request.per_tensor else ()
    for selector in dict.fromkeys((*selectors(problem.program), *((v.label,) for v in every))):
        chosen = [v for v in values if selects(selector, v) is not None]
        names = dict.fromkeys(name for v in chosen for name in v.type.names)
        for dim in (d for d in space.dims if d.name in names):
            for axes in ((), *((axis,) for axis in dim.axes if space.divides(dim, (axis,)))):
                yield SearchRule(dim.name, axes, selector)
    if problem.request.storage and (problem.objective == "memory" or problem.request.memory):
        yield from _stored_options(problem)


def _stored_options(problem: Problem) -> Iterator[SearchRule]:
    """Rules for what is stored: of parameters, gradients and states."""
    names = {name for p in problem.program.params for name in p.value.type.names}
    for dim in (d for d in problem.space.dims if d.name in names):
        for axis in (a for a in dim.axes if problem.space.divides(dim, (a,))):
            for role in ROLES if problem.program.states else ROLES[:1]:
                yield SearchRule(dim.name, (axis,), (role,))
