"""The bound of per-tensor plans: no layout is below it, whoever has chosen it."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceProgram
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed import ir as placed
from meshdsl.placed.placements import Mesh
from meshdsl.placed.reshard import Price, route
from meshdsl.search.candidate import Candidate
from meshdsl.search.certificate import certificate
from meshdsl.search.dual import bound
from meshdsl.search.lower_bounds import ROUNDING
from meshdsl.search.problem import Problem
from meshdsl.search.reshard_tables import ReshardTables
from meshdsl.search.tensor_graph import tensors
from meshdsl.syntax.parse import read_source
from tests.covering import in_turn
from tests.programs.harness import Case, compiled
from tests.programs.strategy import cases
from tests.project import ROOT

from .problems import CASES, LINE, SQUARE, UNEQUAL, problem, solved

RANDOM = int(os.environ.get("MESHDSL_CASES", "12"))
QUICK = ("matmul", "mlp", "digits")


def figures(made: placed.PlacedProgram, device: DeviceProgram, timing: Timing | None) -> Candidate:
    """A placed program as a plan, to have its figures; whose rules it is under does not matter."""
    plan = Candidate(made.named, made.mesh, (), made.policy, timing)
    plan.__dict__.update(placed=made, device=device)
    return plan


def least(asked: Problem, most: float) -> float:
    """The bound under a limit of FLOPs."""
    return bound(tensors(asked, most), lambda: False).least


def check(made: placed.PlacedProgram, device: DeviceProgram) -> None:
    """Neither bytes nor seconds of a placed program are below the bounds."""
    if made.mesh.devices > 16:
        return
    plan = figures(made, device, Timing(load("h100"), made.mesh))
    by_bytes, by_time = (
        Problem(made.named, made.mesh, objective, timing=plan.timing)
        for objective in ("bytes", "time")
    )
    assert least(by_bytes, plan.flops) <= plan.sent
    assert least(by_time, math.inf) <= plan.seconds * (1 + ROUNDING)


@in_turn(
    objective=[("bytes", ""), ("time", "h100")],
    case=[case for case in CASES if case[0] not in ("lm", "moe", "nmt")],
)
def test_no_layout_of_a_search_is_below(case: tuple[str, Mesh], objective: tuple[str, str]) -> None:
    found = solved(*case, "layouts", *objective)
    known = certificate(found.problem)
    assert known is not None
    for plan in found.every:
        assert plan.flops > found.problem.most_work or (
            known.least <= found.problem.value(plan) * (1 + ROUNDING)
        )


@pytest.mark.parametrize("reduce", ["deferred", "optimal"])
@pytest.mark.parametrize("example", QUICK)
def test_no_layout_of_an_example_is_below(example: str, reduce: str) -> None:
    source = read_source(ROOT / "examples" / f"{example}.mdsl")
    declared = Compilation(source, Options()).declarations
    for mesh, layout in itertools.product(declared.meshes, declared.layouts):
        made = Compilation(source, Options(mesh=mesh, layout=layout, reduce=reduce))
        try:
            program = made.placed
        except DiagnosticError:
            continue  # a layout for another mesh
        check(program, made.device)


@seed(0)
@settings(
    max_examples=RANDOM,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
@given(case=cases())
def test_no_layout_of_a_random_program_is_below(case: Case) -> None:
    try:
        made = compiled(case)
        program = made.placed
    except DiagnosticError:
        return  # a layout that does not fit
    check(program, made.device)


@pytest.mark.parametrize("mesh", [LINE, SQUARE, UNEQUAL], ids=lambda mesh: mesh.name)
@pytest.mark.parametrize("cluster", ["", "h100"])
def test_tables_have_the_cheapest_routes(mesh: Mesh, cluster: str) -> None:
    timing = Timing(load(cluster), mesh) if cluster else None
    type_ = TensorType((Dim("a", 1 << 12), Dim("b", 1 << 12)), F32)
    moves, price = ReshardTables(mesh, ("sum",), timing), Price(clock=timing)
    states, table = moves.states(type_), moves.table(type_)
    for source in states.settled:
        for target in states.settled:
            ends = states.placement(int(source)), states.placement(int(target))
            way = route(type_, *ends, mesh, price)
            assert (way is None) == (table[source, target] == math.inf)
            if way is None:
                continue
            if timing is None:
                assert table[source, target] <= way.wire_bytes
                # Of several axes those of one dim are in any order here.
                assert len(mesh.axes) > 1 or table[source, target] == way.wire_bytes
            else:
                assert table[source, target] * 1e9 <= price.of(way, type_)


def test_more_sweeps_do_not_lower_the_bound() -> None:
    asked = problem("net", SQUARE)
    graph = tensors(asked, asked.most_work)
    hasty, patient = bound(graph, lambda: True), bound(graph, lambda: False)
    assert 0 <= hasty.least <= patient.least <= patient.cost
    assert patient.sweeps > hasty.sweeps


def test_what_is_bounded_is_what_is_chosen() -> None:
    asked = problem("net", LINE)
    graph = tensors(asked, asked.most_work)
    found = bound(graph, lambda: False)
    work = sum(n.flops[k] for n, k in zip(graph.nodes, found.picks, strict=True))
    assert work <= graph.most * (1 + 1e-9)
    dearest: dict[object, float] = {}
    for edge in graph.edges:
        ends = found.picks[edge.source], found.picks[edge.target]
        cost = float(edge.cost[edge.made[ends[0]], edge.read[ends[1]]])
        dearest[edge.value] = max(cost, dearest.get(edge.value, 0.0))
    assert np.isclose(sum(dearest.values()), found.cost)


UNEVEN = """
dim a = 2, b = 12
program p(x[a, b], w[b]) {
  y = einsum(x, w -> [a])
  return y
}
"""


@pytest.mark.parametrize("rules", ["a -> y", "b -> (x, y)", "a -> y, b -> x", "a -> (x, y)"])
def test_no_layout_with_uneven_or_empty_blocks_is_below(rules: str) -> None:
    made = compiled(Case(UNEVEN, "x:2,y:4", f"{{ {rules} }}"))
    check(made.placed, made.device)
