"""Methods on the sum of the tables: they agree with every layout, and place what they find."""

from __future__ import annotations

import pytest

from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.exact import branch_and_bound, integer_program, priced_memory
from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import Candidate
from meshdsl.search.methods import METHODS
from meshdsl.search.space import LayoutSpace
from meshdsl.search.table_methods import Summed
from meshdsl.search.tables import Tables, picked, table_graph

from .problems import CASES, LINE, SQUARE, UNEQUAL, named, problem

each_case = pytest.mark.parametrize(
    ("name", "mesh"), CASES, ids=lambda of: of.name if isinstance(of, Mesh) else of
)


@each_case
def test_exact_methods_find_the_least_sum_of_all_layouts(name: str, mesh: Mesh) -> None:
    space = LayoutSpace(named(name), mesh)
    most = space.least() * 1.15
    graph, tables = table_graph(space, most), Tables(space)
    every = branch_and_bound(graph)
    assert integer_program(graph).cost == every.cost
    priced = priced_memory(graph)
    assert priced.bound <= every.cost <= priced.cost
    rules = space.rules(picked(space, every))
    assert tables.sent(rules) == every.cost
    # Work is bounded from below by other tables in a space: what they let pass may be more.
    assert min(tables.sent(r) for _, r in space.within(most)) <= every.cost
    assert anneal(graph, proposals=500).cost >= every.cost


@pytest.mark.parametrize("method", ["elimination", "ilp", "mcmc"])
@pytest.mark.parametrize("name", ["net", "mlp"])
def test_what_is_found_is_placed(method: str, name: str) -> None:
    asked = problem(name, SQUARE)
    found = METHODS[method].solve(asked)
    assert isinstance(METHODS[method], Summed)
    assert not found.proven
    best = METHODS["layouts"].solve(asked)
    assert asked.value(best.plans[0]) <= asked.value(found.plans[0])


@pytest.mark.parametrize("mesh", [LINE, SQUARE, UNEQUAL], ids=str)
@pytest.mark.parametrize("method", ["elimination", "tofu"])
def test_what_is_found_divides_the_work(method: str, mesh: Mesh) -> None:
    """The tables let `moe` divide more of it than the walks do on one of these, which is said."""
    asked = problem("moe", mesh)
    plans: tuple[Candidate, ...] = ()
    codes: list[str] = []
    try:
        plans = METHODS[method].solve(asked).plans
    except DiagnosticError as error:
        codes = [d.code for d in error.diagnostics]
    assert plans or codes == ["MD0641"]
    assert all(plan.flops <= asked.most_work for plan in plans)
