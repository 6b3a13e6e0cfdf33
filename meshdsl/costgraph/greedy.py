"""A heuristic for graphs with costs: one variable after another, then each anew until none changes.

The variables whose own and shared costs differ most come first; each takes the choice that adds the
least to a bound, in which a factor counts with the least that its open variables allow. Then every
variable takes what is best beside all others until none changes: iterated conditional modes (Besag
1986). What exceeds the limit of memory counts before any cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.graph import CostFactor, CostGraph, Solution

SWEEPS = 20
"""The sweeps over all variables at most."""


def greedy(graph: CostGraph) -> Solution:
    """What the heuristic chooses; infinitely dear where that is forbidden or beyond the limit."""
    picks: dict[int, int] = {}
    work = 0
    order = sorted(range(len(graph.sizes)), key=lambda i: (-_spread(graph, i), i))
    for variable in order:
        work += graph.sizes[variable]
        picks[variable] = _best(graph, picks, variable)
    for _ in range(SWEEPS):
        before = dict(picks)
        for variable in order:
            work += graph.sizes[variable]
            picks[variable] = _best(graph, picks, variable)
        if picks == before:
            break
    chosen = tuple(picks[i] for i in range(len(graph.sizes)))
    fits = graph.bytes(chosen) <= graph.limit
    cost = graph.cost(chosen) if fits else math.inf
    note = "a heuristic: nothing is proven"
    return Solution("greedy", chosen if cost < math.inf else (), cost, -math.inf, False, work, note)


def _spread(graph: CostGraph, variable: int) -> float:
    """How much the costs that a variable has a part in differ."""
    finite = (f.cost[np.isfinite(f.cost)] for f in graph.seen_by[variable])
    return math.fsum(float(c.max() - c.min()) for c in finite if c.size)


def _best(graph: CostGraph, picks: dict[int, int], variable: int) -> int:
    """The choice of a variable with the least bound; the present one where none is less."""
    held = [f for f in graph.memory if variable in f.scope]
    fixed_bytes = (
        sum(_least(f, picks) for f in graph.memory if variable not in f.scope) if held else 0.0
    )

    def key(choice: int) -> tuple[float, float, bool, int]:
        chosen = {**picks, variable: choice}
        excess = (
            max(0.0, fixed_bytes + sum(_least(f, chosen) for f in held) - graph.limit)
            if held
            else 0
        )
        cost = math.fsum(_least(f, chosen) for f in graph.seen_by[variable])
        forbidden = cost if cost == math.inf else excess
        return forbidden, cost, choice != picks.get(variable), choice

    return min(range(graph.sizes[variable]), key=key)


def _least(factor: CostFactor, picks: dict[int, int]) -> float:
    """The least of a factor, given the choices of some of its variables."""
    at: Sequence[int | slice] = [picks.get(i, slice(None)) for i in factor.scope]
    return float(np.min(factor.cost[tuple(at)]))
