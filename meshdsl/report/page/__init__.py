"""A comparison as one page: no network, no fonts, readable without JavaScript.

The table is plain HTML. The script of the page adds interaction: highlighting, pictures, slider;
it reads the JSON of `report/comparison.py` and inserts text as text. A content security policy
allows only this one script, by its hash, whatever a file may contain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files

from meshdsl.diagnostics import Source
from meshdsl.report.comparison import headings, measured, sentence, table, verdict
from meshdsl.report.html import HTMLWriter, Markup, escaped, join, tag
from meshdsl.report.palette import DARK, INK, PARTS
from meshdsl.report.schema import ComparisonFacts
from meshdsl.version import __version__

_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(compared: ComparisonFacts, source: Source) -> str:
    """The whole page; `source` is the text of the compared file."""
    style, script = colours() + _resource("page.css"), _resource("page.js")
    writer = HTMLWriter(classes=True)
    parts = {
        "version": escaped(__version__),
        "title": escaped(f"{compared['program']}, {compared['file']}: meshdsl compare"),
        "heading": join(compared["program"], " ", tag("small", compared["file"])),
        "sentence": escaped(sentence(compared)),
        "verdict": writer.write(tuple(verdict(compared))),
        "columns": writer.write(tuple(headings(compared))),
        "source": _source(source),
        "table": writer.write((table(compared, source),)),
        "measured": writer.write(tuple(measured(compared["run"]))),
        "data": as_data(_needed(compared)),
        "style": style,
        "script": script,
        "style_hash": digest(style),
        "script_hash": digest(script),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def colours() -> str:
    """The colours of pages, light and dark, as variables of CSS."""
    pictures = {"--ink": INK, **{f"--c{number}": fill for number, fill in enumerate(PARTS)}}
    sets = {
        "light": " ".join(f"{name}: {fill};" for name, fill in pictures.items()),
        "dark": " ".join(f"{name}: {DARK[fill]};" for name, fill in pictures.items()),
    }
    return _PLACE.sub(lambda place: sets[place[1]], _resource("colours.css"))


def picture_colours() -> str:
    """The rules of drawings that are parts of a page: each colour, on light and dark pages."""
    return "\n".join(
        f'.picture [{what}="{light}"] {{ {what}: light-dark({light}, {dark}); }}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )


def digest(text: str) -> str:
    """The digest by which a content security policy allows a style or a script."""
    found = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(found).decode('ascii')}"


def as_data(value: object) -> str:
    """JSON for a script element: ASCII without `<`, `>` or `&`."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _needed(compared: ComparisonFacts) -> dict[str, object]:
    """The data of the script: the rows, and a few facts of the columns."""
    fields = ("letter", "mesh", "totals")
    columns = [{key: each for key, each in c.items() if key in fields} for c in compared["columns"]]
    return {"file": compared["file"], "columns": columns, "rows": compared["rows"]}


def _source(source: Source) -> Markup:
    """The lines of the file, numbered."""
    lines = [line.removesuffix("\r") for line in source.text.removesuffix("\n").split("\n")]
    numbered = (
        tag("li", tag("span", number), tag("code", line), data_line=number)
        for number, line in enumerate(lines, 1)
    )
    return tag("ol", *numbered)
