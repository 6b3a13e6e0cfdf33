"""The layouts that a file has already: what a search finds is no worse than any of them."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.diagnostics import DiagnosticError
from meshdsl.search.candidate import PLAIN, Candidate, StartLayout
from meshdsl.search.local_search import onwards
from meshdsl.search.problem import Problem, SearchResult


def with_declared(found: SearchResult) -> SearchResult:
    """The result; or where a layout of the file is better, that one and what steps lead to."""
    problem = found.problem
    best, better, name = next(iter(found.plans), None), None, ""
    for layout in problem.declared:
        if found.proven and found.plans and _is_listed(problem, layout):
            continue
        plan = _placed(problem, layout, best)
        if plan is not None:
            best = better = plan
            name = layout.name
    if better is None:
        return found
    count = replace(found.count, further=f"the search went on from `{name}` of the file")
    return replace(onwards(found, better), count=count, bound=0.0)


def _is_listed(problem: Problem, layout: StartLayout) -> bool:
    """Whether a layout is one of the general rules of the space."""
    if layout.execution != PLAIN or any(rule.selector for rule in layout.rules):
        return False
    space = problem.space
    axes = {rule.dim: rule.axes for rule in layout.rules}
    is_known = axes.keys() <= {dim.name for dim in space.dims}
    return is_known and space.allows([axes.get(dim.name, ()) for dim in space.dims])


def _placed(problem: Problem, layout: StartLayout, best: Candidate | None) -> Candidate | None:
    """The walk of a layout that is better than what is known; None where there is none."""
    better = None
    if not problem.may_divide(layout.rules, layout.execution):
        return None
    problem.spend()
    for plan in problem.executed(layout.rules, layout.execution):
        try:
            if _is_better(problem, plan, better or best):
                better = plan
        except DiagnosticError:
            return better
    return better


def _is_better(problem: Problem, plan: Candidate, than: Candidate | None) -> bool:
    if problem.is_too_large(plan):
        return False
    if than is not None and plan.schedule is None and problem.objective != "memory":
        settings = plan.execution.settings
        timed = problem.objective == "time"
        computing = (0.0 if settings else problem.computing(plan.rules)) if timed else None
        if plan.within(problem.value(than), computing) is not None:
            return False
    if not problem.divides(plan):
        return False
    # Of equals what was found stays: `is_better` would go by what is sent and held beside.
    is_less = than is None or problem.value(plan) < problem.value(than)
    return is_less and problem.fits(plan)
