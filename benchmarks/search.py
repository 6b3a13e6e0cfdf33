"""How long searches take, and how far from the optimum what they find is.

`python -m benchmarks.search` prints two tables. Of random graphs with costs: operators in a chain
with residual edges, as in a network. Of the examples on a mesh of four devices: the methods of
`search`, for the general rules that send the fewest bytes with the work divided; `more work` is a
layout that does not divide it as far. Seconds are medians of processor time; the gap is to the
least that any method found.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from meshdsl.costgraph.annealing import anneal
from meshdsl.costgraph.exact import TooWide, branch_and_bound, eliminate, integer_program
from meshdsl.costgraph.graph import CostFactor, CostGraph, Solution, Variable
from meshdsl.diagnostics import DiagnosticError
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem
from meshdsl.search.request import SearchRequest as Request
from meshdsl.syntax.parse import read_source
from tests.project import ROOT

MESH = Mesh("square", (("data", 2), ("model", 2)))
EXAMPLES = ("mlp", "dlrm", "nmt", "lm")
SIZES = (5, 10, 50, 200, 1_000)
CHOICES = 8
BRANCHES = 10
"""The operators up to which every choice, or every branch, can be visited."""

GRAPH_METHODS: dict[str, tuple[int, Callable[[CostGraph], Solution]]] = {
    "elimination": (max(SIZES), eliminate),
    "ilp": (200, integer_program),
    "branch": (BRANCHES, branch_and_bound),
    "exhaustive": (5, partial(branch_and_bound, bounded=False)),
    "mcmc": (max(SIZES), anneal),
}
"""The methods on graphs, with the size up to which each is tried."""

T = TypeVar("T")


def timed(run: Callable[[], T], rounds: int) -> tuple[float, T]:
    """The median of the processor time of rounds on one core, and what came out of the last."""
    taken = []
    for _ in range(rounds):
        gc.collect()
        started = time.process_time()
        found = run()
        taken.append(time.process_time() - started)
    return statistics.median(taken), found


def graph(operators: int, seed: int) -> CostGraph:
    """Operators in a chain, every fourth read again four later; costs at random."""
    draw = np.random.default_rng([seed, operators])
    pairs = [(i, i + 1) for i in range(operators - 1)]
    pairs += [(i, i + 4) for i in range(0, operators - 4, 4)]
    own = [CostFactor((i,), draw.random(CHOICES)) for i in range(operators)]
    between = [CostFactor(pair, draw.random((CHOICES, CHOICES))) for pair in pairs]
    named = tuple(Variable(f"v{i}", tuple(map(str, range(CHOICES)))) for i in range(operators))
    return CostGraph(named, (*own, *between))


def of_graphs(rounds: int) -> None:
    """Print the table of random graphs."""
    print(f"| operators, {CHOICES} choices each | {' | '.join(GRAPH_METHODS)} |")
    print("|---" * (len(GRAPH_METHODS) + 1) + "|")
    for size in SIZES:
        made = graph(size, seed=0)
        found: dict[str, tuple[float, Solution]] = {}
        for name, (most, method) in GRAPH_METHODS.items():
            if size <= most:
                found[name] = timed(partial(method, made), rounds)
        least = min(solution.cost for _, solution in found.values())
        cells = [_cell(found.get(name), least) for name in GRAPH_METHODS]
        print(f"| {size:,} | {' | '.join(cells)} |", flush=True)


def _cell(found: tuple[float, Solution] | None, least: float) -> str:
    if found is None:
        return ""
    seconds, solution = found
    return f"{_shown(seconds)}, +{100 * (solution.cost / least - 1):.2g} %"


def of_examples(rounds: int) -> None:
    """Print the table of examples."""
    print(f"| on {MESH} | {' | '.join(METHODS)} |\n{'|---' * (len(METHODS) + 1)}|")
    for name in EXAMPLES:
        source = read_source(ROOT / "examples" / f"{name}.mdsl")
        program = Compilation(source, Options(program="lm" if name == "lm" else None)).named
        values: dict[str, tuple[float, float | None]] = {}
        # What all methods look up, such as routes, is found before.
        _least(Problem(program, MESH, request=Request(storage=False)), "layouts")
        for method in METHODS:
            run = partial(_least, Problem(program, MESH, request=Request(storage=False)), method)
            values[method] = timed(run, rounds)
        least = min(v for _, v in values.values() if v is not None)
        cells = [
            f"{_shown(s)}, " + ("more work" if v is None else f"+{100 * (v / least - 1):.2g} %")
            for s, v in values.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _least(problem: Problem, method: str) -> float | None:
    """The bytes that a method finds; None where it finds nothing, or nothing within the work."""
    try:
        found = METHODS[method].solve(problem)
    except (DiagnosticError, TooWide):
        return None
    most = problem.space.least() * (1 + problem.request.replicated)
    within = found.plans and found.plans[0].flops <= most
    return problem.value(found.plans[0]) if within else None


def _shown(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # no second process
    of_graphs(rounds)
    print()
    of_examples(rounds)


if __name__ == "__main__":
    main()
