"""The layouts that a search of the page finds, round by round (docs/playground.md).

Nothing interrupts Python in a browser, and what is found so far is of use. So each question has one
round of the search as its answer, about twice as long as the round before; the same question again
goes on from there. The method is `layouts`, which needs neither a solver nor numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.play.answer import Units, diagnostic_of, edit_of
from meshdsl.play.protocol import PageFix, PageLayout, SearchAnswer
from meshdsl.report.document import Piece
from meshdsl.report.search_result import (
    UNDER_OPTIMAL,
    best_of,
    block_of,
    columns,
    columns_of,
    next_block_of,
    scope,
)
from meshdsl.search.candidate import NAME, Candidate
from meshdsl.search.enumeration import Layouts
from meshdsl.search.layout_text import free_name, insertion
from meshdsl.search.problem import SearchResult
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import in_rounds

BUDGET = 3.0
"""Seconds' worth of operators that all rounds may place: 1,000, 2,000, 4,000 and 8,000 of them."""


class LayoutSearch:
    """A search that goes on while the same is asked."""

    def __init__(self) -> None:
        self._asked: tuple[str, Options] | None = None
        self._answers: Iterator[SearchAnswer] = iter(())

    def answer(self, source: Source, options: Options) -> SearchAnswer:
        """What is found after one more round; the search begins anew where something changed."""
        asked = source.text, options
        latest = next(self._answers, None) if asked == self._asked else None
        if latest is None:
            self._asked, self._answers = asked, _rounds(source, options)
            latest = next(self._answers)
        return latest


def _rounds(source: Source, options: Options) -> Iterator[SearchAnswer]:
    """An answer for each round; one with what is wrong, where nothing can be searched."""
    diagnostics = Diagnostics()
    compilation = Compilation(source, options, diagnostics)
    results = iter(_results(compilation, options))
    while result := diagnostics.of(partial(next, results, None)):
        if not result.plans:
            break
        yield _answer(compilation, result)
    else:
        if not diagnostics.errors:
            return
    units = Units(source.text)
    yield {
        "diagnostics": [diagnostic_of(d, source, units) for d in diagnostics],
        "sentence": "" if diagnostics.errors else "No layout fits.",
        "note": "",
        "head": [],
        "layouts": [],
        "more": False,
    }


def _results(compilation: Compilation, options: Options) -> Iterator[SearchResult]:
    request = SearchRequest(budget=BUDGET, cluster=options.cluster, objective=options.objective)
    yield from in_rounds(problems(request, compilation), Layouts())


def _answer(compilation: Compilation, found: SearchResult) -> SearchAnswer:
    return {
        "diagnostics": [],
        "sentence": f"{scope(found)}. {best_of(found)}",
        "note": UNDER_OPTIMAL.replace("`explain` places", "“Compare” places"),
        "head": ["layout", *columns(found.problem.timing is not None)],
        "layouts": [_layout(compilation, found, plan) for plan in found.plans],
        "more": found.problem.budget.is_over,
    }


def _layout(compilation: Compilation, found: SearchResult, plan: Candidate) -> PageLayout:
    """A plan: what `--layout` takes, its figures, and the edit that puts it into the program."""
    texts = (c.text if isinstance(c, Piece) else c for c in columns_of(plan))
    name = free_name(NAME, compilation.tree)
    return {
        "layout": str(plan) if plan.rules or plan.cuts else "",
        "figures": [str(plan), *texts],
        "name": name,
        "fix": _fix(compilation, found, plan, name),
    }


def _fix(compilation: Compilation, found: SearchResult, plan: Candidate, name: str) -> PageFix:
    source, written = compilation.source, block_of if plan is found.plans[0] else next_block_of
    text = written(found, plan, name).rstrip("\n")
    edit = insertion(source, compilation.tree, text)
    return {"title": "Put into the program", "edits": [edit_of(edit, Units(source.text))]}
