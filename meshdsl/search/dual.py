"""A lower bound of the least sum over nodes and edges, by passing messages; and a choice.

Costs are moved between nodes and edges so that every sum stays what it is; then the sum of what is
least for each alone bounds every choice. Sweeps forth and back over the nodes raise it: those of
TRW-S (Kolmogorov 2006), towards the bound of the relaxed 0-1 program (Wainwright, Jaakkola and
Willsky 2005). Any sweep may be the last. Work beyond its limit has a price (Everett 1963), and of
the readers of one tensor the dearest pays: each has a share, that of the dearest is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.named.ir import Value
from meshdsl.records import dataclass
from meshdsl.search.budget import SWEPT, Budget
from meshdsl.search.tensor_graph import Costs, Edge, Numbers, Tensors

SWEEPS = 4
"""Sweeps, forth and back, for each price of work."""

LAST = 60
"""Sweeps at the best price, at most."""

PRICES = 14
"""Prices that are tried."""

HASTY = 5
"""Prices that are tried even if time has run out."""

ROUNDS, SHORT = 16, 3
"""How often shares are changed, and sweeps after each change."""

IN_VAIN = 4
"""Changes of shares in a row that do not raise the bound: then it is left."""

STEP = 1.05
"""The factor by which the price of work changes with them."""

NEAR = 1.25
"""The factor between prices that are too low and too high which shares are begun with."""

ENOUGH = 3e-4
"""The part by which a sweep has to raise the bound for another one to follow."""

ROUNDING = 1e-9
"""The part of a bound that the rounding of sums may be."""


@dataclass(frozen=True, slots=True)
class Bound:
    """No choice costs less than `least`; `picks` is one, of cost `cost`, by node."""

    least: float
    picks: tuple[int, ...]
    cost: float
    sweeps: int


def bound(graph: Tensors, expired: Callable[[], bool]) -> Bound:
    """The best bound of all sweeps, and the best choice that they led to."""
    return _Sweeps(graph, expired).bound()


def sweeping(graph: Tensors, budget: Budget) -> Callable[[], bool]:
    """Whether a budget is over; each time it is asked, a sweep has been done."""

    def is_over() -> bool:
        budget.spend(len(graph.nodes) * SWEPT)
        return budget.is_over

    return is_over


class _Side:
    """One end of an edge: the state of the tensor `at` each choice, and the choices `by` state.

    `at` is None where choices are the states. Of an edge that is `settled` here, nothing is left
    for sure by the choices of this end.
    """

    __slots__ = ("at", "off", "order", "settled", "starts")

    def __init__(self, at: Numbers, states: int) -> None:
        self.off = np.zeros(len(at))
        self.at = None if np.array_equal(at, np.arange(states)) else at
        self.order = np.argsort(at, kind="stable")
        self.starts = np.searchsorted(at[self.order], np.arange(states))
        self.settled = False

    def most_off(self) -> Costs:
        """By state, the most that was moved off by a choice of it."""
        if self.at is None:
            return self.off
        most: Costs = np.maximum.reduceat(self.off.take(self.order), self.starts)
        return most

    def by_choice(self, costs: Costs) -> Costs:
        """Costs by state, by choice."""
        return costs if self.at is None else costs.take(self.at)

    def state(self, choice: int) -> int:
        """The state at a choice."""
        return choice if self.at is None else int(self.at[choice])


class _DualEdge:
    """An edge, and at each of its sides the costs that were moved `off` it.

    It has a `share` of what its tensor costs.
    """

    def __init__(self, edge: Edge, most: float) -> None:
        self.ends = edge.source, edge.target
        makers, read = (np.unique(side, return_inverse=True) for side in (edge.made, edge.read))
        self.cost = np.minimum(edge.cost[np.ix_(makers[0], read[0])], most)
        self.sides = tuple(_Side(at.reshape(-1), len(distinct)) for distinct, at in (makers, read))
        self.give(1.0)

    def give(self, share: float) -> None:
        """Change the share."""
        self.share = share
        cost = share * self.cost
        # By end, rows are the states of that end, columns those of the other.
        self.shared = cost, np.ascontiguousarray(cost.T)
        for side in self.sides:
            side.settled = False

    def least(self, end: int) -> Costs:
        """What is left on the edge at least, by the choices of one end."""
        here, there = self.sides[end], self.sides[1 - end]
        left = np.minimum.reduce(self.shared[end] - there.most_off(), axis=1)
        least: Costs = here.by_choice(left) - here.off
        return least

    def take(self, end: int, costs: Costs) -> None:
        """Move costs off the edge, or onto it: what is left by choices of both ends changes."""
        self.sides[end].off += costs
        for side in self.sides:
            side.settled = False

    def beside(self, end: int, choice: int) -> Costs:
        """The cost by the choices of one end where the other is decided."""
        row = self.shared[1 - end][self.sides[1 - end].state(choice)]
        return self.sides[end].by_choice(row)

    def of(self, picks: list[int]) -> float:
        """The cost of a choice, before it is shared."""
        row, column = (s.state(picks[n]) for s, n in zip(self.sides, self.ends, strict=True))
        return float(self.cost[row, column])


class _Sweeps:
    """Nodes and edges as far as costs have been moved; `price` is that of a FLOP."""

    def __init__(self, graph: Tensors, expired: Callable[[], bool]) -> None:
        self.graph, self.expired = graph, expired
        self.limited = math.isfinite(graph.most)
        spread = [float(e.cost[np.isfinite(e.cost)].max()) for e in graph.edges]
        spread += [float(node.cost.max()) for node in graph.nodes]
        edges = [_DualEdge(e, 10 * math.fsum(spread)) for e in graph.edges]
        self.near: list[list[tuple[_DualEdge, int]]] = [[] for _ in graph.nodes]
        for edge in edges:
            for end, node in enumerate(edge.ends):
                self.near[node].append((edge, end))
        # Of each node the edges to earlier nodes, and those to later ones.
        self.ways = tuple(
            [[(e, end) for e, end in near if (e.ends[1 - end] > i) == later] for i, near in every]
            for later in (False, True)
            for every in [list(enumerate(self.near))]
        )
        self.values: dict[Value, list[_DualEdge]] = {}
        for table, edge in zip(graph.edges, edges, strict=True):
            self.values.setdefault(table.value, []).append(edge)
        for readers in self.values.values():
            for edge in readers:
                edge.give(1 / len(readers))
        self.edges = edges
        self.picks: list[int] = []
        self.left = [node.cost.copy() for node in graph.nodes]
        self.price = 0.0
        self.sweeps = 0
        self.best = Bound(0.0, (), math.inf, 0)

    def bound(self) -> Bound:
        """The best of all prices."""
        if self.limited:
            self._search()
        self._sweep(LAST)
        self._decide()
        raised = 0
        for step in range(ROUNDS if any(len(es) > 1 for es in self.values.values()) else 0):
            if self.expired() or step - raised > IN_VAIN:
                break
            before = self.best.least
            self._share(2 / (step + 4))
            self._sweep(SHORT)
            raised = step if self.best.least > before * (1 + ENOUGH) else raised
            work = self._decide()
            if self.price:
                self._set(self.price * (STEP if work > self.graph.most else 1 / STEP))
        least = max(0.0, self.best.least * (1 - ROUNDING))
        return Bound(min(least, self.best.cost), self.best.picks, self.best.cost, self.sweeps)

    def _search(self) -> None:
        """Try prices by halving, where work is dear enough or not; end at the best one."""
        least = math.fsum(float(n.flops.min()) for n in self.graph.nodes)
        low, high = 0.0, 4 * math.fsum(float(e.cost.max()) for e in self.edges) / max(least, 1.0)
        self._set(0.0)
        if self._sweep(SWEEPS) and self._decide() <= self.graph.most:
            return
        by_price = {0.0: self.best.least}
        for tried in range(PRICES):
            if tried >= HASTY and self.expired():
                break
            middle = math.sqrt(low * high) if low else high / 30
            self._set(middle)
            by_price[middle] = self._sweep(SWEEPS)
            if self._decide() > self.graph.most:
                low = middle
            else:
                high = middle
            if low and high / low < NEAR:
                break
        self._set(max(by_price, key=lambda price: by_price[price]))

    def _set(self, price: float) -> None:
        """Another price of work: every choice costs so much more or less."""
        for left, node in zip(self.left, self.graph.nodes, strict=True):
            left += (price - self.price) * node.flops
        self.price = price

    def _sweep(self, most: int) -> float:
        """Sweep until the bound hardly rises; the bound at this price."""
        before = -math.inf
        for _ in range(most):
            self._pass(range(len(self.left)), 1)
            self._pass(range(len(self.left) - 1, -1, -1), 0)
            self.sweeps += 1
            now = math.fsum(float(left.min()) for left in self.left)
            now -= self.price * self.graph.most if self.limited and self.price else 0.0
            if now > self.best.least:
                self.best = Bound(now, self.best.picks, self.best.cost, self.sweeps)
            if now <= before + ENOUGH * abs(now) or self.expired():
                return now
            before = now
        return before

    def _pass(self, order: range, behind: int) -> None:
        """One way: each node takes what its edges cost at least, and hands it on evenly.

        After it nothing is left on any edge for sure, so that nodes alone bound the sum.
        """
        for number in order:
            left, ahead = self.left[number], self.ways[behind][number]
            for edge, end in self.near[number]:
                if not edge.sides[end].settled:
                    least = edge.least(end)
                    left += least
                    edge.take(end, least)
                    edge.sides[end].settled = True
            if not ahead:
                continue
            share = left / max(len(ahead), len(self.near[number]) - len(ahead))
            for edge, end in ahead:
                edge.take(end, -share)
            left -= share * len(ahead)

    # --- a choice ----------------------------------------------------------------------------

    def _decide(self) -> float:
        """Decide node by node, improve by changing single nodes; the FLOPs of what is found."""
        picks = [-1] * len(self.left)
        for number, left in enumerate(self.left):
            costs = left.copy()
            for edge, end in self.near[number]:
                other = picks[edge.ends[1 - end]]
                if other >= 0:
                    costs += edge.beside(end, other) - edge.sides[end].off
                elif not edge.sides[end].settled:
                    costs += edge.least(end)
            picks[number] = int(costs.argmin())
        self._improve(picks)
        self.picks = picks
        work = math.fsum(float(n.flops[k]) for n, k in zip(self.graph.nodes, picks, strict=True))
        if not self.limited or work <= self.graph.most * (1 + ROUNDING):
            cost = self.cost(picks)
            if cost < self.best.cost:
                self.best = Bound(self.best.least, tuple(picks), cost, self.sweeps)
        return work

    def _share(self, step: float) -> None:
        """Move a part of all shares to those of the dearest readers of the last choice."""
        for readers in self.values.values():
            costs = [edge.of(self.picks) for edge in readers]
            most = max(costs)
            if min(costs) == most:
                continue
            several = costs.count(most)
            for edge, cost in zip(readers, costs, strict=True):
                more = step / several if cost == most else 0.0
                edge.give(edge.share * (1 - step) + more)

    def _improve(self, picks: list[int]) -> None:
        for _ in range(3):
            changed = False
            for number, node in enumerate(self.graph.nodes):
                costs = node.cost + self.price * node.flops
                for edge, end in self.near[number]:
                    costs = costs + edge.beside(end, picks[edge.ends[1 - end]])
                if costs.min() < costs[picks[number]] * (1 - ROUNDING):
                    picks[number], changed = int(costs.argmin()), True
            if not changed:
                return

    def cost(self, picks: list[int]) -> float:
        """The sum of a choice."""
        node_costs = (float(n.cost[k]) for n, k in zip(self.graph.nodes, picks, strict=True))
        sent = (max(edge.of(picks) for edge in readers) for readers in self.values.values())
        return math.fsum((*node_costs, *sent))
