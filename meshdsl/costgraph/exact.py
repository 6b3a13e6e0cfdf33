"""Exact methods on graphs with costs: branch and bound, elimination, and a 0-1 program.

`branch_and_bound` visits choices in depth, and leaves a branch where what is decided, and the least
that the rest can cost, is no less than the best so far; without the bound it visits every choice.
`eliminate` is the elimination of nodes and edges of OptCNN (Jia et al. 2018) and PaSE (Elango 2021)
for factors of any width: bucket elimination (Dechter 1999). `integer_program` is that of Alpa
(Zheng et al. 2022), where the choices that an edge sees are tied by equal marginals.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.graph import (
    CostFactor,
    CostGraph,
    Costs,
    Solution,
    added,
    entries,
    finite_combinations,
    least_memory,
    merged,
)
from meshdsl.placed.zero_one import ALWAYS, NoPlan, Terms, ZeroOne, total

MOST_ENTRIES = 30_000_000
"""Entries of the tables of one elimination, in all."""

FEW = 100_000
"""Choices of all variables that are visited rather than eliminated."""

MOST_VISITED = 5_000_000
"""Choices that a search in depth visits."""

MOST_COEFFICIENTS = 150_000
"""Coefficients of a 0-1 program."""

ROUNDS = 40
"""Halvings of the price of memory."""

SCALE = 1e6
"""What the cost of a typical solution is made before it is given to the solver."""


class TooWide(Exception):
    """The tables or the 0-1 program of a graph are larger than a method takes; it says which."""


# --- branch and bound ----------------------------------------------------------------------------


def branch_and_bound(graph: CostGraph, bounded: bool = True) -> Solution:
    """The least choice within the memory limit; every choice is visited unless `bounded`.

    Raises TooWide.
    """
    if not bounded and math.prod(graph.sizes) > MOST_VISITED:
        raise TooWide(f"there are {math.prod(graph.sizes):,} combinations of choices to visit")
    search = _Branches(graph, bounded)
    search.descend(0, *search.constant)
    name = "branch and bound" if bounded else "exhaustive"
    picks = tuple(search.best_picks)
    cost = graph.cost(picks) if search.best < math.inf else math.inf
    return Solution(name, picks, cost, cost, True, search.visited)


Row = Callable[[Sequence[int]], Costs]
"""What a factor costs with each choice of its last variable, given the choices of all others."""


class _Branches:
    """The state of a depth-first search; variables are decided in their order."""

    def __init__(self, graph: CostGraph, bounded: bool) -> None:
        self.graph, self.bounded = graph, bounded
        closed, held = _by_last(graph, graph.factors), _by_last(graph, graph.memory)
        self.rest, self.held_rest = _least_of_rest(closed), _least_of_rest(held)
        self.closed, self.held = ([[*map(_row, fs)] for fs in side] for side in (closed, held))
        self.constant = tuple(
            sum(f.of(()) for f in fs if not f.scope) for fs in (graph.factors, graph.memory)
        )
        self.limited = math.isfinite(graph.limit)
        self.picks: list[int] = [0] * len(graph.variables)
        self.best_picks: list[int] = []
        self.best = math.inf
        self.visited = 0

    def descend(self, at: int, cost: float, held: float) -> None:
        """Decide the variables from `at` on; `cost` and `held` are those of closed factors."""
        if at == len(self.picks):
            if cost < self.best and held <= self.graph.limit:
                self.best, self.best_picks = cost, list(self.picks)
            return
        self.visited += self.graph.sizes[at]
        if self.visited > MOST_VISITED:
            raise TooWide(f"more than {MOST_VISITED:,} choices would be visited")
        now = self._after(at, self.closed[at], cost)
        # Nobody asks for bytes that may be any number.
        bytes_ = self._after(at, self.held[at], held) if self.limited else now
        # What is forbidden costs infinitely much: no less than anything.
        fits = now + self.rest[at + 1] < self.best if self.bounded else np.isfinite(now)
        if self.limited:
            fits = fits & (bytes_ + self.held_rest[at + 1] <= self.graph.limit)
        for choice in fits.nonzero()[0].tolist():
            cost, held = now.item(choice), bytes_.item(choice)
            if self.bounded and cost + self.rest[at + 1] >= self.best:
                continue  # a better plan has been found meanwhile
            self.picks[at] = choice
            self.descend(at + 1, cost, held)

    def _after(self, at: int, rows: list[Row], so_far: float) -> Costs:
        """What all that is decided costs with each choice of a variable, by the rows of it."""
        if not rows:
            return np.full(self.graph.sizes[at], so_far)
        return so_far + sum((row(self.picks) for row in rows[1:]), rows[0](self.picks))


def _row(factor: CostFactor) -> Row:
    """The row of a factor that is known once its last variable is decided."""
    if not factor.scope[:-1]:
        return lambda picks: factor.cost
    others = itemgetter(*factor.scope[:-1])
    return lambda picks: factor.cost[others(picks)]


def _by_last(graph: CostGraph, factors: tuple[CostFactor, ...]) -> list[list[CostFactor]]:
    """The factors by the last variable they see: known once that is decided. None of constants."""
    by_last: list[list[CostFactor]] = [[] for _ in graph.variables]
    for factor in factors:
        if factor.scope:
            by_last[max(factor.scope)].append(factor)
    return by_last


def _least_of_rest(closed: list[list[CostFactor]]) -> list[float]:
    """The least that the factors closed from each variable on can cost."""
    bounds = [0.0]
    for factors in reversed(closed):
        bounds.append(bounds[-1] + sum(float(f.cost.min()) for f in factors))
    return bounds[::-1]


# --- elimination ---------------------------------------------------------------------------------

Order = tuple[tuple[int, ...], int]
"""Variables in an order, and the entries of the tables that eliminating them in it makes."""


def least(graph: CostGraph) -> Solution:
    """The least choice within the memory limit: of few all are visited, others are eliminated.

    Unproven where a price of memory does not lead to it. Raises TooWide.
    """
    few = entries(range(len(graph.sizes)), graph.sizes) <= FEW
    return branch_and_bound(graph) if few else priced_memory(graph)


def eliminate(graph: CostGraph, by: Order | None = None) -> Solution:
    """The least choice, without regard to memory, in an order that is known or found.

    Raises TooWide.
    """
    order, work = by or elimination_order(graph)
    tables = list(merged(graph.factors))
    eliminated: list[tuple[int, CostFactor]] = []
    for variable in order:
        seen = [t for t in tables if variable in t.scope]
        scope = tuple(sorted({i for t in seen for i in t.scope} | {variable}))
        joint = added(seen, scope, graph.sizes)
        at = scope.index(variable)
        others = tuple(i for i in scope if i != variable)
        eliminated.append((variable, CostFactor(others, joint.argmin(axis=at))))
        tables = [t for t in tables if variable not in t.scope]
        tables.append(CostFactor(others, joint.min(axis=at)))
    picks = [0] * len(graph.variables)
    for variable, best in reversed(eliminated):
        picks[variable] = int(best.of(picks))
    cost = graph.cost(picks)
    if not math.isfinite(cost):
        return Solution("elimination", (), math.inf, math.inf, True, work)
    return Solution("elimination", tuple(picks), cost, cost, True, work)


def elimination_order(graph: CostGraph) -> Order:
    """Variables in the order of fewest new neighbours, then smallest tables, then the graph's.

    With it the entries of all tables that are made in it. Raises TooWide where they are too many.
    """
    near = {i: set(n) for i, n in enumerate(graph.neighbours)}
    order, needed = [], 0
    while near:
        variable = min(near, key=lambda i: (_fill(near, i), entries([i, *near[i]], graph.sizes), i))
        needed += entries([variable, *near[variable]], graph.sizes)
        if needed > MOST_ENTRIES:
            raise TooWide(f"an elimination would make more than {MOST_ENTRIES:,} entries of tables")
        around = near.pop(variable)
        for i in around:
            near[i] |= around - {i}
            near[i].discard(variable)
        order.append(variable)
    return tuple(order), needed


def _fill(near: dict[int, set[int]], variable: int) -> int:
    """Pairs of neighbours that eliminating a variable would make neighbours of each other."""
    around = sorted(near[variable])
    return sum(b not in near[a] for k, a in enumerate(around) for b in around[k + 1 :])


# --- the 0-1 program -----------------------------------------------------------------------------


def integer_program(graph: CostGraph) -> Solution:
    """The least choice within the memory limit, by the solver of 0-1 programs.

    Unproven if branching was left early. Raises TooWide, too, where nothing was found by then.
    """
    model = ZeroOne(MOST_COEFFICIENTS)
    scale = SCALE / (_typical(graph) or 1.0)
    held: list[Terms] = []
    try:
        picks = [model.choice(size) for size in graph.sizes]
        for scope, factors, memory in _largest(graph):
            costs, bytes_ = (added(fs, scope, graph.sizes) for fs in (factors, memory))
            if graph.limit == 0:  # no share of it can be a coefficient: what takes memory is out
                costs = np.where(bytes_ > 0, math.inf, costs)
            for at, terms in _taken(model, picks, CostFactor(scope, costs)).items():
                model.pay(terms, float(costs[at]) * scale)
                share = float(bytes_[at]) / graph.limit if graph.limit else 0.0
                held.append({i: c * share for i, c in terms.items()})
        if math.isfinite(graph.limit):
            model.at_most(total(held), ALWAYS)
        answer = model.minimise()
    except NoPlan:
        if model.coefficients > model.most:
            raise TooWide(f"the 0-1 program has more than {model.most:,} coefficients") from None
        return Solution("ilp", (), math.inf, math.inf, True, model.coefficients)
    if answer is None:
        raise TooWide("the 0-1 program was not solved within the limits of the solver")
    chosen = tuple(next(k for k, t in enumerate(ts) if answer.of(t)) for ts in picks)
    cost = graph.cost(chosen)
    bound = cost if answer.proven else -math.inf
    return Solution("ilp", chosen, cost, bound, answer.proven, model.coefficients)


def _typical(graph: CostGraph) -> float:
    """The order of a solution's cost: the sum of the factors' medians."""
    medians = []
    for factor in graph.factors:
        finite = sorted(float(c) for c in factor.cost.flat if math.isfinite(c))
        medians.append(abs(finite[len(finite) // 2]) if finite else 0.0)
    return math.fsum(medians)


def _largest(
    graph: CostGraph,
) -> Iterator[tuple[tuple[int, ...], list[CostFactor], list[CostFactor]]]:
    """The scopes that no other one includes, each with the costs and the memory seen in it.

    What a factor forbids is then forbidden of every larger one, and needs no variables of its own.
    """
    scopes = sorted({f.scope for f in (*graph.factors, *graph.memory)}, key=len, reverse=True)
    homes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for scope in scopes:
        homes[scope] = next((s for s in homes.values() if set(scope) <= set(s)), scope)
    for home in dict.fromkeys(homes.values()):
        both = (graph.factors, graph.memory)
        factors, memory = ([f for f in fs if homes[f.scope] == home] for fs in both)
        yield home, factors, memory


def _taken(
    model: ZeroOne, picks: list[list[Terms]], factor: CostFactor
) -> dict[tuple[int, ...], Terms]:
    """The quantity of each combination of a factor that may be taken."""
    combinations = finite_combinations(factor)
    if not combinations:
        raise NoPlan
    several = [i for i in range(len(factor.scope)) if factor.cost.shape[i] > 1]
    if not several:
        return dict.fromkeys(combinations, ALWAYS)
    if len(several) == 1:
        (i,) = several
        options = dict(enumerate(picks[factor.scope[i]]))
        taken = {at: options.pop(at[i]) for at in combinations}
        for forbidden in options.values():
            model.equal(forbidden, {})
        return taken
    taken = {at: model.variable(whole=False) for at in combinations}
    for i in several:
        by_choice: dict[int, list[Terms]] = defaultdict(list)
        for at, terms in taken.items():
            by_choice[at[i]].append(terms)
        for k, terms in enumerate(picks[factor.scope[i]]):
            model.equal(total(by_choice[k]), terms)
    return taken


# --- memory by a price ---------------------------------------------------------------------------


def priced_memory(graph: CostGraph) -> Solution:
    """A choice within the memory limit, by elimination under a price of memory (Lagrange).

    The best choice within the limit that a price finds, then improved by changing one variable at
    a time; the bound is the greatest that a price gives (Everett 1963). Raises TooWide.
    """
    graph = replace(graph, factors=merged(graph.factors), memory=merged(graph.memory))
    free = eliminate(graph)
    if not free.found or graph.bytes(free.picks) <= graph.limit:
        return replace(free, method="elimination")
    order = elimination_order(_with_price(graph, 0.0))
    lightest = eliminate(least_memory(graph), order)
    if graph.bytes(lightest.picks) > graph.limit:
        return Solution("elimination", (), math.inf, math.inf, True, free.work + lightest.work)
    best, bound, work = lightest.picks, free.cost, free.work + lightest.work
    low, high = 0.0, _highest_price(graph, free.picks, lightest.picks)
    for _ in range(ROUNDS):
        price = (low + high) / 2
        solution = eliminate(_with_price(graph, price), order)
        work += solution.work
        held = graph.bytes(solution.picks)
        bound = max(bound, graph.cost(solution.picks) + price * (held - graph.limit))
        if held <= graph.limit:
            high = price
            best = min(best, solution.picks, key=graph.cost)
        else:
            low = price
    best = _improved(graph, best)
    cost = graph.cost(best)
    return Solution("elimination", best, cost, min(bound, cost), bound >= cost, work)


def _highest_price(graph: CostGraph, free: tuple[int, ...], least: tuple[int, ...]) -> float:
    """A price at which memory alone decides: one byte is worth all that costs may differ."""
    spread = sum(
        float(f.cost[f.cost < math.inf].max() - f.cost.min()) for f in graph.factors if f.cost.size
    )
    saved = graph.bytes(free) - graph.bytes(least)
    return max(spread, 1e-300) / max(saved, 1.0) * len(graph.variables) * 1e3


def _with_price(graph: CostGraph, price: float) -> CostGraph:
    priced = (CostFactor(f.scope, price * f.cost) for f in graph.memory)
    return replace(graph, factors=(*graph.factors, *priced))


def _improved(graph: CostGraph, picks: tuple[int, ...]) -> tuple[int, ...]:
    """Changes of single variables, as long as one costs less and stays within the limit."""
    cost, changed = graph.cost(picks), True
    while changed:
        changed = False
        for i, size in enumerate(graph.sizes):
            for k in range(size):
                other = (*picks[:i], k, *picks[i + 1 :])
                if graph.bytes(other) <= graph.limit and (now := graph.cost(other)) < cost:
                    picks, cost, changed = other, now, True
    return picks
