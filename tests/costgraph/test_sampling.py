"""Methods that prove nothing: never below the exact ones, the same again, and right where known."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from pathlib import Path

import pytest

from meshdsl.costgraph.bayesian import bayesian
from meshdsl.costgraph.black_box import BlackBox, Sampler
from meshdsl.costgraph.critical_path import critical_path
from meshdsl.costgraph.device_placement import Devices, GraphOperator, exhaustive, makespan
from meshdsl.costgraph.exact import branch_and_bound
from meshdsl.costgraph.graph import CostGraph, Solution
from meshdsl.costgraph.greedy import greedy
from meshdsl.costgraph.learned import learned
from meshdsl.costgraph.sampled_graphs import sampled_costs
from tests.cli.command import Cli
from tests.cli.conftest import cli

from .random_graphs import graphs
from .test_device_placement import random_model
from .test_graph_file import NEEDS, PLACEMENT

__all__ = ["cli"]

SAMPLERS = {"bayesian": bayesian, "learned": learned}


def sampler(name: str) -> Sampler:
    """A sampler, where its package is there."""
    pytest.importorskip(NEEDS[name])
    return SAMPLERS[name]


def is_sound(graph: CostGraph, found: Solution) -> bool:
    """Whether a solution is what it says: its cost, within the limit, not below the least."""
    least = branch_and_bound(graph).cost
    if not found.found:
        return not found.proven and found.picks == ()
    fits = graph.bytes(found.picks) <= graph.limit
    return fits and found.cost == pytest.approx(graph.cost(found.picks)) and found.cost >= least


@pytest.mark.parametrize("memory", [False, True])
def test_the_heuristic_is_never_below_the_least(memory: bool) -> None:
    reached = 0
    every = list(graphs(60, seed=11, memory=memory))
    for graph in every:
        found = greedy(graph)
        assert is_sound(graph, found)
        assert found == greedy(graph)
        reached += found.cost == pytest.approx(branch_and_bound(graph).cost)
    assert reached > len(every) / 2


def test_the_heuristic_is_exact_where_variables_are_apart() -> None:
    for graph in graphs(20, seed=12):
        alone = CostGraph(graph.variables, tuple(f for f in graph.factors if len(f.scope) == 1))
        assert greedy(alone).cost == pytest.approx(branch_and_bound(alone).cost)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_never_below_the_least(name: str) -> None:
    solve = sampled_costs(name, sampler(name))
    for graph in graphs(4, seed=13, memory=True):
        found = solve(graph)
        assert is_sound(graph, found)
        assert found.work <= 200


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_the_same_again_and_counts_its_trials(name: str) -> None:
    search, calls = sampler(name), list[tuple[int, ...]]()

    def cost(picks: tuple[int, ...]) -> float:
        calls.append(picks)
        return math.inf if picks[0] == picks[1] else sum((x - 1) ** 2 for x in picks)

    boxes = [BlackBox((4, 4, 1, 4, 4), cost) for _ in range(2)]
    for box in boxes:
        search(box, 40, [(2, 0, 0, 3, 3)])
    first, second = boxes
    assert list(first.tried.items()) == list(second.tried.items())
    assert len(calls) == 2 * len(first.tried) <= 80
    assert next(iter(first.tried)) == (2, 0, 0, 3, 3)
    assert first.best()[1] < first.tried[2, 0, 0, 3, 3]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_small_space_is_tried_whole_or_to_its_least(name: str) -> None:
    """Six choices: after 60 trials the best is the least of all, as brute force finds it."""
    costs = dict(zip(itertools.product(range(3), range(2)), (5.0, 4, 3, 7, 2, 9), strict=True))
    box = BlackBox((3, 2), lambda picks: costs[picks[0], picks[1]])
    sampler(name)(box, 60)
    assert box.best() == ((2, 0), 2)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_package_that_is_not_installed_is_named(
    name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == NEEDS[name]]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    Path("graph.json").write_text(json.dumps(PLACEMENT), "utf-8")
    done = cli("search", "graph.json", "--graph", "--method", name)
    assert done.codes == ["error[MD0667]"]
    assert "meshdsl[search]" in done.err
    table = cli("search", "graph.json", "--graph", "--compare-methods")
    assert table.code == 0
    assert f"{name}: MD0667: the method `{name}` needs the package" in table.out


# --- critical paths ------------------------------------------------------------------------------


def test_the_critical_path_is_never_better_than_every_placement() -> None:
    draw = random.Random(5)
    for _ in range(20):
        model, devices = random_model(draw), Devices(3, 1, 2)
        found = critical_path(model, devices)
        assert found.seconds == makespan(model, found.devices, devices)
        assert found.seconds >= exhaustive(model, devices).seconds


def test_independent_chains_go_to_devices_of_their_own() -> None:
    """Three chains of one group each, interleaved: as fast as the longest of them."""
    lengths = (5, 4, 2)
    model, last = list[GraphOperator](), dict[int, int]()
    for step in range(max(lengths)):
        for chain, length in enumerate(lengths):
            if step < length:
                reads = (last[chain],) if chain in last else ()
                last[chain] = len(model)
                model.append(GraphOperator(chain, 1.0, 8.0, reads))
    found = critical_path(model, Devices(3, 1, 2))
    assert found.seconds == 5
    assert sorted(found.devices) == [0, 1, 2]


def test_one_device_where_transfers_take_longest() -> None:
    model = [GraphOperator(g, 1.0, 1.0, (g - 1,) if g else ()) for g in range(5)]
    assert {*critical_path(model, Devices(4, 1e3, 1e9)).devices} == {0}
