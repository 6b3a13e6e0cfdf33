"""How far a layout is from every plan at most: what no per-tensor plan is better than."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.search.budget import Budget, operators
from meshdsl.search.dual import bound, sweeping
from meshdsl.search.problem import Certificate, Problem, SearchResult
from meshdsl.search.speculative import Second
from meshdsl.search.tensor_graph import TooMany, tensors

Ahead = Second[None, Certificate | None]


def ahead(problem: Problem) -> Ahead:
    """A process that makes the certificate of a problem, if one is asked for, beside a search."""
    certifier: Ahead = Second(lambda _: certificate(problem))
    if problem.request.certificate and problem.objective != "memory":
        certifier.ask("certificate", None)
    return certifier


def certified(found: SearchResult, begun: Ahead) -> SearchResult:
    """A result with its certificate, where one is asked for and there is something to compare."""
    problem = found.problem
    if not found.plans or not problem.request.certificate or problem.objective == "memory":
        return found
    computed = begun.take("certificate") or certificate(problem)
    if computed is not None:  # up to rounding it may be above what was reached
        computed = replace(computed, least=min(computed.least, problem.value(found.plans[0])))
    return replace(found, certificate=computed)


def certificate(problem: Problem) -> Certificate | None:
    """The bound of the objective over all per-tensor plans; None where there are too many.

    Where work has to be divided, plans have to do so, too. Memory is not limited: the bound is that
    of more plans than fit. A budget it has for itself: it is made beside a search.
    """
    try:
        graph = tensors(problem, problem.most_work)
        least = bound(graph, sweeping(graph, Budget(operators(problem.request.budget))))
    except TooMany:
        return None
    return Certificate(least.least, least.sweeps)
