"""The methods of search by name, and the search of a request."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.costgraph.bayesian import bayesian
from meshdsl.costgraph.learned import learned
from meshdsl.pipeline import Compilation
from meshdsl.search.enumeration import Layouts
from meshdsl.search.infeasible import refuse_limit
from meshdsl.search.problem import Method, SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.sampling_methods import Sampled
from meshdsl.search.shapes import solve
from meshdsl.search.table_methods import ELIMINATION, GREEDY, ILP, MCMC
from meshdsl.search.tofu import Tofu

METHODS: Mapping[str, Method] = {
    "layouts": Layouts(),
    "exhaustive": Layouts(bounds=False),
    "elimination": ELIMINATION,
    "ilp": ILP,
    "greedy": GREEDY,
    "mcmc": MCMC,
    "tofu": Tofu(),
    "bayesian": Sampled(bayesian),
    "learned": Sampled(learned),
}
"""What `--method` takes."""

DEFAULT = "layouts"


def best_plans(request: SearchRequest, made: Compilation) -> SearchResult:
    """The plans of a request. Raises a diagnostic where nothing fits (MD0642)."""
    name = request.method or DEFAULT
    tasks = problems(request, made)
    result = solve(tasks, METHODS[name])
    if not result.plans:
        refuse_limit(result, name)
    return result
