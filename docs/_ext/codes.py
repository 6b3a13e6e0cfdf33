"""The index of diagnostics: every record of `meshdsl/codes.toml`, and what its example prints."""

from __future__ import annotations

from collections.abc import Iterator

from docs._ext.markdown import fenced
from meshdsl.carets import render
from meshdsl.codes import CODES, SECTIONS, DiagnosticCode
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source

COLUMNS = 80


def index() -> str:
    """Every code, in the sections of its number."""
    parts = []
    for prefix, title in SECTIONS.items():
        records = [record for code, record in CODES.items() if code.startswith(prefix)]
        entries = "\n\n".join("\n\n".join(entry(record)) for record in records)
        parts.append(f"## {prefix}xx: {title}\n\n{entries}")
    return "\n\n".join(parts)


def entry(record: DiagnosticCode) -> Iterator[str]:
    """One code: what it means, an example and what `check` prints of it, the way out."""
    yield f"({record.code.lower()})=\n### {record.code}: {record.title}"
    yield record.meaning
    if record.wrong:
        yield fenced("{code-block} mdsl\n:force:\n", record.wrong)
        yield fenced("text", printed(record.wrong))
    yield f"**The way out:** {record.way_out}"


def printed(wrong: str) -> str:
    """What `meshdsl check` prints of a text."""
    diagnostics = Diagnostics()
    check_source(Source("wrong.mdsl", wrong), Options(), diagnostics)
    return "\n".join(render(d, COLUMNS).plain for d in diagnostics)
