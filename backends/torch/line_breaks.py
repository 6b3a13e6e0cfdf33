"""Python statements, one at a time, laid out as by `ruff format`: quotes, and no long lines.

Only the syntax of emitted programs is handled: names, literals, calls, subscripts and displays.
A statement with no bracket to break at stays long.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterator

WIDTH = 100
INDENT = "    "
MANY = 4
"""So many entries that are alike are written as one."""

_OPENING, _CLOSING = "([{", ")]}"
_STRING = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'")


def statement(text: str, depth: int = 0, tail: str = "") -> list[str]:
    """The lines of one statement at `depth` levels; `tail` (a comma) ends the last of them."""
    return _broken(double_quoted(text), INDENT * depth, tail)


def double_quoted(text: str) -> str:
    """The statement with its strings in double quotes, where that needs no more backslashes."""
    return _STRING.sub(lambda match: _double(match[0]), text)


def quoted(value: str) -> str:
    """A string literal."""
    return _double(repr(value))


def _double(literal: str) -> str:
    if not literal.startswith("'") or '"' in literal:
        return literal
    return '"' + literal[1:-1].replace("\\'", "'") + '"'


def _broken(text: str, pad: str, tail: str) -> list[str]:
    """`text` on one line where it fits, else broken at its last bracket that is not empty."""
    unbroken = [f"{pad}{text}{tail}"]
    if len(unbroken[0]) <= WIDTH:
        return unbroken
    target, equals, value = text.partition(" = ")
    links = list(_links(value)) if equals and not tail else []
    if len(links) > 2:
        return _chain(target, value, links, pad)
    if equals and len(list(_operands(value))) > 1 and value[-1] not in _CLOSING:
        return [f"{pad}{target} = (", *_split(value, pad + INDENT), f"{pad}){tail}"]
    several = bool(equals) and len(list(_items(target))) > 1
    for start, end in _groups(text):
        if several and start < len(target):
            break  # no line ends in a subscript of one of several targets
        head, body, after = text[: start + 1], text[start + 1 : end], text[end:]
        if body and len(pad + head) <= WIDTH and len(pad + after + tail) <= WIDTH:
            display = _is_display(text, start)
            if display and text[start] == "(" and [body.strip()] == list(_items(body)):
                inner = _split(body.strip(), pad + INDENT)  # a comma would make it a tuple
            else:
                inner = _body(body, pad + INDENT, display)
            return [pad + head, *inner, f"{pad}{after}{tail}"]
    if equals and len(list(_items(value))) > 1:
        return _broken(f"{target} = ({value})", pad, tail)
    if several:
        return _targets(target, value, pad)
    return unbroken


def _split(text: str, pad: str, tail: str = "") -> list[str]:
    """What stands in a bracket: on one line, or one for each operand of an operator."""
    *parts, last = _operands(text) if len(pad + text + tail) > WIDTH else [text]
    lines = [line for part in parts for line in _broken(part, pad, "")]
    links = list(_links(last)) if len(pad + last + tail) > WIDTH else []
    if len(links) > 2:
        *before, last = links
        lines += [line for link in before for line in _broken(link, pad, "")]
    return [*lines, *_broken(last, pad, tail)]


_OPERATORS = (
    (" if ", " else "),
    (" < ", " <= ", " > ", " >= ", " == ", " != "),
    (" + ", " - "),
    (" * ", " / ", " @ ", " // "),
)
"""Those that bind least first."""


def _operands(text: str) -> Iterator[str]:
    """The operands of the operators that bind least, each behind its operator."""
    for signs in _OPERATORS:
        cuts = [i for i, depth, _ in _depths(text) if not depth and text.startswith(signs, i)]
        if cuts:
            for start, stop in itertools.pairwise([0, *cuts, len(text)]):
                yield text[start:stop].strip()
            return
    yield text


def _chain(target: str, value: str, links: list[str], pad: str) -> list[str]:
    """An assignment of a chain of methods: the chain on a line of its own, or a line per link."""
    unbroken = f"{pad}{INDENT}{value}"
    if len(unbroken) <= WIDTH:
        return [f"{pad}{target} = (", unbroken, f"{pad})"]
    lines = [line for link in links for line in _broken(link, pad + INDENT, "")]
    return [f"{pad}{target} = (", *lines, f"{pad})"]


def _links(text: str) -> Iterator[str]:
    """The parts of a chain of methods: its beginning, and each attribute after a bracket."""
    start, previous = 0, ""
    for position, depth, char in _depths(text):
        if depth == 0 and char in " ,":
            return  # an operator, or several values
        if depth == 0 and char == "." and previous in _CLOSING and previous:
            yield text[start:position]
            start = position
        previous = char
    yield text[start:]


def _targets(target: str, value: str, pad: str) -> list[str]:
    """An assignment of one call to several names: the call on a line of its own, or the names."""
    if len(f"{pad}{target} = (") <= WIDTH and len(pad + INDENT + value) <= WIDTH:
        return [f"{pad}{target} = (", f"{pad}{INDENT}{value}", f"{pad})"]
    names = [f"{pad}{INDENT}{name}," for name in _items(target)]
    first, *others = _broken(f"_ = {value}", pad, "")
    return [f"{pad}(", *names, first.replace("_", ")", 1), *others]


def _body(text: str, pad: str, display: bool) -> list[str]:
    """The content of a broken bracket: on a line of its own, or an item per line."""
    if len(pad + text) <= WIDTH and not (display and len(list(_items(text))) > 1):
        return [pad + text]
    return [line for item in _items(text) for line in _split(item, pad, ",")]


def _is_display(text: str, start: int) -> bool:
    """Whether the bracket at `start` opens a tuple, list, set or dict, not an argument list."""
    before = text[:start]
    if not before or not (before[-1].isalnum() or before[-1] in "_)]"):
        return True
    word = before.rpartition(" ")[2]
    return keyword.iskeyword(word)


def _groups(text: str) -> Iterator[tuple[int, int]]:
    """The outermost brackets, from the last to the first: positions of both signs."""
    groups, open_at = [], 0
    for position, depth, char in _depths(text):
        if char in _OPENING and depth == 0:
            open_at = position
        elif char in _CLOSING and depth == 1:
            groups.append((open_at, position))
    return reversed(groups)


def _items(text: str) -> Iterator[str]:
    """The parts between commas outside of brackets."""
    start = 0
    for position, depth, char in _depths(text):
        if char == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    if text[start:].strip():
        yield text[start:].strip()


def _depths(text: str) -> Iterator[tuple[int, int, str]]:
    """Every character with its depth in brackets; those of strings are blank."""
    depth = 0
    for position, char in enumerate(_STRING.sub(lambda match: " " * len(match[0]), text)):
        yield position, depth, char
        depth += (char in _OPENING) - (char in _CLOSING)
