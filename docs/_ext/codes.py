"""The diagnostics: a page for every record of `meshdsl/codes.toml`, and an index of them."""

from __future__ import annotations

from collections.abc import Iterator

from docs._ext.markdown import fenced, table
from meshdsl.carets import render
from meshdsl.codes import CODES, SECTIONS, DiagnosticCode
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source

COLUMNS = 80
WRONG = "wrong"
"""The class of a program that has an error."""


def index() -> str:
    """The sections of the numbers: a line for each code, which leads to its page."""
    parts = []
    for prefix, title in SECTIONS.items():
        rows = [(_link(record.code), record.title) for record in _of_section(prefix)]
        parts.append(f"## {prefix}xx: {title}\n\n{table(('', ''), rows)}")
    return "\n\n".join(parts)


def _link(code: str) -> str:
    return f'<a id="{code.lower()}"></a>[{code}](codes/{code}.md)'


def _of_section(prefix: str) -> list[DiagnosticCode]:
    return [record for code, record in CODES.items() if code.startswith(prefix)]


def page(code: str) -> str:
    """The page of one code."""
    return "\n\n".join(_page(CODES[code]))


def _page(record: DiagnosticCode) -> Iterator[str]:
    """What a code means, an example and what `check` prints of it, and the way out."""
    prefix = record.code[:4]
    yield f"({record.code.lower()})=\n# {record.code}: {record.title}"
    yield f"[Diagnostics](../codes.md), {prefix}xx: {SECTIONS[prefix]}"
    yield record.meaning
    if record.wrong:
        yield "A program that is wrong in this way, and what `meshdsl check` prints:"
        shown, is_wrong = printed(record.wrong)
        classes = f":class: {WRONG}\n" if is_wrong else ""
        yield fenced(f"{{code-block}} mdsl\n:force:\n{classes}", record.wrong)
        yield fenced("text", shown)
    yield f"**The way out:** {record.way_out}"
    numbers = [other.code for other in _of_section(prefix)]
    at = numbers.index(record.code)
    beside = [f"[{n}]({n}.md)" for n in (*numbers[max(at - 1, 0) : at], *numbers[at + 1 : at + 2])]
    yield f"Next to it: {', '.join(beside)}. In a terminal: `meshdsl explain {record.code}`."


def printed(wrong: str) -> tuple[str, bool]:
    """What `meshdsl check` prints of a text, and whether one of its diagnostics is an error."""
    diagnostics = Diagnostics()
    check_source(Source("wrong.mdsl", wrong), Options(), diagnostics)
    shown = "\n".join(render(d, COLUMNS).plain for d in diagnostics)
    return shown, any(d.severity == "error" for d in diagnostics)
