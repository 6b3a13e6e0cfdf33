"""The methods on graphs with costs: all exact ones agree, and none is below what it proves."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from meshdsl.costgraph import exact
from meshdsl.costgraph.annealing import anneal, change
from meshdsl.costgraph.exact import branch_and_bound, eliminate, integer_program, priced_memory
from meshdsl.costgraph.graph import CostFactor, CostGraph, Variable
from tests.costgraph.random_graphs import graphs

CLOSE = 1e-9


def least(graph: CostGraph) -> float:
    """The least cost within the limit, of every choice."""
    every = itertools.product(*(range(n) for n in graph.sizes))
    within = (p for p in every if graph.bytes(p) <= graph.limit)
    return min((graph.cost(p) for p in within), default=math.inf)


def test_exact_methods_agree() -> None:
    for graph in graphs(100, seed=1):
        expected = least(graph)
        for found in (
            branch_and_bound(graph),
            branch_and_bound(graph, bounded=False),
            eliminate(graph),
            integer_program(graph),
        ):
            assert found.proven
            assert found.cost == pytest.approx(expected, abs=CLOSE), found.method
            assert bool(found.picks) == math.isfinite(expected)
            if found.picks:
                assert graph.cost(found.picks) == found.cost


def test_exact_methods_agree_without_any_memory() -> None:
    """A limit of 0 leaves the choices that take no memory, if there are any."""
    for graph in graphs(40, seed=4, memory=True):
        graph = replace(graph, limit=0.0)
        expected = least(graph)
        for solve in (branch_and_bound, integer_program):
            assert solve(graph).cost == pytest.approx(expected, abs=CLOSE)
        assert priced_memory(graph).cost >= expected - CLOSE


def test_what_a_factor_forbids_costs_a_larger_one_no_variables() -> None:
    """Seven dims that meet in one tensor: of 8 ** 7 combinations no two share an axis."""
    pairs = list(itertools.combinations(range(7), 2))
    choices = tuple(format(axes, "03b") for axes in range(8))
    shared = np.array([[math.inf if i & j else 0.0 for j in range(8)] for i in range(8)])
    split = np.full((8,) * 7, 9.0)
    split[0, 0, 0, 7, 0, 0, 0] = 1.0
    graph = CostGraph(
        tuple(Variable(f"d{i}", choices) for i in range(7)),
        (*(CostFactor(pair, shared) for pair in pairs), CostFactor(tuple(range(7)), split)),
    )
    found = integer_program(graph)
    assert found.cost == 1.0
    assert found.picks == (0, 0, 0, 7, 0, 0, 0)
    # Each of three axes at one of seven dims or at none; `work` counts coefficients.
    assert found.work < 10 * 8**3 * 7


def test_the_bound_leaves_branches_out() -> None:
    pairs = [(branch_and_bound(g), branch_and_bound(g, bounded=False)) for g in graphs(50, 2)]
    assert all(a.work <= b.work for a, b in pairs)
    assert sum(a.work for a, _ in pairs) < 0.7 * sum(b.work for _, b in pairs)


def test_a_search_that_visits_too_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = max(graphs(20, 2), key=lambda graph: math.prod(graph.sizes))
    monkeypatch.setattr(exact, "MOST_VISITED", 10)
    for bounded in (True, False):
        with pytest.raises(exact.TooWide):
            branch_and_bound(graph, bounded)


def test_memory_limits_are_kept() -> None:
    bounded = 0
    for graph in graphs(100, seed=3, memory=True):
        expected = least(graph)
        for found in (branch_and_bound(graph), integer_program(graph)):
            assert found.cost == pytest.approx(expected, abs=CLOSE), found.method
        priced = priced_memory(graph)
        if not math.isfinite(expected):
            assert not priced.picks
            continue
        assert graph.bytes(priced.picks) <= graph.limit
        assert priced.bound - CLOSE <= expected <= priced.cost + CLOSE
        bounded += priced.gap < 0.5
    assert bounded > 50


def test_a_proposed_change_is_the_difference_of_whole_costs() -> None:
    draw = random.Random(0)
    tried = 0
    for graph in graphs(100, seed=4):
        picks = [draw.randrange(n) for n in graph.sizes]
        for _ in range(100):
            variable = draw.randrange(len(picks))
            choice = draw.randrange(graph.sizes[variable])
            other = [*picks[:variable], choice, *picks[variable + 1 :]]
            before, after = graph.cost(picks), graph.cost(other)
            if math.isfinite(before) and math.isfinite(after):
                assert change(graph, picks, variable, choice) == pytest.approx(after - before)
            picks = other
            tried += 1
    assert tried == 10_000


def test_annealing_finds_small_optima_and_repeats_itself() -> None:
    reached = 0
    for graph in graphs(20, seed=5):
        found = anneal(graph, proposals=500)
        assert found == anneal(graph, proposals=500)
        expected = least(graph)
        assert found.cost >= expected
        assert not found.proven
        reached += found.cost == expected
    assert reached >= 15
