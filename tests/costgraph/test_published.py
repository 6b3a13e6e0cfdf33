"""What published searches found, on graphs with costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.exact import branch_and_bound, eliminate, integer_program
from meshdsl.costgraph.graph import CostFactor, CostGraph
from tests.costgraph.convnets import Layer, alexnet, graph, vgg16


@pytest.mark.parametrize(("layers", "faster"), [(alexnet(), 1.2), (vgg16(), 1.0)])
def test_convolutions_split_samples_and_products_channels(
    layers: tuple[Layer, ...], faster: float
) -> None:
    """OptCNN (Jia et al. 2018, section 6): layers differ, and beat data parallelism.

    With P100 and NVLink by their data sheets; the published speed-ups are of its own measurements.
    """
    costs = graph(layers)
    found = eliminate(costs)
    for name, split in costs.names(found.picks).items():
        assert split == ("c=4" if name.startswith("fc") else "n=4"), name
    data = [v.choices.index("n=4") for v in costs.variables]
    assert costs.cost(data) > found.cost * faster
    assert integer_program(costs).cost == pytest.approx(found.cost, rel=1e-9)


def test_elimination_does_less_than_branches() -> None:
    costs = graph(alexnet())
    quick, slow = eliminate(costs), branch_and_bound(costs)
    assert quick.cost == pytest.approx(slow.cost, rel=1e-12)
    assert quick.work < slow.work / 50


def test_annealing_comes_near() -> None:
    """FlexFlow (Jia, Zaharia and Aiken 2019): a sample, started from data parallelism."""
    costs = graph(alexnet())
    data = [v.choices.index("n=4") for v in costs.variables]
    found = anneal(costs, starts=[data], proposals=4_000)
    assert eliminate(costs).cost <= found.cost <= costs.cost(data)


def scaled(costs: CostGraph, by: float) -> CostGraph:
    return replace(costs, factors=tuple(CostFactor(f.scope, f.cost * by) for f in costs.factors))


def test_units_do_not_matter() -> None:
    """Costs in seconds are small for the solver of 0-1 programs: it is given others."""
    costs = graph(alexnet())
    for by in (1e-9, 1e9):
        found = integer_program(scaled(costs, by))
        assert found.cost == pytest.approx(eliminate(costs).cost * by, rel=1e-9)
