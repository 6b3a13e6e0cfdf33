"""The comparison as one page: no network, no fonts, readable without JavaScript.

The table is plain HTML. The script of the page adds what moves: highlighting, pictures, the slider;
it reads the JSON of `report/compare.py` and puts text in as text. A content security policy lets
only this one script run, by its hash, whatever a file may contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from meshdsl.diagnostics import Source
from meshdsl.render import _cells
from meshdsl.report.compare_terminal import measured, problems, route_text, sentence, totals, where
from meshdsl.report.figures import UNIT
from meshdsl.version import __version__

Json = dict[str, Any]
FOLDER = "page"
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(compared: Json, source: Source) -> str:
    """The whole page; `source` is the text of the file it is about."""
    style, script = _resource("page.css"), _resource("page.js")
    heading = f"{_text(compared['program'])} <small>{_text(compared['file'])}</small>"
    parts = {
        "version": _text(__version__),
        "title": _text(f"{compared['program']}, {compared['file']}: meshdsl compare"),
        "heading": heading,
        "sentence": _text(sentence(compared)),
        "columns": _columns(compared["columns"]),
        "source": _source(source),
        "table": _table(compared),
        "totals": _totals(compared),
        "measured": _list("measured", measured(compared)),
        "data": as_data(_needed(compared)),
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return (files("meshdsl.report") / FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def as_data(value: object) -> str:
    """JSON for a script element: no `<`, `>` or `&`, and nothing but ASCII."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _needed(compared: Json) -> Json:
    """What the script reads: the rows, and of columns what stands around them."""
    kept = ("letter", "mesh", "totals")
    columns = [{key: c[key] for key in kept if key in c} for c in compared["columns"]]
    return {"file": compared["file"], "columns": columns, "rows": compared["rows"]}


def _text(text: str) -> str:
    """Text from anywhere: control characters shown as escapes, then HTML's own signs."""
    return escape("".join(_cells(text)), quote=True)


# --- parts of the page -----------------------------------------------------------------------


def _columns(columns: Sequence[Json]) -> str:
    found = []
    for column in columns:
        about = f"<dd>{_text(column['title'])}{_about(column)}</dd>"
        found.append(f"<dt>{_text(column['letter'])}</dt>{about}")
    return f'<dl class="columns">{"".join(found)}</dl>'


def _about(column: Json) -> str:
    if "totals" in column:
        return _text(where(column))
    return f", <strong>not compiled</strong>: {_text(problems(column))}"


def _source(source: Source) -> str:
    lines = [line.removesuffix("\r") for line in source.text.removesuffix("\n").split("\n")]
    found = "\n".join(
        f'<li data-line="{number}"><span>{number}</span><code>{_text(line)}</code></li>'
        for number, line in enumerate(lines, 1)
    )
    return f"<ol>\n{found}\n</ol>"


def _table(compared: Json) -> str:
    letters = "".join(f'<th scope="col">{_text(c["letter"])}</th>' for c in compared["columns"])
    head = f'<thead><tr><th scope="col">tensor</th>{letters}</tr></thead>'
    bodies = "\n".join(_body(i, row, compared) for i, row in enumerate(compared["rows"]))
    return f'<div class="wide"><table id="rows">{head}\n{bodies}</table></div>'


def _body(number: int, row: Json, compared: Json) -> str:
    columns = compared["columns"]
    where = "" if row["file"] == compared["file"] else f"{row['file']} "
    line = (
        f'<tr class="line"><th colspan="{len(columns) + 1}" scope="rowgroup">'
        f'<span class="number">{_text(where)}{row["line"]}</span>{_text(row["text"])}</th></tr>'
    )
    items = [
        _item(kind, number, at, entry, columns)
        for kind in ("tensors", "routes")
        for at, entry in enumerate(row[kind])
    ]
    return f'<tbody data-row="{number}">{line}{"".join(items)}</tbody>'


def _item(kind: str, number: int, at: int, entry: Json, columns: Sequence[Json]) -> str:
    route = kind == "routes"
    mark = _mark(not entry["same"])
    arrow = "⇒ " if route else ""
    cells = zip(entry["cells"], columns, entry["differs"], strict=True)
    made = "".join(_cell(c, column, differs, route) for c, column, differs in cells)
    return (
        f'<tr class="item {"route" if route else "tensor"}" data-kind="{kind}" '
        f'data-row="{number}" data-entry="{at}"><th scope="row">{mark}{arrow}'
        f"<code>{_text(entry['tensor'])}</code></th>{made}</tr>"
    )


def _cell(cell: Json | None, column: Json, differs: bool, route: bool) -> str:
    kind = ' class="differs"' if differs else ""
    mark = _mark(differs)
    if cell is None:
        return f"<td{kind}>{mark}–</td>"
    if route:
        why = f' title="{_text(cell["why"])}"'
        way = " → ".join([cell["from"], *(s["after"]["named"] for s in cell["steps"])])
        return (
            f"<td{kind}{why}>{mark}<b>{_text(route_text(cell))}</b>"
            f'<span class="sbp">{_text(way)}</span></td>'
        )
    axes = ", ".join(f"{axis} {component}" for axis, component in cell["sbp"].items())
    first, second = cell["named"], axes
    if column["positional"]:
        first, second = f"({', '.join(cell['sbp'].values())})", cell["named"]
    return (
        f'<td{kind}>{mark}<code>{_text(first)}</code><span class="sbp">{_text(second)}</span></td>'
    )


def _totals(compared: Json) -> str:
    letters = "".join(f'<th scope="col">{_text(c["letter"])}</th>' for c in compared["columns"])
    rows = (
        f'<tr><th scope="row">{_mark(any(differs))}{_text(label)}</th>'
        + "".join(_sum(text, unlike) for text, unlike in zip(texts, differs, strict=True))
        + "</tr>"
        for label, texts, differs in totals(compared)
    )
    head = f'<thead><tr><th scope="col">per device</th>{letters}</tr></thead>'
    table = f'<table class="totals">{head}<tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _sum(text: str, differs: bool) -> str:
    kind = ' class="differs"' if differs else ""
    return f"<td{kind}>{_mark(differs)}{_text(UNIT.sub(chr(0xA0), text))}</td>"


def _mark(differs: bool) -> str:
    return '<span class="mark" title="columns differ">≠ </span>' if differs else ""


def _list(name: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line.strip())}</li>" for line in lines)
    return f'<ul id="{name}">{items}</ul>'
