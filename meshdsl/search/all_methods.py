"""Every registered method on the question of one request: for `search --compare-methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from meshdsl.costgraph.method_rows import Figures, MethodRow, compared
from meshdsl.pipeline import Compilation
from meshdsl.records import dataclass
from meshdsl.search.infeasible import refuse_limit
from meshdsl.search.problem import Method, Problem, SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import solve

BUDGET = 10.0
"""The budget of each method where none is asked for: else `exhaustive` would place every layout."""


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """The methods of search on one question, in the order of the registry.

    `devices`: on every mesh of so many; None for the one of `problem`.
    """

    problem: Problem
    rows: tuple[MethodRow, ...]
    devices: int | None


def compare_methods(
    request: SearchRequest, made: Compilation, methods: Mapping[str, Method]
) -> MethodComparison:
    """Each method on the problem of a request; none shares its plans with another.

    Raises the diagnostic of the first method where none has an answer.
    """
    request = replace(request, budget=BUDGET if request.budget is None else request.budget)
    search_results: list[SearchResult] = []

    def figures(name: str) -> Figures:
        tasks = problems(replace(request, method=name), made)
        if search_results:  # the certificate is one of all plans: it is made once
            tasks = tuple(replace(t, request=replace(t.request, certificate=False)) for t in tasks)
        search_result = solve(tasks, methods[name])
        if not search_result.plans:
            refuse_limit(search_result, name)
        search_results.append(search_result)
        return _figures(search_result, search_results[0])

    rows = compared({name: partial(figures, name) for name in methods})
    return MethodComparison(search_results[0].problem, rows, request.devices)


def _figures(found: SearchResult, first: SearchResult) -> Figures:
    """The figures of a result; the bound of all plans, if asked for, is that of the first one."""
    cost = found.problem.value(found.plans[0])
    bound = found.bound or None
    if bound is None and first.certificate is not None:
        bound = first.certificate.least
    counts = [result.count for result in (found, *found.others)]
    placed = [count.evaluated + count.steps + count.pipelines for count in counts]
    steps = [c.work or n + c.bounded for c, n in zip(counts, placed, strict=True)]
    return Figures(cost, sum(steps), found.proven, bound, sum(placed))
