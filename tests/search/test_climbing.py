"""Spaces too large to be listed: a beam climbs them, and finds what listing does where both can."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

import pytest

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search import enumeration
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.search.enumeration import Layouts
from meshdsl.search.hill_climbing import climbed, varied
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem
from meshdsl.search.request import SearchRequest
from meshdsl.search.tables import Tables
from meshdsl.syntax.parse import read_source
from tests.covering import in_turn
from tests.project import ROOT

MESH = Mesh("square", (("data", 2), ("model", 2)))
ALL = "MESHDSL_CASES" in os.environ
SMALL = ["mlp", "dlrm", "nmt", "alexnet", "transformer", *(["encdec", "moe"] if ALL else [])]


@cache
def problem(name: str, timed: bool = False, storage: bool = False) -> Problem:
    """The search of an example on four devices."""
    source = read_source(ROOT / "examples" / f"{name}.mdsl")
    program = Compilation(source, Options()).named
    timing = Timing(load("h100"), MESH) if timed else None
    objective = "time" if timed else "bytes"
    return Problem(program, MESH, objective, SearchRequest(storage=storage), timing)


def at_once(items: Iterable[Rules]) -> Iterable[Rules]:
    return items


@pytest.mark.parametrize("name", [*SMALL, *(["resnet"] if ALL else [])])
def test_the_beam_leads_to_the_least_of_all(name: str) -> None:
    """By the bytes of the tables, among the layouts that divide the work."""
    found, space = problem(name), problem(name).space
    sent, most = Tables(space).sent, problem(name).most_work
    least = min(sent(rules) for _, rules in space.within(most))

    def key(rules: Rules) -> tuple[float, ...]:
        return max(0.0, space.of(rules) - found.most_work), sent(rules)

    seen = climbed(space, key, at_once, most)
    assert min(map(key, seen)) == (0.0, least)
    assert len(set(seen)) == len(seen)
    for rules in seen:
        axes = {rule.dim: rule.axes for rule in rules}
        assert space.allows([axes.get(dim.name, ()) for dim in space.dims])


@in_turn(
    name=[*SMALL, "vgg"] if ALL else ["mlp", "dlrm", "nmt", "transformer"], timed=(False, True)
)
def test_climbing_finds_what_listing_does(
    name: str, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same problem, if nothing could be listed; then nothing is proven.

    It is no worse than elimination's layout, no rules at all, and the batch over any devices. Vgg
    has millions of layouts: nobody lists them.
    """
    whole = Layouts().solve(problem(name, timed))
    monkeypatch.setattr(enumeration, "LISTED", 0)
    found = Layouts().solve(problem(name, timed))
    monkeypatch.undo()
    best = [made.problem.value(made.plans[0]) for made in (found, whole)]
    assert best[0] <= best[1] * 1.02
    assert not found.proven
    asked = found.problem
    told = METHODS["elimination"].solve(asked).plans[0].rules
    for plan in (plan for rules in (told, *simple(asked)) for plan in asked.plans(rules)):
        if asked.divides(plan):
            assert best[0] <= asked.value(plan)


def simple(asked: Problem) -> list[Rules]:
    """Nothing split, and the batch over some axes or all."""
    (batch,) = {dim.name for dim in asked.space.dims} & {"n", "batch"}
    ways = ((), ("data",), ("model",), ("data", "model"))
    return [(SearchRule(batch, axes),) if axes else () for axes in ways]


def test_few_rules_have_their_turn() -> None:
    one, two, three = (tuple(SearchRule(d, ("a",)) for d in dims) for dims in ("x", "xy", "xyz"))
    other = (SearchRule("z", ("a",)),)
    assert varied([three, two, one, other]) == [three, two, one, other]
    assert varied([one, other, three]) == [one, three, other]
