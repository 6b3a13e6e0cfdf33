"""Fixes of a written call alone: an option that is added, replaced or left out.

A schedule may be the value of an option of the command; then so is the edit.
"""

from __future__ import annotations

import re

from meshdsl.diagnostics import Edit, Fix, Span
from meshdsl.syntax.edits import inserted, without_entry

_CALL = re.compile(r"\w+\s*(\[[^][]*\])?\s*(\(.*\))?", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"


def _options(call: Span) -> dict[str, tuple[Span, Span]]:
    """The options that are written in a call: the place of each, and that of its value."""
    text, places = call.text, {}
    start = text.find("(")
    if start < 0 or not text.endswith(")"):
        return {}
    depth, entry, quoted = 0, start + 1, False
    for at in range(start + 1, len(text)):
        sign = text[at]
        quoted ^= sign == '"'
        if quoted:
            continue
        if depth == 0 and sign in ",)":
            match = re.fullmatch(r"\s*((\w+)\s*=\s*(.*?))\s*", text[entry:at], re.DOTALL)
            if match is not None:
                (first, last), (begin, end) = match.span(1), match.span(3)
                option = Span(call.source, call.start + entry + first, call.start + entry + last)
                value = Span(call.source, call.start + entry + begin, call.start + entry + end)
                places[match[2]] = option, value
            entry = at + 1
        depth += (sign in _OPENING) - (sign in _CLOSING)
    return places


def with_option(call: Span, name: str, value: str) -> tuple[Fix, ...]:
    """The fix that gives a call an option, in place of its value where it has one."""
    title, present = f"`{name}={value}`", _options(call).get(name)
    if _CALL.fullmatch(call.text) is None:
        return ()  # of Python
    if present is not None:
        return (Fix(f"write {title}", (Edit(present[1], value),), safe=False),)
    if not call.text.endswith(")"):
        return (inserted(call.end, f"({name}={value})", call, f"add {title}"),)
    comma = "" if call.text.endswith("()") else ", "
    return (inserted(call.end - 1, f"{comma}{name}={value}", call, f"add {title}"),)


def written_anew(call: Span, text: str) -> tuple[Fix, ...]:
    """The fix that writes another call: a person decides."""
    return (Fix.write(call, text, safe=False),) if _CALL.fullmatch(call.text) else ()


def without_option(call: Span, name: str) -> tuple[Fix, ...]:
    """The fix that leaves an option of a call out, if it is written there."""
    present = _options(call).get(name)
    if present is None:
        return ()
    return (Fix(f"leave out `{name}`", (Edit(without_entry(present[0]), ""),), safe=False),)
