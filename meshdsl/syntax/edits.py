"""Edits of a text: how they are carried out, and the places that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.syntax import ast

_REST = re.compile(r"[ \t]*(#[^\n]*)?(\n|$)")


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text after edits of it that do not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


def word_in(span: Span, word: str) -> Span | None:
    """The place of a word within a span, if it stands there once."""
    matches = list(re.finditer(rf"\b{re.escape(word)}\b", span.text))
    if len(matches) != 1:
        return None
    return Span(span.source, span.start + matches[0].start(), span.start + matches[0].end())


def around(span: Span, before: str, after: str, title: str, safe: bool = True) -> Fix:
    """The fix that puts an expression between two texts."""
    start, end = Span(span.source, span.start, span.start), Span(span.source, span.end, span.end)
    return Fix(title, (Edit(start, before), Edit(end, after)), safe)


def cast_to(span: Span, dtype: str, safe: bool = True) -> Fix:
    """The fix that casts an expression."""
    shown = span.text if len(span.text) <= 24 and "\n" not in span.text else "…"
    return around(span, "cast(", f", {dtype})", f"write `cast({shown}, {dtype})`", safe)


def without_line(span: Span) -> Span:
    """The span of a statement or declaration, with its lines if nothing else stands on them.

    A comment behind it goes with it; comments above it stay.
    """
    text = span.source.text
    start = text.rfind("\n", 0, span.start) + 1
    remainder = _REST.match(text, span.end)
    if text[start : span.start].strip(" \t") or remainder is None:
        return span
    return Span(span.source, start, remainder.end())


_COMMA_AFTER = re.compile(r"[ \t]*,[ \t]*")
_COMMA_BEFORE = re.compile(r",[ \t]*$")


def without_entry(span: Span) -> Span:
    """The span of an entry of a list or a block, with a comma, or with its line if it is alone."""
    lines, text = without_line(span), span.source.text
    if lines != span:
        return lines
    after = _COMMA_AFTER.match(text, span.end)
    if after is not None:
        return Span(span.source, span.start, after.end())
    before = _COMMA_BEFORE.search(text[: span.start])
    return span if before is None else Span(span.source, before.start(), span.end)


def removal(span: Span, title: str = "remove it") -> Fix:
    """The fix that removes an entry of a list or a block: a person decides."""
    return Fix(title, (Edit(without_entry(span), ""),), safe=False)


def without_dim(node: ast.DimDecl) -> Span:
    """The span of one entry of a `dim` line with its comma, or of the line if it is alone."""
    source, span = node.span.source, node.span
    before = len(source.text[: span.start].rstrip(" \t"))
    after = _COMMA_AFTER.match(source.text, span.end)
    if source.text[before - 1] == ",":
        return Span(source, before - 1, span.end)
    if after is not None and source.text[after.end() : after.end() + 1].isidentifier():
        return Span(source, span.start, after.end())
    end = span.end if after is None else after.end()
    return without_line(Span(source, before - len("dim"), end))
