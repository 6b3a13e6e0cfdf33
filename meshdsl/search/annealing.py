"""The search of FlexFlow (Jia, Zaharia, Aiken 2019): a Markov chain over choices, cooled.

One variable is proposed another choice; a dearer one is accepted with probability exp(-more/T). T
falls geometrically over three decades. The change in cost is computed from the factors that see
the variable; that it equals the difference of whole costs is a property that tests hold it to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from meshdsl.search.graph import CostGraph, Solution, cheapest_of_each

PROPOSALS = 20_000
"""Proposals of one chain."""

DECADES = 3
"""Powers of ten that the temperature falls by."""

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
    """The best choice that chains from `starts`, and from the cheapest of each variable, pass.

    The memory limit is kept by proposing nothing beyond it. The same seed gives the same answer.
    """
    best: tuple[int, ...] = ()
    cost = math.inf
    for k, start in enumerate((*starts, cheapest_of_each(graph))):
        found = _chain(graph, list(start), proposals, random.Random(seed + k))
        if (now := graph.cost(found)) < cost and graph.bytes(found) <= graph.limit:
            best, cost = found, now
    work = proposals * (len(starts) + 1)
    return Solution("mcmc", best, cost, -math.inf, False, work, "a sample: nothing is proven")


def _chain(
    graph: CostGraph, picks: list[int], proposals: int, draw: random.Random
) -> tuple[int, ...]:
    free = [i for i, size in enumerate(graph.sizes) if size > 1]
    if not free:
        return tuple(picks)
    hot = _first_temperature(graph, picks, free, draw)
    cost = least = graph.cost(picks)
    best = tuple(picks)
    for step in range(proposals):
        variable = draw.choice(free)
        choice = draw.randrange(graph.sizes[variable] - 1)
        choice += choice >= picks[variable]
        more = change(graph, picks, variable, choice)
        warm = hot * 10 ** (-DECADES * step / proposals)
        if not _accepts(more, warm, draw) or not _fits(graph, picks, variable, choice):
            continue
        picks[variable] = choice
        cost = cost + more if math.isfinite(cost) else graph.cost(picks)
        if cost < least:
            least, best = cost, tuple(picks)
    return best


def _accepts(more: float, warm: float, draw: random.Random) -> bool:
    if more == math.inf:
        return False
    return more <= 0 or (warm > 0 and draw.random() < math.exp(-more / warm))


def _fits(graph: CostGraph, picks: Sequence[int], variable: int, choice: int) -> bool:
    if not math.isfinite(graph.limit):
        return True
    other = (*picks[:variable], choice, *picks[variable + 1 :])
    held = graph.bytes(other)
    return held <= graph.limit or held < graph.bytes(picks)


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
