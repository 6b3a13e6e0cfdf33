"""Methods that place layouts and learn from what these take: `bayesian` and `learned`.

A choice is the axes of each dim, as in `table_methods.py`; its cost is what the layout takes once
placed, under the better walk. A dim whose axes an earlier dim of the same tensor has taken is left
whole. The first to be tried are the conventional layouts of `practice.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from meshdsl.costgraph.black_box import OUTSIDE, BlackBox, Picks, Sampler, outside
from meshdsl.diagnostics import DiagnosticError
from meshdsl.option_edits import give, refuse
from meshdsl.records import dataclass
from meshdsl.search.candidate import Candidate, Rules
from meshdsl.search.enumeration import best_first
from meshdsl.search.practice import practised
from meshdsl.search.problem import Count, Problem, SearchResult
from meshdsl.search.space import LayoutSpace
from meshdsl.search.tables import Axes, choices_of

TRIALS = 64
"""The layouts that are placed at most, as many as `layouts` does."""

STARTS = 4
"""The conventional layouts that are placed first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The best of the layouts that a sampler tries; nothing is proven."""

    sampler: Sampler

    def solve(self, problem: Problem) -> SearchResult:
        """The plans. Raises MD0641 where none divides the work as asked."""
        space = problem.space
        choices = [tuple(choices_of(space, number)) for number in range(len(space.dims))]
        placed: list[Candidate] = []
        costs: dict[Rules, float] = {}

        def cost(picks: Picks) -> float:
            rules = space.rules(_axes(space, choices, picks))
            if rules not in costs:
                candidates, costs[rules] = _placed(problem, rules)
                placed.extend(candidates)
            return costs[rules]

        box = BlackBox(tuple(map(len, choices)), cost, problem.expired)
        self.sampler(box, TRIALS, [*_starts(space, choices)])
        plans = [plan for plan in placed if problem.divides(plan)]
        if not plans and box.best()[1] < math.inf:
            asked = 1 + problem.request.replicated
            message = (
                f"no layout that was tried leaves a device at most {asked:.2f} times the least work"
            )
            fix = give("--method", "layouts", safe=False)
            refuse("MD0641", message, fix, "take a larger `--replicated`")
        if not plans:
            problem.fixed_alone()
            message = "no layout that was tried can be placed"
            refuse("MD0641", message, give("--method", "layouts", safe=False))
        tried = len({plan.rules for plan in placed})
        count = Count("L0", space.count, tried, 0, space.symmetry, work=len(box.tried), cut=True)
        return SearchResult(problem, best_first(problem, plans), tuple(plans), count, 0)


def _axes(space: LayoutSpace, choices: Sequence[Sequence[Axes]], picks: Picks) -> list[Axes]:
    """The axes of each dim; none where an earlier dim of a common tensor has one of them."""
    chosen: list[Axes] = []
    for number, (options, pick) in enumerate(zip(choices, picks, strict=True)):
        meets = space.dims[number].meets
        used = {a for i, axes in enumerate(chosen) if meets >> i & 1 for a in axes}
        free = used.isdisjoint(options[pick]) or len(options) == 1
        chosen.append(options[pick] if free else ())
    return chosen if space.allows(chosen) else [space.fixed.get(d.name, ()) for d in space.dims]


def _placed(problem: Problem, rules: Rules) -> tuple[list[Candidate], float]:
    """The plans of a layout, and what the best takes that divides the work and fits.

    A layout of too many rules, or of which tables know that it divides too little, is not placed.
    """
    most, rules_at_most = problem.most_work, problem.request.max_rules
    if rules_at_most is not None and len(rules) > rules_at_most:
        return [], outside(len(rules))
    if not problem.may_divide(rules, problem.execution):
        return [], outside(problem.space.kept_work(rules) / most - 1)
    try:
        problem.spend()
        plans = problem.plans(rules)
        divided = [plan for plan in plans if problem.divides(plan)]
        if not divided:
            return plans, outside(min(plan.flops for plan in plans) / most - 1)
        fitting = [plan for plan in divided if problem.fits(plan)]
        if not fitting:
            limit = problem.request.memory or 1
            return plans, outside(min(plan.peak for plan in divided) / limit - 1)
        return plans, min(min(map(problem.value, fitting)), OUTSIDE)
    except DiagnosticError:
        return [], math.inf


def _starts(space: LayoutSpace, choices: Sequence[Sequence[Axes]]) -> Iterator[Picks]:
    """The conventional layouts as choices."""
    for rules in itertools.islice(practised(space), STARTS):
        axes = {rule.dim: rule.axes for rule in rules if not rule.selector}
        wanted = [axes.get(dim.name, ()) for dim in space.dims]
        yield tuple(
            options.index(axes) if axes in options else 0
            for options, axes in zip(choices, wanted, strict=True)
        )
