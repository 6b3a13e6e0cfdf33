"""With a cluster the policy `optimal` takes the least predicted time."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed import optimal, place
from meshdsl.placed.place import cost
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import Price
from tests.covering import in_turn
from tests.report.golden import CASES, PIPELINE, SIZES, Case, source

CLUSTERS = ("h100", "v100-p3")
SEARCHED = ("digits", "lm", "matmul", "mlp")
"""Examples of which the plan that is found is taken."""


def _placed(text: Source, options: Options) -> Compilation:
    return compile_source(text, replace(options, cache=False), Diagnostics(), "placed")


def _nanoseconds(made: Compilation) -> int:
    return cost(made.placed, Price(clock=made.timing))[0]


ALL = "MESHDSL_CASES" in os.environ
SOON = [case for case in CASES if ALL or case.example in (*SEARCHED, "dlrm", "moe")]
"""Cases that are placed in a second; the others with `MESHDSL_CASES`."""


@in_turn(case=SOON, cluster=CLUSTERS)
def test_no_plan_of_least_bytes_takes_less_time(case: Case, cluster: str) -> None:
    options = Options(layout=case.layout, set_dims=SIZES.get(case.example, {}), cluster=cluster)
    least = _placed(source(case.example), options)
    other = _placed(source(case.example), replace(options, objective="bytes"))
    assert _nanoseconds(least) <= _nanoseconds(other)


PLANNED = [c for c in CASES if c.example in SEARCHED and c != PIPELINE]


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_the_cost_of_a_plan_is_that_of_what_is_placed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[optimal.PlacementPlan | None] = []

    def watched(request: Request, price: Price) -> optimal.PlacementPlan | None:
        found.append(optimal.solve(request, price))
        return found[-1]

    monkeypatch.setattr(place, "solve", watched)
    options = Options(layout=case.layout, set_dims=SIZES.get(case.example, {}), cluster="h100")
    made = _placed(source(case.example), options)
    assert [plan and plan.cost for plan in found] == [_nanoseconds(made)]


def test_more_bytes_may_take_less_time() -> None:
    """A small product: a ring of four has more hops than two rings of two, one after the other."""
    options = Options(layout="inner_twice", cluster="h100")
    least = _placed(source("matmul"), options)
    other = _placed(source("matmul"), replace(options, objective="bytes", message_bytes=0))
    assert _nanoseconds(least) < _nanoseconds(other)
    assert cost(least.placed, Price())[0] > cost(other.placed, Price())[0]


def test_plans_of_other_clusters_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path))
    for cluster in (None, *CLUSTERS, "h100"):
        options = Options(layout="inner_twice", cluster=cluster)
        compile_source(source("matmul"), options, Diagnostics(), "placed")
    assert len([*tmp_path.glob("plans/*.json")]) == 1 + len(CLUSTERS)
