"""The answer to one state of the page: what is wrong with its text, and what each device does.

Plain data in, plain data out (docs/playground.md). Offsets of the text count UTF-16 units, as the
strings of a browser do. What is markup was written by `report/html.py`, which escapes all text.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from meshdsl.analysis import analyse
from meshdsl.carets import safe
from meshdsl.diagnostics import Diagnostic, Edit, Fix, Source, Span
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import Compilation, timing_of
from meshdsl.play.protocol import (
    Choices,
    PageAnswer,
    PageDiagnostic,
    PageEdit,
    PageFix,
    PagePicture,
    PagePlace,
    PageResult,
    PageViews,
    Runs,
    TextQuestion,
    ViewsAnswer,
)
from meshdsl.play.questions import check_form
from meshdsl.report.checks import check_source
from meshdsl.report.document import human, line, scaled
from meshdsl.report.html import HTMLWriter
from meshdsl.report.schema import ReportFacts

MAX_DEVICES = 4096
"""The most devices that are drawn: pictures shorten what is large, but every rank is counted."""


def answer(made: Compilation) -> PageAnswer:
    """The diagnostics, the names to choose from, and the result, None where there are errors."""
    source, diagnostics = made.source, made.diagnostics
    analysis = analyse(source, made.options)
    diagnostics.add(*analysis.diagnostics)
    result = None if diagnostics.errors else _compiled(made)
    units = Units(source.text)
    return {
        "choices": _choices(analysis.declarations),
        "diagnostics": [diagnostic_of(d, source, units) for d in diagnostics],
        "result": result,
    }


def _compiled(made: Compilation) -> PageResult | None:
    """The result, unless the program cannot be compiled so; and what only placing it shows.

    Expectations that fail, and layouts that were not chosen and cannot be used, spoil no result.
    """
    source, options, diagnostics = made.source, made.options, made.diagnostics
    result = diagnostics.of(lambda: _result(made.checked("emitted")))
    diagnostics.of(partial(check_source, source, options, diagnostics))
    return result


def _choices(known: Declarations) -> Choices:
    """The names that the file declares, and the sizes of its dims, as far as it can be read."""
    return {
        "programs": list(known.programs),
        "layouts": list(known.layouts),
        "sbps": list(known.sbps),
        "meshes": list(known.meshes),
        "dims": {name: dim.size for name, dim in known.dims.items()},
    }


# --- the result ------------------------------------------------------------------------------


def _result(made: Compilation) -> PageResult:
    """The sentence, the figures, and the report line by line."""
    from meshdsl.report.explanation_document import explanation, sentence

    report, writer = _report(made), HTMLWriter(classes=True, inline=True)
    _, *document = explanation(report, {made.source.name: made.source})  # the sentence is apart
    return {
        "sentence": sentence(report),
        "totals": _totals(report),
        "report": writer.write(tuple(document)),
    }


def _report(made: Compilation) -> ReportFacts:
    """The facts; what is wrong is told beside them."""
    return {**made.advised, "warnings": []}


def views(made: Compilation) -> ViewsAnswer:
    """The views that are drawn when they are looked at; None where there are errors."""
    return {"views": made.diagnostics.of(lambda: _views(made.checked("emitted")))}


def _views(made: Compilation) -> PageViews:
    report, writer = _report(made), HTMLWriter(classes=True, inline=True)
    return {
        "time": _time(made, writer),
        "mesh": _mesh(report, writer),
        "pictures": _pictures(made, report, writer),
        "code": {"bare": _coloured(made.bare), "whole": made.text},
    }


def _totals(report: ReportFacts) -> list[tuple[str, str]]:
    """The figures that are read first, with their names."""
    total = report["totals"]
    return [
        ("devices", f"{report['devices']:,}"),
        ("collectives", f"{total['collectives']:,}"),
        ("sent per device", human(total["wire_bytes"])),
        ("memory per device", human(report["memory"]["peak"])),
        ("computed per device", scaled(total["flops_per_device"])),
    ]


def _time(made: Compilation, writer: HTMLWriter) -> str:
    """The step on the cluster: its streams and its memory over time, and the slowest lines."""
    from meshdsl.report.views.results import Simulation
    from meshdsl.simulate.engine import simulate

    timing = timing_of(made.declarations, made.options, made.placed.mesh)
    if timing is None:
        return writer.write((line("Choose a cluster: the time of a step depends on it."),))
    return writer.write(Simulation(simulate(made.device, timing), made.source).document)


def _mesh(report: ReportFacts, writer: HTMLWriter) -> str:
    """The devices by their coordinates, and the memory of one."""
    from meshdsl.report.views.parts import Memory, MeshView

    axes = tuple(report["mesh"].items())
    memory = Memory({report["layout"]: report["memory"]}).document
    return writer.write((*MeshView("mesh", axes).document, *memory))


def _pictures(made: Compilation, report: ReportFacts, writer: HTMLWriter) -> list[PagePicture]:
    """Which device holds what of each named tensor, and who sends to whom in each collective."""
    from meshdsl.report.views.parts import collectives, placements

    if report["devices"] > MAX_DEVICES:
        return []
    tensors: list[PagePicture] = [
        {"title": name, "line": view.json["line"], "html": writer.write(view.document)}
        for name, view in placements(report).items()
    ]
    sent: list[PagePicture] = [
        {"title": view.title, "line": view.line, "html": writer.write(view.document)}
        for view in collectives(made.device, report)
    ]
    return tensors + sent


def _coloured(text: str) -> str:
    """A program in Python as markup."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return str(highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)))


