"""Graphs with costs for methods that sample: factors are summed, placements simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshdsl.costgraph.black_box import OUTSIDE, BlackBox, Picks, Sampler, outside
from meshdsl.costgraph.device_placement import Devices, GraphOperator, Placed, makespan
from meshdsl.costgraph.graph import CostGraph, Solution, cheapest_of_each

TRIALS = 200
"""Choices that are tried at most."""


def sampled_costs(name: str, sampler: Sampler) -> Callable[[CostGraph], Solution]:
    """A sampler as a method for graphs of placements; it begins with the cheapest of each node."""

    def solve(graph: CostGraph) -> Solution:
        def cost(picks: Picks) -> float:
            excess = graph.bytes(picks) - graph.limit
            return outside(excess / max(graph.limit, 1.0)) if excess > 0 else graph.cost(picks)

        box = BlackBox(graph.sizes, cost)
        sampler(box, TRIALS, [cheapest_of_each(graph)])
        picks, least = box.best()
        least_cost = least if least < OUTSIDE else math.inf
        note = "a sample: nothing is proven"
        tried = len(box.tried)
        return Solution(
            name, picks if least < OUTSIDE else (), least_cost, -math.inf, False, tried, note
        )

    return solve


def sampled_devices(sampler: Sampler) -> Callable[[Sequence[GraphOperator], Devices], Placed]:
    """A sampler as a method for operators on devices; it begins with one device."""

    def place(operators: Sequence[GraphOperator], devices: Devices) -> Placed:
        groups = 1 + max(operator.group for operator in operators)

        def cost(picks: Picks) -> float:
            return makespan(operators, picks, devices)

        box = BlackBox((devices.count,) * groups, cost)
        sampler(box, TRIALS, [(0,) * groups])
        places, seconds = box.best()
        return Placed(places, seconds, len(box.tried))

    return place
