"""Random graphs with costs, small enough to try every choice."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from meshdsl.costgraph.graph import CostFactor, CostGraph, Variable


def graphs(count: int, seed: int, memory: bool = False) -> Iterator[CostGraph]:
    """Graphs of 1 to 7 variables: forbidden combinations, ties, lone choices, wide factors."""
    for k in range(count):
        draw = np.random.default_rng([seed, k])
        variables = int(draw.integers(1, 8))
        sizes = draw.integers(1, 5, variables)
        factors = [_factor(draw, sizes) for _ in range(int(draw.integers(1, 3 * variables + 1)))]
        held = tuple(
            CostFactor((i,), draw.integers(0, 9, n).astype(np.float64)) for i, n in enumerate(sizes)
        )
        if memory and k % 2:
            held = (*held, *(_held(draw, sizes) for _ in range(variables)))
        most = sum(float(f.cost.max()) for f in held)
        named = tuple(
            Variable(f"v{i}", tuple(f"c{j}" for j in range(n))) for i, n in enumerate(sizes)
        )
        limit = float(draw.uniform(0.2, 1.0)) * most if memory else math.inf
        yield CostGraph(named, tuple(factors), held if memory else (), limit)


def _held(draw: np.random.Generator, sizes: np.ndarray) -> CostFactor:
    factor = _factor(draw, sizes)
    return CostFactor(factor.scope, np.where(np.isinf(factor.cost), 0.0, factor.cost))


def _factor(draw: np.random.Generator, sizes: np.ndarray) -> CostFactor:
    width = int(draw.integers(1, min(3, len(sizes)) + 1))
    scope = tuple(sorted(int(i) for i in draw.choice(len(sizes), width, replace=False)))
    cost = draw.integers(0, 20, [sizes[i] for i in scope]).astype(np.float64)
    cost[draw.random(cost.shape) < 0.1] = math.inf
    return CostFactor(scope, cost)
