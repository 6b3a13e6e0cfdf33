"""Methods on the sum of the tables: `elimination`, `ilp` and `mcmc`, as other systems search.

The variables are the dims, their choices the axes that may split them, and the cost of a layout is
the sum of what every call takes alone (`tables.py`): the same graph with costs that OptCNN, Alpa
and FlexFlow search, on the rules of the language. What is least there is then placed. The sum is an
estimate, so these methods prove nothing of the walks; they are here to be compared with `layouts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from meshdsl.diagnostics import DiagnosticError, fail
from meshdsl.placed.rows import Call
from meshdsl.search.annealing import anneal
from meshdsl.search.exact import TooWide, integer_program, priced_memory
from meshdsl.search.graph import CostGraph, Factor, Solution, Variable
from meshdsl.search.layouts import best_first
from meshdsl.search.plan import Rules
from meshdsl.search.problem import Count, Found, Problem
from meshdsl.search.space import Space
from meshdsl.search.tables import Tables

Axes = tuple[str, ...]
Solve = Callable[..., Solution]
"""A method on a graph; one that begins from choices takes them, too."""


def table_graph(
    space: Space, most_work: float, among: Sequence[tuple[Axes, ...]] | None = None
) -> CostGraph:
    """The bytes of every call by the axes of its dims, and its FLOPs as what is limited.

    `among` are the choices of each dim, where these are not all.
    """
    tables = Tables(space)
    every = [tuple(_choices(space, number)) for number in range(len(space.dims))]
    choices = every if among is None else list(among)
    names = zip(space.dims, choices, strict=True)
    variables = tuple(Variable(d.name, tuple(" ".join(a) for a in axes)) for d, axes in names)
    factors, work = list(_meetings(space, choices)), []
    for call, trips in space.calls.items():
        scope, cost, flops = _of_call(space, tables, choices, call)
        factors.append(Factor(scope, cost * trips))
        work.append(Factor(scope, flops * trips))
    return CostGraph(variables, tuple(factors), tuple(work), most_work)


def _choices(space: Space, number: int) -> Iterator[Axes]:
    """The axes that may split a dim, none first; a fixed rule leaves no choice."""
    dim = space.dims[number]
    if dim.name in space.fixed:
        yield dim.axes
        return
    for count in range(len(dim.axes) + 1):
        for axes in itertools.combinations(dim.axes, count):
            if space.divides(dim, axes):
                yield axes


def _meetings(space: Space, choices: list[tuple[Axes, ...]]) -> Iterator[Factor]:
    """Dims that meet in a tensor are split over different axes."""
    for i, j in itertools.combinations(range(len(space.dims)), 2):
        if space.dims[i].meets >> j & 1:
            shared = [[bool(set(a) & set(b)) for b in choices[j]] for a in choices[i]]
            yield Factor((i, j), np.where(shared, math.inf, 0.0))


def _of_call(
    space: Space, tables: Tables, choices: list[tuple[Axes, ...]], call: Call
) -> tuple[tuple[int, ...], np.ndarray[tuple[int, ...], np.dtype[np.float64]], np.ndarray]:
    """The dims of a call that may be split, and its bytes and FLOPs by the axes of each."""
    own = {d for t in (*call.ins, *call.outs) for d in t.names}
    scope = tuple(i for i, dim in enumerate(space.dims) if dim.name in own)
    shape = [len(choices[i]) for i in scope]
    cost, flops = np.zeros(shape), np.zeros(shape)
    for at in itertools.product(*map(range, shape)):
        axes = {space.dims[i].name: choices[i][k] for i, k in zip(scope, at, strict=True)}
        if not _may_stand(call, axes):
            continue  # forbidden by the dims that meet
        chosen = tables.chosen(call, axes)
        cost[at], flops[at] = chosen.cost, chosen.rank[-1]
    return scope, cost, flops


def _may_stand(call: Call, axes: Mapping[str, Axes]) -> bool:
    """Whether no axis splits two dims of one tensor."""
    every = ([a for d in t.names for a in axes.get(d, ())] for t in (*call.ins, *call.outs))
    return all(len(set(used)) == len(used) for used in every)


@dataclass(frozen=True, slots=True)
class Summed:
    """The layout of general rules whose tables have the least sum of bytes, placed."""

    search: Solve
    starts: bool = False

    def solve(self, problem: Problem) -> Found:
        """The plan. Raises MD0641 where none divides the work as asked, MD0663 if too wide."""
        limits = problem.limits
        space = problem.space
        try:
            graph = table_graph(space, problem.least_work * (1 + limits.replicated))
            best = self.search(graph, *self._starts(problem, space))
        except TooWide as error:
            refuse_width(error)
        if not best.found:
            message = f"{best.method} found no layout within {1 + limits.replicated:.2f} times"
            fail("MD0641", f"{message} the least work", help="a larger `--replicated`")
        rules = self.rules(space, best)
        return placed(problem, space, rules)

    def _starts(self, problem: Problem, space: Space) -> Iterator[list[tuple[int, ...]]]:
        """The general rules to begin from as choices, for a method that takes such."""
        if not self.starts or problem.start is None:
            return
        general = {rule.dim: rule.axes for rule in problem.start if not rule.selector}
        picks = []
        for number, dim in enumerate(space.dims):
            choices = list(_choices(space, number))
            axes = problem.mesh.sorted(set(general.get(dim.name, ())))
            picks.append(choices.index(axes) if axes in choices else 0)
        yield [tuple(picks)]

    def rules(self, space: Space, best: Solution) -> Rules:
        """The rules of a solution."""
        choices = (tuple(_choices(space, n)) for n in range(len(space.dims)))
        return space.rules([axes[k] for axes, k in zip(choices, best.picks, strict=True)])


def refuse_width(error: TooWide) -> NoReturn:
    """Raise MD0663."""
    message = f"the tables of an elimination would have {error.needed:,} entries or more"
    fail("MD0663", message, help="take `--method layouts`, or `--method ilp`")


def placed(problem: Problem, space: Space, rules: Rules) -> Found:
    """One layout as the result of a method: nothing is proven.

    Raises MD0641 where it divides the work less than the tables say, and than asked, or where two
    rules meet in a tensor that the tables do not know.
    """
    made = [problem.plan(rules, policy) for policy in problem.policies]
    try:
        plans = [plan for plan in made if problem.divides(plan)]
    except DiagnosticError as error:
        problem.fixed_alone()
        message = "what is least by the tables cannot be placed: " + error.diagnostics[0].message
        fail("MD0641", message, help="take `--method layouts`")
    if not plans:
        work = min(plan.flops for plan in made) / problem.least_work
        message = f"what is least by the tables leaves a device {work:.2f} times the least work"
        fail("MD0641", message, help="take `--method layouts`, or a larger `--replicated`")
    count = Count("L0", space.count, 1, 0, space.symmetry)
    return Found(problem, best_first(problem, plans), tuple(plans), count, 0)


ELIMINATION, ILP, MCMC = Summed(priced_memory), Summed(integer_program), Summed(anneal, starts=True)
