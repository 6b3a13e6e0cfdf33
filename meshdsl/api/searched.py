"""The result of `prog.search`: plans, the best first, and why the best has its rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshdsl.api.errors import told
from meshdsl.api.layouts import Layout, layout
from meshdsl.api.plan import Plan, asked_of, in_python, planned
from meshdsl.api.source_location import Site, here
from meshdsl.diagnostics import DiagnosticError, Source, did_you_mean, fail
from meshdsl.report.advice_report import AdviceFacts, same_program
from meshdsl.report.advice_report import advised as advice_facts
from meshdsl.report.advice_report import shown as advice_shown
from meshdsl.report.document import Document
from meshdsl.report.method_comparison import MethodsFacts, methods_facts, methods_shown
from meshdsl.report.schema import SearchFacts
from meshdsl.report.search_result import block_of, shown
from meshdsl.report.search_result import searched as facts
from meshdsl.report.views.parts import WIDTH, View
from meshdsl.search.advice import Advice, advice
from meshdsl.search.all_methods import MethodComparison, compare_methods
from meshdsl.search.candidate import Candidate as Planned
from meshdsl.search.methods import DEFAULT, METHODS, best_plans
from meshdsl.search.problem import SearchResult
from meshdsl.search.request import Amounts, SearchRequest
from meshdsl.syntax.format import format_source

if TYPE_CHECKING:
    from meshdsl.api.programs import Program
    from meshdsl.pipeline import Compilation


PLAIN = {"message_bytes": 0, "cache": False, "cluster": None, "objective": None}
"""The options of a plan whose walk is known."""


class Searched(View):
    """Plans of a program, the best first: `found[0].explain()`. `str(found)` is the report.

    `json` is the same as data (version 1); `layout` the best layout in the language, with the
    reason behind each rule.
    """

    width = WIDTH

    def __init__(self, program: Program, found: SearchResult, method: str) -> None:
        self.program, self._found, self._method = program, found, method

    @property
    def document(self) -> Document:
        """The layout with its reasons, the certificate, and the plans that come next."""
        return shown(self._found)

    @property
    def json(self) -> SearchFacts:
        """The facts."""
        return facts(self._found, self._found.problem.program.span.file, self._method)

    @property
    def proven(self) -> bool:
        """Whether no layout of the space that was searched is better than the first."""
        return self._found.proven

    @property
    def layout(self) -> str:
        """The block of the best layout."""
        return block_of(self._found, self._found.plans[0])

    @told
    def to_mdsl(self) -> str:
        """The program in the language, with the best layout."""
        return format_source(Source("searched", f"{self.program.to_mdsl()}\n{self.layout}"))

    def __len__(self) -> int:
        return len(self._found.plans)

    @told
    def __getitem__(self, index: int) -> Plan:
        """One of the plans, compiled."""
        return self._plans[index]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._plans)

    @cached_property
    def _plans(self) -> tuple[Plan, ...]:
        plans = []
        for plan in self._found.plans:
            chosen: dict[str, Any] = {"mesh": str(plan.mesh) or None, "sbp": None, "dtype": None}
            chosen |= {"layout": _layout(plan), "reduce": plan.policy}
            chosen |= PLAIN
            plans.append(planned(self.program, chosen, False, here()))
        return tuple(plans)


def _layout(plan: Planned) -> Any:
    """The rules of a plan, with the schedule of its pipeline."""
    rules = [*map(str, (*plan.rules, *plan.cuts, *plan.execution.settings))]
    return layout(rules, schedule=str(plan.schedule)) if plan.schedule else rules or ""


class ComparedMethods(View):
    """Every method of search on one question: `str(compared)` is the table, `json` its data."""

    width = WIDTH

    def __init__(self, found: MethodComparison) -> None:
        self._found = found

    @property
    def document(self) -> Document:
        """The table."""
        return methods_shown(self._found)

    @property
    def json(self) -> MethodsFacts:
        """The table as data (version 1)."""
        return methods_facts(self._found, self._found.problem.program.span.file)


def compared(
    program: Program, mesh: Any, request: SearchRequest, amounts: Amounts, site: Site
) -> ComparedMethods:
    """Every method on the question of a request; `site` is the call."""
    compilation = _compilation(program, mesh, None, site)
    with _from_python(site):
        comparison = compare_methods(request.with_amounts(amounts), compilation, METHODS)
    return ComparedMethods(comparison)


class Advised(View):
    """How to divide a program over devices. `str(advised)` is the report, `json` the same as data.

    `plan` is the plan that is advised, compiled; `searched` the search that found it.
    """

    width = WIDTH

    def __init__(self, program: Program, advice: Advice, made: Compilation) -> None:
        self._advice, self._same = advice, same_program(made)
        self.searched = Searched(program, advice.found, DEFAULT)

    @property
    def document(self) -> Document:
        """The advice, question by question, and other plans beside it."""
        return advice_shown(self.json)

    @cached_property
    def json(self) -> AdviceFacts:
        """The facts."""
        return advice_facts(self._advice, self._advice.problem.program.span.file, self._same)

    @property
    def plan(self) -> Plan:
        """The plan that is advised, compiled."""
        return self.searched[0]


def advised(
    program: Program,
    mesh: Any,
    dtype: str | None,
    request: SearchRequest,
    amounts: Amounts,
    site: Site,
) -> Advised:
    """The advice for a program; `site` is the call."""
    compilation = _compilation(program, mesh, dtype, site)
    with _from_python(site):
        return Advised(program, advice(request.with_amounts(amounts), compilation), compilation)


def searched(
    program: Program,
    mesh: Any,
    dtype: str | None,
    request: SearchRequest,
    amounts: Amounts,
    site: Site,
) -> Searched:
    """The best layouts of a program; `site` is the call."""
    method = request.method or DEFAULT
    if method not in METHODS:
        help = did_you_mean(method, list(METHODS)) or f"there are {', '.join(METHODS)}"
        fail("MD0602", f"there is no method `{method}`", site.argument("method"), help=help)
    compilation = _compilation(program, mesh, dtype, site)
    with _from_python(site):
        result = best_plans(request.with_amounts(amounts), compilation)
    return Searched(program, result, method)


def _compilation(program: Program, mesh: Any, dtype: str | None, site: Site) -> Compilation:
    chosen = {"mesh": mesh, "layout": "", "sbp": None, "reduce": "deferred", "dtype": dtype}
    return program.compilation(*asked_of(program, chosen | PLAIN, site))


def as_text(rules: Layout | str | None) -> str | None:
    """A layout as the options of a search take it; a text stays as it is."""
    return repr(rules) if isinstance(rules, Layout) else rules


@contextmanager
def _from_python(site: Site) -> Iterator[None]:
    """Say what is wrong in the words of Python."""
    try:
        yield
    except DiagnosticError as error:
        raise DiagnosticError(*(in_python(d, site) for d in error.diagnostics)) from None
