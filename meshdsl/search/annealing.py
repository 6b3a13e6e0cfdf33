"""The search of FlexFlow (Jia, Zaharia, Aiken 2019): a Markov chain over choices, cooled.

One variable is proposed another choice; a dearer one is accepted with probability exp(-more/T). T
falls geometrically over three decades. The change in cost is computed from the factors that see
the variable; that it equals the difference of whole costs is a property that tests hold it to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from meshdsl.search.graph import CostGraph, Solution, cheapest_of_each

PROPOSALS = 20_000
"""Proposals of all chains together."""

DECADES = 3
"""Powers of ten that the temperature falls by."""

RESTARTS = 4
"""Chains that begin with choices drawn at random."""

TRIED = 200
"""Proposals whose mean change is the first temperature."""


def change(graph: CostGraph, picks: Sequence[int], variable: int, choice: int) -> float:
    """What the cost changes by if a variable changes: of the factors that see it."""
    other = list(picks)
    other[variable] = choice
    seen = graph.seen_by[variable]
    before, after = (math.fsum(f.of(p) for f in seen) for p in (picks, other))
    return 0.0 if before == after == math.inf else after - before


def anneal(
    graph: CostGraph,
    starts: Sequence[Sequence[int]] = (),
    proposals: int = PROPOSALS,
    seed: int = 0,
) -> Solution:
    """The best choice that chains pass: from `starts`, the cheapest of each variable, and others.

    What exceeds the memory limit costs more, so that chains may pass through. The same seed gives
    the same answer.
    """
    best: tuple[int, ...] = ()
    cost = math.inf
    draw = random.Random(seed)
    others = [[draw.randrange(n) for n in graph.sizes] for _ in range(RESTARTS)]
    begun = (*starts, cheapest_of_each(graph), *others)
    for start in begun:
        found = _chain(graph, list(start), proposals // len(begun), draw)
        if (now := graph.cost(found)) < cost and graph.bytes(found) <= graph.limit:
            best, cost = found, now
    note = "a sample: nothing is proven"
    return Solution("mcmc", best, cost, -math.inf, False, proposals, note)


def _chain(
    graph: CostGraph, picks: list[int], proposals: int, draw: random.Random
) -> tuple[int, ...]:
    free = [i for i, size in enumerate(graph.sizes) if size > 1]
    if not free:
        return tuple(picks)
    hot = _first_temperature(graph, picks, free, draw)
    cost, held = graph.cost(picks), graph.bytes(picks)
    best, least = tuple(picks), cost if held <= graph.limit else math.inf
    over = _price(graph)
    for step in range(proposals):
        variable = draw.choice(free)
        choice = draw.randrange(graph.sizes[variable] - 1)
        choice += choice >= picks[variable]
        more = change(graph, picks, variable, choice)
        warm = hot * 10 ** (-DECADES * step / proposals)
        other = [*picks[:variable], choice, *picks[variable + 1 :]]
        then = graph.bytes(other)
        beyond = over * (max(then, graph.limit) - max(held, graph.limit)) if over else 0.0
        if not _accepts(more + beyond, warm, draw):
            continue
        picks, held = other, then
        cost = cost + more if math.isfinite(cost) else graph.cost(picks)
        if held <= graph.limit and cost < least:
            least, best = cost, tuple(picks)
    return best


def _price(graph: CostGraph) -> float:
    """What a byte beyond the limit costs: all of it again, what costs differ by in all."""
    if not math.isfinite(graph.limit):
        return 0.0
    finite = (f.cost[np.isfinite(f.cost)] for f in graph.factors)
    return math.fsum(float(c.max() - c.min()) for c in finite if c.size) / max(graph.limit, 1.0)


def _accepts(more: float, warm: float, draw: random.Random) -> bool:
    if more == math.inf:
        return False
    return more <= 0 or (warm > 0 and draw.random() < math.exp(-more / warm))


def _first_temperature(
    graph: CostGraph, picks: Sequence[int], free: Sequence[int], draw: random.Random
) -> float:
    """The mean size of finite changes."""
    found = []
    for _ in range(TRIED):
        variable = draw.choice(free)
        more = change(graph, picks, variable, draw.randrange(graph.sizes[variable]))
        if math.isfinite(more):
            found.append(abs(more))
    return sum(found) / len(found) if found else 0.0
