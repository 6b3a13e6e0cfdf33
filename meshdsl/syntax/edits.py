"""Edits of a text: how they are carried out, and the places that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable

from meshdsl.diagnostics import Edit, Fix, Source, Span
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


def inserted(at: int, text: str, within: Span, title: str, safe: bool = False) -> Fix:
    """The fix that inserts a text at an offset of the source of a span."""
    return Fix(title, (Edit(Span(within.source, at, at), text),), safe)


def shortened(span: Span) -> str:
    """An expression for the title of a fix."""
    return span.text if len(span.text) <= 24 and "\n" not in span.text else "…"


def cast_to(span: Span, dtype: str, safe: bool = True) -> Fix:
    """The fix that casts an expression."""
    return around(span, "cast(", f", {dtype})", f"write `cast({shortened(span)}, {dtype})`", safe)


_SIZE = re.compile(r"\s*=[ \t]*([0-9][0-9_]*)[ \t]*(?=[,#\n]|$)")


def resized(name: Span, sizes: Iterable[int]) -> tuple[Fix, ...]:
    """The fixes that give a dim, declared here by a number, another size."""
    literal = _SIZE.match(name.source.text, name.end)
    if literal is None:
        return ()
    span = Span(name.source, *literal.span(1))
    titles = ((f"declare `dim {name.text} = {size}`", Edit(span, str(size))) for size in sizes)
    return tuple(Fix(title, (edit,), safe=False) for title, edit in titles)


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


def below_dims(line: str, source: Source, declared: Iterable[Span]) -> Edit:
    """The edit that adds a `dim` line below those of a source, or at its beginning."""
    last = max((span.end for span in declared), default=None)
    if last is None:
        return Edit(Span(source, 0, 0), f"{line}\n")
    end = source.bounds(source.position(last)[0])[1]
    return Edit(Span(source, end, end), f"\n{line}")


_OPTION = re.compile(r"\w+[ \t]*=[ \t]*$")


def argument(value: Span) -> Span:
    """The span of an argument: of its name, too, where it has one."""
    name = _OPTION.search(value.source.text[: value.start])
    return value if name is None else Span(value.source, name.start(), value.end)


def removal(span: Span, title: str = "remove it", safe: bool = False) -> Fix:
    """The fix that removes an entry of a list or a block: a person decides, unless it is `safe`."""
    return Fix(title, (Edit(without_entry(span), ""),), safe)


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
