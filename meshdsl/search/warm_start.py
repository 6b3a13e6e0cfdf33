"""A search from a layout that is there: never worse than it, and what each change to it saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.diagnostics import DiagnosticError
from meshdsl.search.candidate import Candidate, Rules, SearchRule
from meshdsl.search.local_search import onwards
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.reasons import Reason


@dataclass(frozen=True, slots=True)
class Change:
    """A rule for a dim that is another one, new or gone; the plan `than` it, and with it."""

    before: SearchRule | None
    after: SearchRule | None
    than: Candidate
    plan: Candidate

    @property
    def reason(self) -> Reason:
        """What the change saves, as the reason of a rule."""
        rule = self.after or self.before
        assert rule is not None
        return Reason(rule, self.plan, self.than)

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"{'+' if self.after else '-'} {self.after or self.before}"
        return f"{self.before}, now {', '.join(self.after.axes) or 'none'}"


def started(problem: Problem) -> Candidate:
    """The layout that a search begins from, by its better walk. Raises what placing it raises."""
    assert problem.start is not None
    return _better(problem, problem.start)


def begun(found: SearchResult) -> SearchResult:
    """The result, or what steps from the layout that was given lead to, if that is better."""
    return onwards(found, started(found.problem))


def changes(found: SearchResult) -> Iterator[Change]:
    """The way from the layout that was given to the best plan, change by change.

    Each time the change is made that leads to the best plan by itself; so what all changes save
    adds up to what the best plan saves.
    """
    problem, best = found.problem, found.plans[0]
    assert problem.start is not None
    here = started(problem)
    old, new = ({(r.selector, r.dim): r for r in rules} for rules in (here.rules, best.rules))
    left = [k for k in dict.fromkeys((*old, *new)) if old.get(k) != new.get(k)]
    while left:
        tried = [(k, _changed(found, here, old.get(k), new.get(k))) for k in left]
        can = [(k, plan) for k, plan in tried if plan is not None]
        if not can:
            return
        key, plan = min(can, key=lambda pair: problem.key(pair[1]))
        yield Change(old.get(key), new.get(key), here, plan)
        here = plan
        left.remove(key)


def _changed(
    found: SearchResult, plan: Candidate, before: SearchRule | None, after: SearchRule | None
) -> Candidate | None:
    """A plan with one rule in the place of another; None where it cannot be followed."""
    rules = (*(r for r in plan.rules if r != before), *((after,) if after else ()))
    if set(rules) == set(found.plans[0].rules):
        return found.plans[0]
    try:
        return _better(found.problem, rules)
    except DiagnosticError:
        return None


def _better(problem: Problem, rules: Rules) -> Candidate:
    return min(problem.plans(rules), key=problem.key)
