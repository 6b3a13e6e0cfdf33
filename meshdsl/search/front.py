"""The front of memory and the objective: plans that no other one beats in both."""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.search.plan import Plan
from meshdsl.search.problem import Problem


def front(problem: Problem, plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """The plans of the front that fit, from the best by the objective to the least memory."""
    found: list[Plan] = []
    for plan in sorted(filter(problem.fits, plans), key=problem.key):
        if not found or plan.peak < found[-1].peak:
            found.append(plan)
    return tuple(found)
