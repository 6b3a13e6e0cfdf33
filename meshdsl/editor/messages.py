"""Diagnostics and their fixes, as the protocol has them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from lsprotocol import types as lsp

from meshdsl.diagnostics import Diagnostic, Fix, Related, Span
from meshdsl.editor.locations import location
from meshdsl.editor.text import Text

NAME = "meshdsl"
"""The source of every message, as editors show it."""

_SEVERITIES = {
    "error": lsp.DiagnosticSeverity.Error,
    "warning": lsp.DiagnosticSeverity.Warning,
    "note": lsp.DiagnosticSeverity.Information,
}

UNUSED = ("MD0132", "MD0133", "MD0134")
"""Codes of names that nothing uses; editors grey them out."""


def shown(diagnostic: Diagnostic, uri: str, text: Text) -> lsp.Diagnostic:
    """A diagnostic at its place in the document; one about elsewhere, at the first line."""
    help = f"\nhelp: {diagnostic.help}" if diagnostic.help else ""
    line = _lines().get(diagnostic.code)
    return lsp.Diagnostic(
        range=_range(diagnostic.span, text),
        message=f"{diagnostic.message}{help}",
        severity=_SEVERITIES[diagnostic.severity],
        code=diagnostic.code,
        code_description=lsp.CodeDescription(f"{_records()}#L{line}") if line else None,
        source=NAME,
        tags=[lsp.DiagnosticTag.Unnecessary] if diagnostic.code in UNUSED else None,
        related_information=list(_related(diagnostic.related, uri, text)) or None,
    )


def _range(span: Span | None, text: Text) -> lsp.Range:
    if span is None or not text.owns(span):
        return lsp.Range(lsp.Position(0, 0), text.line_end(1))
    return text.range(span)


def _related(
    places: Iterable[Related], uri: str, text: Text
) -> Iterator[lsp.DiagnosticRelatedInformation]:
    for related in places:
        where = location(related.span, uri, text)
        if where is not None:
            yield lsp.DiagnosticRelatedInformation(where, related.message)


@functools.cache
def _records() -> str:
    """The link to the file with the records of all codes."""
    return Path(str(files("meshdsl") / "codes.toml")).as_uri()


@functools.cache
def _lines() -> dict[str, int]:
    """The line, from 1, of every code's record in that file."""
    text = (files("meshdsl") / "codes.toml").read_text(encoding="utf-8")
    heads = ((line, number) for number, line in enumerate(text.splitlines(), 1))
    return {line[1:-1]: number for line, number in heads if line.startswith("[MD")}


# --- fixes -----------------------------------------------------------------------------------


def edits(fix: Fix, text: Text) -> list[lsp.TextEdit]:
    """The edits of a fix."""
    return [lsp.TextEdit(text.range(edit.span), edit.text) for edit in fix.edits]


def quick_fixes(
    diagnostics: Iterable[Diagnostic], uri: str, text: Text, wanted: lsp.Range
) -> Iterator[lsp.CodeAction]:
    """The fixes of diagnostics that touch a range, the best of each preferred."""
    first, last = text.offset(wanted.start), text.offset(wanted.end)
    for diagnostic in diagnostics:
        span = diagnostic.span
        if span is None or not text.owns(span) or span.end < first or last < span.start:
            continue
        for number, fix in enumerate(own_fixes(diagnostic, text)):
            yield lsp.CodeAction(
                title=fix.title,
                kind=lsp.CodeActionKind.QuickFix,
                diagnostics=[shown(diagnostic, uri, text)],
                is_preferred=number == 0 and fix.safe,
                edit=lsp.WorkspaceEdit(changes={uri: edits(fix, text)}),
            )


def own_fixes(diagnostic: Diagnostic, text: Text) -> tuple[Fix, ...]:
    """The fixes of a diagnostic that edit this document alone."""
    fixes = (fix for fix in diagnostic.fixes if fix.edits and not fix.options)
    return tuple(fix for fix in fixes if all(text.owns(edit.span) for edit in fix.edits))


def fix_all(uri: str, diagnostics: Iterable[Diagnostic]) -> Iterator[lsp.CodeAction]:
    """The action to carry out all safe fixes of a document, where there are any; yet without edits.

    They are found when it is chosen: to find them, the text is checked several times.
    """
    if any(fix.safe for diagnostic in diagnostics for fix in diagnostic.fixes[:1]):
        kind = lsp.CodeActionKind.SourceFixAll
        yield lsp.CodeAction("meshdsl: carry out all fixes", kind=kind, data={"uri": uri})


def whole_edit(text: Text, new: str) -> list[lsp.TextEdit]:
    """The one edit that makes a text another one, of the lines that differ; none for the same."""
    old = text.source.text
    if old == new:
        return []
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    head = tail = 0
    while head < min(len(before), len(after)) and before[head] == after[head]:
        head += 1
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    start = sum(map(len, before[:head]))
    end = len(old) - sum(map(len, before[len(before) - tail :]))
    lines = after[head : len(after) - tail]
    return [lsp.TextEdit(text.range(Span(text.source, start, end)), "".join(lines))]
