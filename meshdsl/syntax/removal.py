"""What comes out of a text together with a statement or a declaration that is removed."""

from __future__ import annotations

import re

from meshdsl.diagnostics import Span
from meshdsl.syntax import ast
from meshdsl.syntax.tokens import lex, significant

_REST = re.compile(r"[ \t]*(#[^\n]*)?(\n|$)")


def without_line(span: Span) -> Span:
    """The span of a statement or declaration, with its lines if nothing else stands on them.

    A comment behind it goes with it; comments above it stay.
    """
    text = span.source.text
    start = text.rfind("\n", 0, span.start) + 1
    rest = _REST.match(text, span.end)
    if text[start : span.start].strip(" \t") or rest is None:
        return span
    return Span(span.source, start, rest.end())


def without_dim(node: ast.Dim) -> Span:
    """The span of one entry of a `dim` line with its comma, or of the line if it is alone."""
    source = node.span.source
    words = significant(lex(source))
    first = next(i for i, word in enumerate(words) if word.start_pos == node.span.start)
    last = next(i for i, word in enumerate(words) if (word.start_pos or 0) >= node.span.end)
    before, after = words[first - 1], words[last]
    assert before.start_pos is not None
    if before.type == "COMMA":
        return Span(source, before.start_pos, node.span.end)
    if after.type == "COMMA" and words[last + 1].type == "NAME":
        return Span(source, node.span.start, words[last + 1].start_pos or node.span.end)
    end = after.end_pos if after.type == "COMMA" else node.span.end
    return without_line(Span(source, before.start_pos, end or node.span.end))
