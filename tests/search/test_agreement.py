"""Every example on every mesh of at most eight devices: methods agree, and bounds are bounds.

CI takes a few of the cases, by number; `MESHDSL_CASES` all.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import Compute, walk
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import walk as walk_named
from meshdsl.placed.placements import Mesh
from meshdsl.search.budget import Budget
from meshdsl.search.candidate import Candidate
from meshdsl.search.local_search import less
from meshdsl.search.lower_bounds import ROUNDING
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.reasons import reasons
from meshdsl.search.request import SearchRequest
from meshdsl.search.space import seconds
from meshdsl.search.tables import Tables
from tests.project import matching

from .problems import TEXTS, named

ALL = "MESHDSL_CASES" in os.environ
STEP = 10
"""One case in so many is taken: their objectives and meshes take turns."""

VISITED = 20_000
"""The general layouts, times operators, that `exhaustive` places with rules for storage in 20 s.

Where there are more (1.5e11 layouts of unet on eight devices), no method is to find better than a
proof allows."""

MESHES = [
    Mesh("any", tuple(zip("xyz", sizes, strict=False)))
    for sizes in ((2,), (3,), (4,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2))
]
PLACING = {"bayesian", "learned"}
"""The methods that place up to 64 layouts: CI takes them on two devices."""

QUICK = ("matmul", "mlp")
"""The examples with so few layouts that CI can wait for all of them."""

EXAMPLES = [p.stem for p in matching("examples/*.mdsl") if ALL or p.stem in QUICK]
OBJECTIVES = ("bytes", "memory", "time")
EVERY = [(e, m, o) for e in (*TEXTS, *EXAMPLES) for m in MESHES for o in OBJECTIVES]
CASES = EVERY if ALL else EVERY[::STEP]


def answer(method: str, problem: Problem) -> SearchResult | list[str]:
    """What a method finds, or the codes of why it finds nothing."""
    try:
        return METHODS[method].solve(problem)
    except DiagnosticError as error:
        return [d.code for d in error.diagnostics]


def _label(case: tuple[str, Mesh, str]) -> str:
    return " ".join(map(str, case)).replace(",", " ")


@pytest.fixture(scope="module", params=CASES, ids=_label)
def case(request: pytest.FixtureRequest) -> tuple[Problem, SearchResult]:
    """A problem and its best by `layouts`; of general rules alone, unless all cases are taken."""
    name, mesh, objective = request.param
    timing = Timing(load("cpu"), mesh) if objective == "time" else None
    problem = Problem(named(name), mesh, objective, SearchRequest(storage=ALL), timing)
    found = answer("layouts", problem)
    if isinstance(found, list):
        assert answer("exhaustive", problem) == found
        pytest.skip("no layout divides the work")
    return problem, found


@pytest.mark.timeout(3_600)  # all layouts of the largest space take 10 minutes on a busy core
def test_methods_agree(case: tuple[Problem, SearchResult]) -> None:
    problem, found = case
    best = found.plans[0]
    if problem.space.count * len(problem.program.body) <= VISITED:
        every = METHODS["exhaustive"].solve(problem)
        assert every.proven
        if found.proven:
            assert problem.value(best) == problem.value(every.plans[0])
        best = every.plans[0]
    elif not found.proven:
        pytest.skip("neither proven nor all visited")
    most = problem.space.least() * (1 + problem.request.replicated)
    places = set() if ALL or problem.mesh.devices == 2 else PLACING
    for method in METHODS.keys() - {"layouts", "exhaustive"} - places:
        other = answer(method, problem)
        for plan in other.plans if isinstance(other, SearchResult) else ():
            if problem.objective == "time" or plan.flops <= most:
                assert problem.value(plan) >= problem.value(best)


def computing(plan: Candidate) -> float:
    """The seconds of all operators, one after another."""
    timing = plan.timing
    assert timing is not None
    nodes = ((n, times) for n, times in walk(plan.device.body) if isinstance(n, Compute))
    return sum(timing.node(node).seconds * times for node, times in nodes)


def test_bounds_are_bounds(case: tuple[Problem, SearchResult]) -> None:
    problem, found = case
    tables = Tables(problem.space)
    weigh = seconds(problem.timing) if problem.timing else None
    for plan in found.every:
        assert plan.sent_at_least <= plan.sent
        if problem.timing is not None:
            assert problem.at_least(plan) <= plan.seconds
        at_once = replace(plan, policy="immediate")
        # Of operators that a split takes apart, in loops too, tables count what they are made of.
        placed = sum(1 for _ in walk_named(at_once.placed.rewritten.body))
        same = placed == sum(1 for _ in walk_named(problem.program.body))
        if same and not any(rule.selector for rule in plan.rules):
            assert at_once.sent_at_least <= tables.sent(plan.rules)
        if weigh and not any(rule.selector for rule in plan.rules):
            assert plan.seconds >= problem.space.of(plan.rules, weigh) * (1 - ROUNDING)
            assert plan.seconds >= computing(plan) * (1 - ROUNDING)


def test_no_rule_can_be_left_out(case: tuple[Problem, SearchResult]) -> None:
    problem, found = case
    found = less(found)
    best = found.plans[0]
    keys = [problem.key(plan) for plan in found.plans]
    assert keys == sorted(keys)
    most = problem.space.least() * (1 + problem.request.replicated)
    for reason in reasons(found, best):
        without = reason.without
        if without is not None and (problem.objective == "time" or without.flops <= most):
            assert problem.key(without) >= problem.key(best)


def test_an_unused_device_is_never_worse(case: tuple[Problem, SearchResult]) -> None:
    problem, found = case
    if problem.objective == "bytes":
        return  # work that is divided sends more than work that is not
    one = replace(problem, mesh=Mesh("one", (("x", 1),)))
    if problem.timing is not None:
        one = replace(one, timing=Timing(problem.timing.cluster, one.mesh))
    if problem.objective == "time" or ALL:
        assert problem.value(found.plans[0]) <= one.value(METHODS["layouts"].solve(one).plans[0])


@pytest.mark.parametrize("most", [0, 3, 300])
def test_where_the_budget_is_over_there_is_an_answer(
    case: tuple[Problem, SearchResult], most: int
) -> None:
    problem, found = case
    over = replace(problem, budget=Budget(most))
    answer = METHODS["layouts"].solve(over)
    assert answer.plans
    assert answer.bound <= problem.value(found.plans[0]) <= problem.value(answer.plans[0])
