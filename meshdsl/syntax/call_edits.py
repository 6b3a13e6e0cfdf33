"""Fixes of a written call alone: an option that is added, replaced or left out.

A schedule may be the value of an option of the command; then so is the edit.
"""

from __future__ import annotations

from meshdsl.diagnostics import Edit, Fix, Source, Span
from meshdsl.syntax import ast
from meshdsl.syntax.edits import inserted, without_entry
from meshdsl.syntax.parse import parse_scheduled


def _written(call: Span) -> ast.CallExpr | None:
    """The tree of a call, with places counted from its first character; None of Python."""
    return parse_scheduled(Source(call.file, call.text))[0]


def _in(call: Span, part: Span) -> Span:
    """The place, in the source of a call, of a part of its tree."""
    return Span(call.source, call.start + part.start, call.start + part.end)


def with_option(call: Span, name: str, value: str) -> tuple[Fix, ...]:
    """The fix that gives a call an option, in place of its value where it has one."""
    node, title = _written(call), f"`{name}={value}`"
    if node is None:
        return ()
    for option in node.keywords:
        if option.name.text == name:
            edit = Edit(_in(call, option.value.span), value)
            return (Fix(f"write {title}", (edit,), safe=False),)
    ends = [argument.span.end for argument in (*node.args, *node.keywords)]
    if ends:
        at, text = call.start + max(ends), f", {name}={value}"
    elif call.text.endswith(")"):
        at, text = call.end - 1, f"{name}={value}"
    else:
        at, text = call.end, f"({name}={value})"
    return (inserted(at, text, call, f"add {title}"),)


def written_anew(call: Span, text: str) -> tuple[Fix, ...]:
    """The fix that writes another call: a person decides."""
    return () if _written(call) is None else (Fix.write(call, text, safe=False),)


def without_option(call: Span, name: str) -> tuple[Fix, ...]:
    """The fix that leaves an option of a call out, if it is written there."""
    node = _written(call)
    options = () if node is None else node.keywords
    spans = (_in(call, option.span) for option in options if option.name.text == name)
    return tuple(
        Fix(f"leave out `{name}`", (Edit(without_entry(span), ""),), safe=False) for span in spans
    )
