"""A search from a layout that is there: never worse than it, and what each change to it saves."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.diagnostics import DiagnosticError
from meshdsl.records import dataclass
from meshdsl.search.candidate import PLAIN, Candidate, Execution, Rules, SearchRule, StartLayout
from meshdsl.search.local_search import onwards
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.reasons import saved

Item = SearchRule | Execution
"""A part of a layout that may change: one rule, or all that is no rule."""


@dataclass(frozen=True, slots=True)
class Change:
    """A part of a layout that is another one, new or gone; the plan `than` it, and with it."""

    before: Item | None
    after: Item | None
    than: Candidate
    plan: Candidate

    @property
    def saved(self) -> dict[str, float]:
        """What the change saves."""
        return saved(self.plan, self.than)

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"{'+' if self.after else '-'} {self.after or self.before}"
        now = self.after
        if not isinstance(now, SearchRule):
            return f"{self.before}, now {now}"
        axes = ", ".join(now.axes) or "none"
        return f"{self.before}, now {f'({axes})' if len(now.axes) > 1 else axes}"


def started(problem: Problem) -> Candidate:
    """The layout that a search begins from, by its better walk. Raises what placing it raises."""
    assert problem.start is not None
    return placed_as(problem, problem.start)


def placed_as(problem: Problem, layout: StartLayout) -> Candidate:
    """A layout by its better walk. Raises what placing it raises."""
    return _better(problem, layout.rules, layout.execution)


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
    old, new = _parts(here), _parts(best)
    left = [k for k in dict.fromkeys((*old, *new)) if str(old.get(k)) != str(new.get(k))]
    while left:
        tried = [(k, _changed(found, here, old.get(k), new.get(k))) for k in left]
        can = [(k, plan) for k, plan in tried if plan is not None]
        if not can:
            return
        key, plan = min(can, key=lambda pair: problem.key(pair[1]))
        yield Change(old.get(key), new.get(key), here, plan)
        here = plan
        left.remove(key)


def _parts(plan: Candidate) -> dict[tuple[tuple[str, ...], str], Item]:
    parts: dict[tuple[tuple[str, ...], str], Item] = {(r.selector, r.dim): r for r in plan.rules}
    if plan.execution != PLAIN:
        parts[(), ""] = plan.execution
    return parts


def _changed(
    found: SearchResult, plan: Candidate, before: Item | None, after: Item | None
) -> Candidate | None:
    """A plan with one part in the place of another; None where it cannot be followed."""
    rules, execution = plan.rules, plan.execution
    if isinstance(before, Execution) or isinstance(after, Execution):
        execution = after if isinstance(after, Execution) else PLAIN
    else:
        rules = (*(r for r in rules if r != before), *((after,) if after else ()))
    best = found.plans[0]
    if set(rules) == set(best.rules) and str(execution) == str(best.execution):
        return best
    try:
        return _better(found.problem, rules, execution)
    except DiagnosticError:
        return None


def _better(problem: Problem, rules: Rules, execution: Execution) -> Candidate:
    return min(problem.executed(rules, execution), key=problem.key)
