"""A graph with costs: what every exact method of the search works on.

Variables have finitely many choices, and factors have a cost for each combination of the choices
of the variables they see. Operators with placements and the reshards between them are such a graph
(OptCNN, Alpa); so are the dims of a program with the axes they may go to, where a factor is the
cost of one operator. A graph can be read from JSON, so that published ones can be solved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

Costs: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True, slots=True)
class Variable:
    """Something to be decided: one of `choices`."""

    name: str
    choices: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class CostFactor:
    """A cost by the choices of the variables at `scope` (ascending): infinite if forbidden."""

    scope: tuple[int, ...]
    cost: Costs

    def of(self, picks: Sequence[int]) -> float:
        """The cost under one choice per variable of the graph."""
        return float(self.cost.item(self._own(picks)))

    @cached_property
    def _own(self) -> Callable[[Sequence[int]], Any]:
        """The choices of its own variables among those of all, as an index."""
        return itemgetter(*self.scope) if self.scope else lambda picks: ()


@dataclass(frozen=True, eq=False)
class CostGraph:
    """Variables and factors; the cost of a choice is the sum of the factors.

    `memory` are factors too, in bytes, whose sum may not exceed `limit`.
    """

    variables: tuple[Variable, ...]
    factors: tuple[CostFactor, ...]
    memory: tuple[CostFactor, ...] = ()
    limit: float = math.inf
    source: str = ""

    def cost(self, picks: Sequence[int]) -> float:
        """The cost of one choice per variable."""
        return math.fsum(factor.of(picks) for factor in self.factors)

    def bytes(self, picks: Sequence[int]) -> float:
        """The memory of one choice per variable."""
        return math.fsum(factor.of(picks) for factor in self.memory)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of each variable."""
        return tuple(len(v.choices) for v in self.variables)

    @cached_property
    def seen_by(self) -> tuple[tuple[CostFactor, ...], ...]:
        """The factors that see each variable."""
        return tuple(
            tuple(f for f in self.factors if i in f.scope) for i in range(len(self.variables))
        )

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """The other variables that some factor sees together with each variable."""
        return tuple(
            frozenset(j for f in seen for j in f.scope) - {i} for i, seen in enumerate(self.seen_by)
        )

    def names(self, picks: Sequence[int]) -> dict[str, str]:
        """The choices by the variables' names."""
        return {v.name: v.choices[k] for v, k in zip(self.variables, picks, strict=True)}


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per variable, its cost, and what is known of it.

    No choice costs less than `bound`; `proven`: the bound was reached. `work` counts the steps of
    the method (nodes, table entries, proposals), which is how methods are compared, not by clocks.
    `picks` is empty and the cost infinite where nothing is within the limit.
    """

    method: str
    picks: tuple[int, ...]
    cost: float
    bound: float
    proven: bool
    work: int
    note: str = ""

    @property
    def found(self) -> bool:
        """Whether there is a choice: of no variables, the empty one."""
        return math.isfinite(self.cost)

    @property
    def gap(self) -> float:
        """How far above the bound the cost may be, as a fraction of the cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / self.cost


def added(factors: Sequence[CostFactor], scope: tuple[int, ...], sizes: Sequence[int]) -> Costs:
    """The sum of factors as one table over `scope`, which has the variables of all of them."""
    total = np.zeros([sizes[i] for i in scope])
    for factor in factors:
        shape = [sizes[i] if i in factor.scope else 1 for i in scope]
        total = total + factor.cost.reshape(shape)
    return total


def merged(factors: Sequence[CostFactor]) -> tuple[CostFactor, ...]:
    """One factor for each scope."""
    by_scope: dict[tuple[int, ...], Costs] = {}
    for factor in factors:
        before = by_scope.get(factor.scope)
        by_scope[factor.scope] = factor.cost if before is None else before + factor.cost
    return tuple(CostFactor(scope, cost) for scope, cost in by_scope.items())


def entries(scope: Sequence[int], sizes: Sequence[int]) -> int:
    """The entries of a table over `scope`."""
    return math.prod(sizes[i] for i in scope)


def least_memory(graph: CostGraph) -> CostGraph:
    """The same choices with memory as their cost; what is forbidden stays so."""
    forbidding = (
        CostFactor(f.scope, np.where(np.isinf(f.cost), f.cost, 0.0)) for f in graph.factors
    )
    return replace(graph, factors=(*forbidding, *graph.memory), limit=math.inf)


def cheapest_of_each(graph: CostGraph) -> tuple[int, ...]:
    """The choice of each variable that is least by the factors that see it alone."""
    picks = []
    for i, size in enumerate(graph.sizes):
        costs = added([f for f in graph.seen_by[i] if f.scope == (i,)], (i,), graph.sizes)
        picks.append(int(costs.argmin()) if size else 0)
    return tuple(picks)


def finite_combinations(factor: CostFactor) -> list[tuple[int, ...]]:
    """The combinations of choices that a factor does not forbid."""
    finite: list[list[int]] = np.argwhere(np.isfinite(factor.cost)).tolist()
    return [tuple(at) for at in finite]
