"""Rules for functions and parameters: no single rule more or less is better than what is found."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import values_of
from meshdsl.named.selectors import selects
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import POLICIES, Candidate, SearchRule
from meshdsl.search.certificate import certificate
from meshdsl.search.local_search import selectors
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.reasons import reasons
from meshdsl.search.shapes import solve
from tests.covering import in_turn

from .problems import LINE, SQUARE, problem

OBJECTIVES = {"bytes": "", "time": "h100"}
CASES = [("net", LINE), ("net", SQUARE), ("mlp", LINE), ("lookup", LINE)]


@functools.cache
def found_for(
    name: str, mesh: Mesh, objective: str, cluster: str, **limits: Any
) -> tuple[Problem, SearchResult]:
    asked = problem(name, mesh, objective, cluster, selectors=True, storage=False, **limits)
    return asked, solve([asked], METHODS["layouts"])


@in_turn(case=CASES, objective=OBJECTIVES)
def test_no_neighbour_is_better(case: tuple[str, Mesh], objective: str) -> None:
    """Neighbours are listed here anew: every selector, every dim, every axis, and less a rule."""
    name, mesh = case
    asked, found = found_for(name, mesh, objective, OBJECTIVES[objective])
    best = found.plans[0]
    without = replace(asked.request, selectors=False)
    plain = METHODS["layouts"].solve(replace(asked, request=without)).plans[0]
    assert asked.key(best) <= asked.key(plain)
    values = list(values_of(asked.program))
    axes = [(), *((a,) for a in mesh.names)]
    rules = {
        SearchRule(d.name, along, selector)
        for selector in selectors(asked.program)
        for v in values
        if selects(selector, v) is not None
        for d in v.type.dims
        for along in axes
        if d.size % 2 == 0
    }
    near = [tuple(r for r in best.rules if r != rule) for rule in best.rules]
    for rule in sorted(rules, key=str):
        kept = (r for r in best.rules if (r.selector, r.dim) != (rule.selector, rule.dim))
        near.append((*kept, rule))
    limit = asked.least or min(p.flops for p in found.every)
    for made in (p for rules in near for p in _placed(asked, rules)):
        if objective == "time" or made.flops <= limit * (1 + asked.request.replicated):
            assert asked.value(made) >= asked.value(best), str(made)


def _placed(asked: Problem, rules: tuple[SearchRule, ...]) -> list[Candidate]:
    made = [asked.plan(rules, policy) for policy in POLICIES]
    return [plan for plan in made if _can_be_followed(plan)]


def _can_be_followed(plan: Candidate) -> bool:
    try:
        return plan.flops > 0
    except DiagnosticError:
        return False


@in_turn(case=[("net", LINE), ("lookup", LINE)], objective=OBJECTIVES)
def test_rules_for_every_tensor_are_never_worse(case: tuple[str, Mesh], objective: str) -> None:
    (name, mesh), cluster = case, OBJECTIVES[objective]
    asked, fewer = found_for(name, mesh, objective, cluster)
    asked, found = found_for(name, mesh, objective, cluster, per_tensor=True)
    best = found.plans[0]
    assert asked.value(best) <= asked.value(fewer.plans[0])
    known = certificate(asked)
    assert known is not None
    assert asked.value(best) >= known.least
    assert found.count.level == "L3"


def test_rules_that_are_fixed_stay() -> None:
    fixed = (SearchRule("hidden", ("x",)),)
    _, found = found_for("net", LINE, "bytes", "", fixed=fixed)
    assert all(fixed[0] in plan.rules for plan in found.plans)


def test_no_more_rules_than_asked() -> None:
    """Without a limit more are shown than with it."""
    shown = [len(plan.rules) for plan in found_for("net", SQUARE, "bytes", "")[1].plans]
    assert max(shown) == 2
    for mesh, objective, most in ((SQUARE, "bytes", 1), (LINE, "time", 0)):
        _, found = found_for("net", mesh, objective, OBJECTIVES[objective], max_rules=most)
        assert found.plans
        assert all(len(plan.rules) <= most for plan in found.plans)


@in_turn(case=[*CASES, ("dlrm", LINE)], tight=(False, True), objective=OBJECTIVES)
def test_no_printed_rule_does_harm(case: tuple[str, Mesh], tight: bool, objective: str) -> None:
    asked = problem(*case, objective, OBJECTIVES[objective])
    if tight:
        peaks = sorted(plan.peak for plan in METHODS["layouts"].solve(asked).every)
        asked = replace(asked, request=replace(asked.request, memory=peaks[len(peaks) // 4]))
    found = solve([asked], METHODS["layouts"])
    best = found.plans[0]
    least = found.problem.least or min(plan.flops for plan in found.every)
    for reason in reasons(found, best):
        without = reason.without
        if without is None or not asked.fits(without):
            continue
        if objective == "time" or without.flops <= least * (1 + asked.request.replicated):
            assert asked.value(without) >= asked.value(best), str(reason.rule)
