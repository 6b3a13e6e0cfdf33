"""The front of memory and the objective: plans that no other one beats in both."""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.search.candidate import Candidate
from meshdsl.search.problem import Problem


def front(problem: Problem, plans: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The plans of the front that fit, from the best by the objective to the least memory."""
    on_front: list[Candidate] = []
    for plan in sorted(filter(problem.fits, plans), key=problem.key):
        if not on_front or plan.peak < on_front[-1].peak:
            on_front.append(plan)
    return tuple(on_front)
