"""A comparison as HTML: tensors and what is sent of each line, one column beside the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshdsl.notebook.html import CELL, CODE, DIFFERS, LINE, PAGE, TABLE, plain_row, small
from meshdsl.notebook.svg import Markup, join, tag
from meshdsl.report.compare_terminal import (
    measured,
    problems,
    route_text,
    sentence,
    totals,
    where,
)

Json = dict[str, Any]


def page(compared: Json) -> Markup:
    """All of it; cells that differ from the first column are marked by sign and tint."""
    columns = compared["columns"]
    rows = [row for entry in compared["rows"] for row in _line(entry, compared)]
    table = tag("table", tag("tbody", _head("tensor", columns), *rows), style=TABLE)
    sums = tag("table", tag("tbody", *_totals(compared)), style=TABLE)
    said = tag("p", tag("b", sentence(compared)))
    ran = (tag("div", small(text.strip())) for text in measured(compared))
    return tag("div", said, *_columns(columns), table, sums, *ran, style=PAGE)


def _columns(columns: Sequence[Json]) -> Iterator[Markup]:
    for c in columns:
        about = where(c) if "totals" in c else f", not compiled: {problems(c)}"
        yield tag("div", tag("b", c["letter"]), f" {c['title']}{about}")


def _head(first: str, columns: Sequence[Json]) -> Markup:
    letters = (tag("td", tag("b", c["letter"]), style=CELL) for c in columns)
    return plain_row(tag("td", small(first), style=CELL), *letters)


def _line(row: Json, compared: Json) -> Iterator[Markup]:
    """A source line, and below it what it holds and what it sends."""
    file = "" if row["file"] == compared["file"] else f"{row['file']} "
    text = tag("code", row["text"].rstrip(), style=CODE)
    span = len(compared["columns"]) + 1
    yield plain_row(
        tag("td", small(f"{file}{row['line']}"), "  ", tag("b", text), colspan=span, style=LINE)
    )
    for kind in ("tensors", "routes"):
        for entry in row[kind]:
            yield _entry(entry, compared["columns"], kind == "routes")


def _entry(entry: Json, columns: Sequence[Json], route: bool) -> Markup:
    mark = "" if entry["same"] else "≠ "
    name = tag("code", entry["tensor"], style=CODE)
    head = tag("td", f"{mark}{'⇒ ' if route else ''}", name, style=CELL)
    cells = zip(entry["cells"], columns, entry["differs"], strict=True)
    made = (_cell(cell, c, differs, route) for cell, c, differs in cells)
    return plain_row(head, *made)


def _cell(cell: Json | None, column: Json, differs: bool, route: bool) -> Markup:
    mark, style = ("≠ ", DIFFERS) if differs else ("", CELL)
    if cell is None:
        return tag("td", f"{mark}–", style=style)
    if route:
        way = " → ".join([cell["from"], *(s["after"]["named"] for s in cell["steps"])])
        return tag("td", mark, tag("b", route_text(cell)), tag("br"), small(way), style=style)
    axes = ", ".join(f"{axis} {component}" for axis, component in cell["sbp"].items())
    first, second = cell["named"], axes
    if column["positional"]:
        first, second = f"({', '.join(cell['sbp'].values())})", cell["named"]
    beside = join(tag("br"), small(second)) if second else ""
    return tag("td", mark, tag("code", first, style=CODE), beside, style=style)


def _totals(compared: Json) -> Iterator[Markup]:
    yield _head("per device", compared["columns"])
    for label, texts, differs in totals(compared):
        cells = (
            tag("td", f"{'≠ ' if d else ''}{t}", style=DIFFERS if d else CELL)
            for t, d in zip(texts, differs, strict=True)
        )
        mark = "≠ " if any(differs) else ""
        yield plain_row(tag("td", f"{mark}{label}", style=CELL), *cells)
