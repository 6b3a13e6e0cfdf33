"""The search of FlexFlow (Jia, Zaharia, Aiken 2019): a Markov chain over choices, cooled.

One variable is proposed another choice, to which others may have to give way; a dearer one is
accepted with probability exp(-more/T). T falls geometrically over three decades. The change in cost
is computed from the factors that see what is changed; that it equals the difference of whole costs
is a property that tests hold it to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.graph import CostFactor, CostGraph, Solution, cheapest_of_each

PROPOSALS = 20_000
"""Proposals of all chains together."""

DECADES = 3
"""Powers of ten that the temperature falls by."""

RESTARTS = 4
"""Chains that begin with choices drawn at random."""

GIVE_WAY = 0.5
"""The part of proposals in which other variables give way where a factor forbids a choice."""

TRIED = 200
"""Proposals whose mean change is the first temperature."""


def change(graph: CostGraph, picks: Sequence[int], variable: int, choice: int) -> float:
    """What the cost changes by if a variable changes: of the factors that see it."""
    return changed(graph, picks, {variable: choice})


def changed(graph: CostGraph, picks: Sequence[int], choices: Mapping[int, int]) -> float:
    """What the cost changes by if some variables change."""
    other = list(picks)
    for variable, choice in choices.items():
        other[variable] = choice
    seen = list(dict.fromkeys(f for variable in choices for f in graph.seen_by[variable]))
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
        reached = _chain(graph, list(start), proposals // len(begun), draw)
        if (now := graph.cost(reached)) < cost and graph.bytes(reached) <= graph.limit:
            best, cost = reached, now
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
        proposed = _proposed(graph, picks, free, draw)
        more = changed(graph, picks, proposed)
        warm = hot * 10 ** (-DECADES * step / proposals)
        other = [proposed.get(i, pick) for i, pick in enumerate(picks)]
        then = graph.bytes(other) if math.isfinite(graph.limit) else held
        beyond = over * (max(then, graph.limit) - max(held, graph.limit)) if over else 0.0
        if not _accepts(more + beyond, warm, draw):
            continue
        picks, held = other, then
        cost = cost + more if math.isfinite(cost) else graph.cost(picks)
        if held <= graph.limit and cost < least:
            least, best = cost, tuple(picks)
    return best


def _proposed(
    graph: CostGraph, picks: Sequence[int], free: Sequence[int], draw: random.Random
) -> dict[int, int]:
    """Another choice of a variable; now and then others give way to it.

    Where of several variables only one may have something, no single change takes it from one to
    another.
    """
    variable = draw.choice(free)
    changes = {variable: _other(graph, picks, variable, draw)}
    if draw.random() >= GIVE_WAY:
        return changes
    now = list(picks)
    now[variable] = changes[variable]
    for factor in graph.seen_by[variable]:
        if math.isfinite(factor.of(now)):
            continue
        for other in factor.scope:
            if other == variable or math.isfinite(factor.of(now)):
                continue
            free_of = [k for k in range(graph.sizes[other]) if _allows(factor, now, other, k)]
            if free_of:
                now[other] = changes[other] = draw.choice(free_of)
    return changes


def _allows(factor: CostFactor, picks: list[int], variable: int, choice: int) -> bool:
    """Whether a factor is finite once a variable has this choice."""
    return math.isfinite(factor.of([*picks[:variable], choice, *picks[variable + 1 :]]))


def _other(graph: CostGraph, picks: Sequence[int], variable: int, draw: random.Random) -> int:
    choice = draw.randrange(graph.sizes[variable] - 1)
    return choice + (choice >= picks[variable])


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
    sizes = []
    for _ in range(TRIED):
        variable = draw.choice(free)
        more = change(graph, picks, variable, draw.randrange(graph.sizes[variable]))
        if math.isfinite(more):
            sizes.append(abs(more))
    return sum(sizes) / len(sizes) if sizes else 0.0