# --- diagnostics -----------------------------------------------------------------------------


class Units:
    """Offsets of a text in UTF-16 units."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._plain = text.isascii()

    def at(self, offset: int) -> int:
        """The units before a character."""
        if self._plain:
            return offset
        return offset + sum(char > "\uffff" for char in self._text[:offset])


def diagnostic_of(diagnostic: Diagnostic, source: Source, units: Units) -> PageDiagnostic:
    """A diagnostic, its places in the page's text."""
    span = diagnostic.span
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": "\n".join(map(safe, diagnostic.message.split("\n"))),
        "help": None if diagnostic.help is None else safe(diagnostic.help),
        "where": None if span is None else _where(span, source, units),
        "related": [
            {"message": safe(r.message), "where": _where(r.span, source, units)}
            for r in diagnostic.related
        ],
        "fixes": [fix_of(fix, units) for fix in diagnostic.fixes if fix.is_of(source.text)],
    }


def _where(span: Span, source: Source, units: Units) -> PagePlace:
    """A place: in the text by its offsets; in a field of the page, or another file, by its name."""
    if span.source is not source and span.source.text != source.text:
        return {"file": safe(span.file), "line": span.line, "column": span.column}
    start, end = units.at(span.start), units.at(span.end)
    return {"line": span.line, "column": span.column, "start": start, "end": end}


def fix_of(fix: Fix, units: Units) -> PageFix:
    """A way out, its edits in the page's text."""
    return {"title": fix.title, "edits": [edit_of(edit, units) for edit in fix.edits]}


def edit_of(edit: Edit, units: Units) -> PageEdit:
    """An edit of the page's text."""
    return {
        "start": units.at(edit.span.start),
        "end": units.at(edit.span.end),
        "text": edit.text,
    }


# --- colours -----------------------------------------------------------------------------------


def runs_of(question: TextQuestion) -> Runs:
    """The answer to `/colours`: the length of each word in UTF-16 units, and its class."""
    check_form(question, {"text": str})
    return {"runs": _colours(question["text"])}


def _colours(text: str) -> list[tuple[int, str]]:
    """The words of a text, with their classes in Pygments."""
    from pygments.token import STANDARD_TYPES

    from meshdsl.lexer import MdslLexer

    runs = MdslLexer(stripnl=False, ensurenl=False).get_tokens_unprocessed(text)
    words = ((word, STANDARD_TYPES.get(kind, "")) for _, kind, word in runs)
    return _joined((Units(word).at(len(word)), name) for word, name in words)


def _joined(runs: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Runs with neighbours of one class joined."""
    joined: list[tuple[int, str]] = []
    for length, name in runs:
        if joined and joined[-1][1] == name:
            joined[-1] = (joined[-1][0] + length, name)
        else:
            joined.append((length, name))
    return joined
