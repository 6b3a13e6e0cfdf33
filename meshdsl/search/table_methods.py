"""Methods on the sum of the tables: `elimination`, `ilp`, `greedy` and `mcmc`, as others search.

The variables are the dims, their choices the axes that may split them, and the cost of a layout is
the sum of what every call takes alone (`tables.py`): the same graph with costs that OptCNN, Alpa
and FlexFlow search, on the rules of the language. What is least there is then placed. The sum is an
estimate, so these methods prove nothing of the walks; they are here to be compared with `layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NoReturn

from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.exact import TooWide, integer_program, priced_memory
from meshdsl.costgraph.graph import Solution
from meshdsl.costgraph.greedy import greedy
from meshdsl.diagnostics import DiagnosticError, fail
from meshdsl.option_edits import give, refuse
from meshdsl.records import dataclass
from meshdsl.search.candidate import Rules
from meshdsl.search.enumeration import best_first
from meshdsl.search.problem import Count, Problem, SearchResult
from meshdsl.search.space import LayoutSpace
from meshdsl.search.tables import choices_of, picked, table_graph

Solve = Callable[..., Solution]
"""A method on a graph; one that begins from choices takes them, too."""


@dataclass(frozen=True, slots=True)
class Summed:
    """The layout of general rules whose tables have the least sum of bytes, placed."""

    search: Solve
    starts: bool = False

    def solve(self, problem: Problem) -> SearchResult:
        """The plan. Raises MD0641 where none divides the work as asked, MD0663 if too wide."""
        request = problem.request
        space = problem.space
        timed = problem.objective == "time"  # what is done on every device takes its time
        most = math.inf if timed else problem.least_work * (1 + request.replicated)
        try:
            graph = table_graph(space, most)
            best = self.search(graph, *self._starts(problem, space))
        except TooWide as error:
            refuse_width(error)
        if not best.found:
            message = f"{best.method} found no layout within {1 + request.replicated:.2f} times"
            fail("MD0641", f"{message} the least work", help="a larger `--replicated`")
        return placed(problem, space, space.rules(picked(space, best)), best.work)

    def _starts(self, problem: Problem, space: LayoutSpace) -> Iterator[list[tuple[int, ...]]]:
        """The general rules to begin from as choices, for a method that takes such."""
        if not self.starts or problem.start is None:
            return
        general = {rule.dim: rule.axes for rule in problem.start.rules if not rule.selector}
        picks = []
        for number, dim in enumerate(space.dims):
            choices = list(choices_of(space, number))
            axes = problem.mesh.sorted(set(general.get(dim.name, ())))
            picks.append(choices.index(axes) if axes in choices else 0)
        yield [tuple(picks)]


def refuse_width(error: TooWide) -> NoReturn:
    """Raise MD0663."""
    refuse("MD0663", str(error), give("--method", "layouts", safe=False))


def placed(problem: Problem, space: LayoutSpace, rules: Rules, work: int) -> SearchResult:
    """One layout as the result of a method that took `work` steps: nothing is proven.

    Raises MD0641 where it divides the work less than the tables say, and than asked, or where two
    rules meet in a tensor that the tables do not know.
    """
    candidates = [problem.plan(rules, policy) for policy in problem.policies]
    try:
        plans = [plan for plan in candidates if problem.divides(plan)]
    except DiagnosticError as error:
        problem.fixed_alone()
        message = "what is least by the tables cannot be placed: " + error.diagnostics[0].message
        refuse("MD0641", message, give("--method", "layouts", safe=False))
    if not plans:
        times = min(plan.flops for plan in candidates) / problem.least_work
        message = f"what is least by the tables leaves a device {times:.2f} times the least work"
        refuse(
            "MD0641",
            message,
            give("--method", "layouts", safe=False),
            "take a larger `--replicated`",
        )
    count = Count("L0", space.count, 1, 0, space.symmetry, work=work)
    return SearchResult(problem, best_first(problem, plans), tuple(plans), count, 0)


ELIMINATION, ILP, GREEDY = Summed(priced_memory), Summed(integer_program), Summed(greedy)
MCMC = Summed(anneal, starts=True)
