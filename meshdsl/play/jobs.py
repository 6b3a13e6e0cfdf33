"""The jobs that take long: a question of the page becomes one, and a process or a worker does it.

A job is plain data, since it goes to another process (`compile_queue`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.play.answer import answer, views
from meshdsl.play.protocol import (
    CompareQuestion,
    CompileJob,
    CompileQuestion,
    Failed,
    JobAnswer,
    PageOptions,
)
from meshdsl.play.questions import COLUMN, MOST_COLUMNS, QUESTION, HTTPRefused, check_form

if TYPE_CHECKING:
    from meshdsl.play.layout_search import LayoutSearch

PATHS: Mapping[str, Literal["compile", "views", "search", "compare"]] = {
    "/compile": "compile",
    "/views": "views",
    "/search": "search",
    "/compare": "compare",
}
"""The questions that become jobs, and what each asks for."""


def job_of(
    path: str, question: CompileQuestion | CompareQuestion, name: str, base: Options
) -> CompileJob:
    """The job of a question about the file `name`; what it does not choose is as in `base`.

    Raises HTTPRefused.
    """
    kind = PATHS[path]
    form = {**QUESTION, "columns": list} if kind == "compare" else QUESTION
    check_form(question, form)
    columns: Any = question.get("columns", [])
    if len(columns) > MOST_COLUMNS:
        raise HTTPRefused(400, f"there are more than {MOST_COLUMNS} columns")
    for column in columns:
        check_form(column, COLUMN)
        if column["kind"] not in ("layout", "sbp"):
            raise HTTPRefused(400, "a column is a `layout` or an `sbp` block")
    return {
        "kind": kind,
        "name": name,
        "text": question["text"],
        "options": asdict(_chosen(question, base)),
        "columns": columns,
    }


def _chosen(question: PageOptions, base: Options) -> Options:
    return replace(
        base,
        program=question["program"],
        mesh=question["mesh"],
        layout=question["layout"],
        sbp=question["sbp"],
        cluster=question["cluster"],
        reduce=question["reduce"],
        set_dims=question["sizes"],
    )


class Jobs:
    """Does jobs one after the other.

    It remembers a search under way, and the last program, which other views are drawn of.
    """

    def __init__(self) -> None:
        self._last: tuple[Source, Options, Compilation] | None = None
        self._search: LayoutSearch | None = None

    def answer(self, job: CompileJob) -> JobAnswer | Failed:
        """The answer to a job; `{"failed": …}` where the compiler itself failed."""
        try:
            return self._answer(job)
        except Exception as error:  # our own mistake: the page says so, and the next job is new
            return {"failed": f"{type(error).__name__}: {error}"[:500]}

    def _answer(self, job: CompileJob) -> JobAnswer:
        source, options = Source(job["name"], job["text"]), Options(**job["options"])
        match job["kind"]:
            case "compile":
                compilation = Compilation(source, options, Diagnostics())
                self._last = source, options, compilation
                return answer(compilation)
            case "views":
                return views(self._compiled(source, options))
            case "compare":
                from meshdsl.play.side_by_side import compared

                return compared(source, options, job["columns"])
            case "search":
                from meshdsl.play.layout_search import LayoutSearch

                self._search = self._search or LayoutSearch()
                return self._search.answer(source, options)

    def _compiled(self, source: Source, options: Options) -> Compilation:
        """The last program if it is this one; else it is compiled again."""
        if self._last is not None:
            last, under, compilation = self._last
            if (last.name, last.text, under) == (source.name, source.text, options):
                return compilation
        return Compilation(source, options, Diagnostics())
