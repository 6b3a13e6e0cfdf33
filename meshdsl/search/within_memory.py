"""A search with a limit of memory, so that what it says does not contradict what others say.

First the search is done as if there were no limit: where the best fits, it is the answer. Then
layouts are searched within the limit; where none is found, those of the least memory are. Of all
that were placed on the way, what is best and fits is the answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from meshdsl.diagnostics import Source, Span
from meshdsl.placed.gather_again import AGAIN, NAME
from meshdsl.placed.settings import Setting
from meshdsl.search.candidate import PLAIN, Candidate, first_of_each
from meshdsl.search.declared import with_declared
from meshdsl.search.local_search import onwards
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.syntax.symbols import ACTIVATIONS

Search = Callable[[Sequence[Problem]], SearchResult]

FURTHER = "it was placed while other limits were searched"
"""Where a plan is from that the search within the limit has not come to."""

GATHERED = 6
"""The plans that are tried with activations gathered again."""

_TEXT = f"activations: {NAME} = {AGAIN}"
GATHER_AGAIN = Setting(ACTIVATIONS, NAME, AGAIN, Span(Source("--layout", _TEXT), 0, len(_TEXT)))

GATHERS = "its activations are gathered again, so that less is held"
"""What is said of a plan beyond the space for its setting."""

UNDIVIDED = "nothing was found that fits and divides the work as far as asked"


def within_memory(problems: Sequence[Problem], search: Search) -> SearchResult:
    """The best over problems within their limit of memory, by a search that may do without.

    Where nothing is found that fits, the result has no plan, and `least` what holds the least.
    """
    limit = problems[0].request.memory
    free = search([_limited(p, None) for p in problems])
    if limit is None:
        return gathered_again(free, (free,)) if free.problem.objective == "memory" else free
    if free.plans and free.plans[0].peak <= limit:
        return _cut(free, limit)
    result = search(problems)
    result = gathered_again(_improved(result, _plans_of((free,))), (result, free))
    if result.plans:
        return result
    held = [replace(_limited(p, None), objective="memory") for p in problems]
    held = [replace(p, request=replace(p.request, certificate=False)) for p in held]
    least = search(held)
    least = gathered_again(least, (least, free))
    result = _improved(replace(result, least=least), _plans_of((least,)))
    return result if result.plans else _undivided(result)


def _undivided(found: SearchResult) -> SearchResult:
    """The result with layouts of the file that fit, though these divide the work less."""
    problem = found.problem
    loose = replace(problem, request=replace(problem.request, replicated=math.inf))
    fitting = with_declared(replace(found, problem=loose))
    if not fitting.plans:
        return found
    count = replace(fitting.count, further=f"{UNDIVIDED}; {fitting.count.further}")
    return replace(fitting, count=count)


def gathered_again(found: SearchResult, searched: Sequence[SearchResult]) -> SearchResult:
    """The result, or a plan placed on the way whose activations are gathered again, if better.

    More is sent and less is held than without, so only plans are tried that are no worse than the
    best, those first that send or take the least.
    """
    problem, best = found.problem, next(iter(found.plans), None)
    limit = problem.request.memory
    tried = [p for p in _plans_of(searched) if p.mesh == problem.mesh and _may_gather(problem, p)]
    if problem.objective == "memory":
        tried.sort(key=lambda plan: plan.peak)
    else:
        tried = [p for p in tried if best is None or problem.at_least(p) < problem.value(best)]
        tried.sort(key=problem.at_least)
    # What fits gathers once.
    large = (p for p in first_of_each(tried) if limit is None or p.peak > limit)
    again = [gathering_again(plan) for plan in itertools.islice(large, GATHERED)]
    gathered = [plan for plan in again if plan.placed.gathered_again]
    return _improved(found, gathered, GATHERS)


def _may_gather(problem: Problem, plan: Candidate) -> bool:
    """Whether a plan may have another setting, and what it stores does fit."""
    is_asked = problem.execution in (PLAIN, plan.execution)
    says = any(setting.name == NAME for setting in plan.execution.settings)
    is_trained = plan.program.goal is not None and plan.schedule is None
    return is_asked and is_trained and not says and not problem.is_too_large(plan)


def gathering_again(plan: Candidate) -> Candidate:
    """The same plan with activations gathered again in the backward pass."""
    execution = replace(plan.execution, settings=(*plan.execution.settings, GATHER_AGAIN))
    return replace(plan, execution=execution)


def _limited(problem: Problem, memory: int | None) -> Problem:
    return replace(problem, request=replace(problem.request, memory=memory))


def _cut(free: SearchResult, limit: int) -> SearchResult:
    """A result without limit whose best keeps to one, as the result within it."""
    plans = tuple(plan for plan in free.plans if plan.peak <= limit)
    others = tuple(_cut(other, limit) for other in free.others)
    return replace(free, problem=_limited(free.problem, limit), plans=plans, others=others)


def _plans_of(results: Iterable[SearchResult]) -> Iterator[Candidate]:
    for result in results:
        yield from result.every
        yield from result.plans
        yield from _plans_of(result.others)


def _improved(
    found: SearchResult, others: Iterable[Candidate], further: str = FURTHER
) -> SearchResult:
    """The result, or what steps lead to from a plan placed on the way that is better."""
    problem, best = found.problem, next(iter(found.plans), None)
    better = None
    for plan in others:
        if plan.mesh == problem.mesh and problem.divides(plan) and problem.is_better(plan, best):
            best = better = plan
    if better is None:
        return found
    return replace(onwards(found, better), bound=0.0, count=replace(found.count, further=further))
