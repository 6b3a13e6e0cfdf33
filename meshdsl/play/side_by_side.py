"""One program under several layouts, side by side, as `compare` shows it without running it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meshdsl.columns import MOST_LAYOUTS, Wish, compile_columns, layouts_on
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.layout import declared_layout
from meshdsl.play.answer import Units, diagnostic_of
from meshdsl.play.protocol import CompareAnswer, PageColumn
from meshdsl.report import document as doc
from meshdsl.report.comparison import NOT_RUN, compare, headings, sentence, table, verdict
from meshdsl.report.html import HTMLWriter
from meshdsl.report.schema import ComparisonFacts


def compared(source: Source, options: Options, others: Sequence[PageColumn]) -> CompareAnswer:
    """The present layout in the first column, `others` in the next ones.

    Where there are none, those that `meshdsl compare` takes: the file's on the same mesh.
    """
    diagnostics = Diagnostics()
    compilation = Compilation(source, options, diagnostics)
    beside = diagnostics.of(lambda: list(others or _on_the_mesh(compilation))) or []
    document = diagnostics.of(lambda: _document(compilation, beside))
    units = Units(source.text)
    return {
        "columns": beside,
        "diagnostics": [diagnostic_of(d, source, units) for d in diagnostics],
        "html": HTMLWriter(classes=True).write(document or ()),
    }


def _on_the_mesh(compilation: Compilation) -> Iterator[PageColumn]:
    """The layouts of the file that fit the mesh of the present one, without it."""
    declarations, options = compilation.declarations, compilation.options
    now = declared_layout(declarations, options.layout, options.sbp)
    fitting = layouts_on(declarations, options.mesh, options.layout, options.sbp)
    names = (name for name in fitting if name != now)
    for name in itertools.islice(names, MOST_LAYOUTS - 1):
        yield {"kind": "layout", "name": name}


def _document(compilation: Compilation, others: Sequence[PageColumn]) -> doc.Document:
    """The verdict, the figures, then every line; raises what is wrong with the first column."""
    source, options = compilation.source, compilation.options
    now = ("layout", options.layout) if options.sbp is None else ("sbp", options.sbp)
    asked = [now, *((other["kind"], other["name"]) for other in others)]
    columns = compile_columns(
        compilation, [Wish(kind, name, options.reduce) for kind, name in asked]
    )
    columns[0].diagnostics.raise_errors()
    facts: ComparisonFacts = {**compare(columns, source), "run": NOT_RUN}
    return (
        doc.line(sentence(facts), "strong"),
        *verdict(facts),
        *headings(facts),
        table(facts, source, totals_first=True),
    )
