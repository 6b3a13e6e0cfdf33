"""Every mesh shape of so many devices: the sizes of a mesh's axes are searched, too."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.placements import Mesh
from meshdsl.search.budget import operators, rounds
from meshdsl.search.candidate import Rules
from meshdsl.search.certificate import ahead, certified
from meshdsl.search.declared import with_declared
from meshdsl.search.local_search import by_steps, less
from meshdsl.search.pipeline_search import searched
from meshdsl.search.practice import practised
from meshdsl.search.problem import Method, PlanOrder, Problem, SearchResult, least_value
from meshdsl.search.warm_start import begun as started
from meshdsl.search.within_memory import within_memory

PRACTISED, PROMISING, DIVIDED = 36, 3, 2
"""The layouts of practitioners that are looked at to know which mesh is promising.

Of these the ones whose bytes are estimated, and how much longer than the least their operators may
take: what takes longer is seldom the best.
"""


def shapes(mesh: Mesh, devices: int) -> Iterator[Mesh]:
    """The meshes of so many devices with the axes of a mesh; the last axis grows fastest."""
    for sizes in _factorisations(devices, len(mesh.axes)):
        yield replace(mesh, axes=tuple(zip(mesh.names, sizes, strict=True)))


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product of `count` factors, in order."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for others in _factorisations(number // first, count - 1):
            yield (first, *others)


def timed(
    meshes: Iterable[Mesh], timing: Callable[[Mesh], Timing | None]
) -> list[tuple[Mesh, Timing | None]]:
    """Meshes with what a cluster says of each, without those that it cuts unevenly.

    Raises the diagnostic of the first where none is left.
    """
    timings, refused = [], list[DiagnosticError]()
    for mesh in meshes:
        try:
            timings.append((mesh, timing(mesh)))
        except DiagnosticError as error:
            refused.append(error)
    if not timings and refused:
        raise refused[0]
    return timings


def solve(problems: Sequence[Problem], method: Method) -> SearchResult:
    """The best over problems that differ in their meshes; `others` are those of the other meshes.

    Work has to be divided as far as the best of the meshes can, so that few bytes are not had by
    doing everything everywhere. Without plans where none is found that fits. Raises the first
    diagnostic where no mesh has a layout.
    """
    with _uncollected():
        # The certificate of one mesh is made beside the search.
        begun = ahead(problems[0]) if len(problems) == 1 else None
        *_, result = in_rounds(problems, method)
        if begun is None:
            begun = ahead(result.problem)
        result = certified(result, begun)
        begun.close()
        return result


def in_rounds(problems: Sequence[Problem], method: Method) -> Iterator[SearchResult]:
    """The best so far of searches with a budget each, until one has done all that it would.

    Those of a smaller budget are the first of a larger one's: with more it is never worse.
    """
    best: SearchResult | None = None
    for budget in rounds(operators(problems[0].request.budget)):
        tasks = [replace(problem, budget=budget) for problem in problems]
        result = within_memory(tasks, lambda tasks: _searched(tasks, method))
        best = result if best is None else _better(best, result)
        yield best
        if not budget.is_over:
            return


def _better(before: SearchResult, found: SearchResult) -> SearchResult:
    """The better of two results: of equals the later one, which has looked at more."""
    if before.plans and (not found.plans or _best(before) < _best(found)):
        return before
    return found


def _searched(problems: Sequence[Problem], method: Method) -> SearchResult:
    """The best over problems with a mesh each, within one budget."""
    if len(problems) == 1:
        return _finished(searched(problems[0], method))
    timed = problems[0].objective == "time"  # then work is not limited
    least = None if timed else min(problem.least_work for problem in problems)
    results, refused = [], list[DiagnosticError]()
    below = math.inf
    for problem in _in_order(problems):
        try:
            problem = replace(problem, least=least, below=below)
            results.append(searched(problem, method))
        except DiagnosticError as error:
            refused.append(error)
            continue
        finally:
            problem.second.close()
        below = min([below, *map(problem.value, results[-1].plans[:1])])
    if not results:
        raise refused[0]
    with_plans = sorted((r for r in results if r.plans), key=_best)
    bounded = sorted((r for r in results if not r.plans), key=lambda result: result.bound)
    first, *others = (*with_plans, *bounded)
    return replace(_finished(first), others=tuple(others))


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Problems as they are searched: those that may have the least first, after a promising one.

    By time that is the one on whose mesh practitioners would be fastest: what is found there ends
    the search of others early.
    """
    ordered = sorted(problems, key=least_value)
    if ordered[0].objective != "time":
        return ordered
    first, least, most = ordered[0], math.inf, DIVIDED * least_value(ordered[0])
    for problem in (p for p in ordered if least_value(p) <= most):
        for rules in _promising(problem, most):
            if (about := problem.about(rules)) < least:
                first, least = problem, about
    return [first, *(problem for problem in ordered if problem is not first)]


def _promising(problem: Problem, most: float) -> list[Rules]:
    """The layouts of practitioners that divide the operators furthest, into `most` seconds."""
    every = itertools.islice(practised(problem.space), PRACTISED)
    divided = (rules for rules in every if problem.computing(rules) <= most)
    return sorted(divided, key=problem.computing)[:PROMISING]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looks for cycles of garbage: plans make few, and are many enough to be looked at.

    What is there at the end counts as old, so that the next look for what is new leaves it out.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _finished(result: SearchResult) -> SearchResult:
    """With rules for functions and parameters where these are asked for, less what does no good.

    And what the layouts of the file, and one to begin from, lead to.
    """
    if result.plans:
        result = by_steps(result) if result.problem.request.by_steps else less(result)
    result = with_declared(result)
    return result if result.problem.start is None else started(result)


def _best(found: SearchResult) -> PlanOrder:
    """Where the best plan of a result is among those of others."""
    return found.problem.key(found.plans[0])
