"""One canonical form of a `.mdsl` text, made from its words, so that every comment survives.

Line breaks of the writer stay, but for braces: a block over several lines has its braces at
the ends of lines, and the rows of a schedule have a line each. Indentation, spaces, blank lines,
needless commas and the columns of comments are canonical.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.records import dataclass
from meshdsl.syntax.parse import parse
from meshdsl.syntax.spacing import Bracket, joined
from meshdsl.syntax.tokens import CLOSERS, DECLARATIONS, OPENERS, lex

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Token

_INDENT = 2


@dataclass(frozen=True, slots=True)
class _WrittenLine:
    """A line to be written: its indentation, its text, and the comment behind the text."""

    indent: int
    text: str
    comment: str = ""


def format_source(source: Source) -> str:
    """The canonical form of a text; formatting that again changes nothing, nor does the tree.

    Raises:
        DiagnosticError: the text has syntax errors.
    """
    _, errors = parse(source)
    if errors:
        raise DiagnosticError(*errors)
    words = _without_commas(_with_breaks(_with_rows(lex(source))))
    lines = _with_blank_lines(_split(words))
    return "".join(f"{line}\n" for line in _written(_indented(lines)))


def _with_rows(words: list[Token]) -> list[Token]:
    """Break the line before each row of a schedule but the first, which follows the brace."""
    out: list[Token] = []
    head = ""
    for index, word in enumerate(words):
        head = word.type if word.type in DECLARATIONS else head
        ends = head == "SCHEDULE" and word.type == "NUMBER" and words[index + 1].type == "COLON"
        if ends and out[-1].type not in ("LBRACE", "_NL"):
            out.append(_line_end(word))
        out.append(word)
    return out


def _with_breaks(words: list[Token]) -> list[Token]:
    """Break the line after `{` and before `}` wherever the two are not on one line."""
    broken = _broken_braces(words)
    out: list[Token] = []
    for index, word in enumerate(words):
        if index in broken and word.type == "RBRACE" and out[-1].type != "_NL":
            out.append(_line_end(word))
        out.append(word)
        if index in broken and word.type == "LBRACE":
            if words[index + 1].type not in ("_NL", "COMMENT"):
                out.append(_line_end(word))
    return out


def _broken_braces(words: list[Token]) -> set[int]:
    """Indices of the braces whose block has a line end in it."""
    broken: set[int] = set()
    opened: list[tuple[int, int]] = []
    line_ends = 0
    for index, word in enumerate(words):
        line_ends += word.type == "_NL"
        if word.type == "LBRACE":
            opened.append((index, line_ends))
        elif word.type == "RBRACE":
            start, before = opened.pop()
            if line_ends > before:
                broken |= {start, index}
    return broken


def _line_end(near: Token) -> Token:
    return near.as_kind("_NL", "\n")


def _without_commas(words: list[Token]) -> list[Token]:
    """Drop commas before a closing bracket, and at line ends outside of ( ) and [ ]."""
    out: list[Token] = []
    opened: list[str] = []
    for index, word in enumerate(words):
        if word.type in OPENERS:
            opened.append(word.type)
        elif word.type in CLOSERS:
            opened.pop()
        free = not opened or opened[-1] == "LBRACE"
        if word.type == "COMMA" and _is_needless(words[index + 1 :], free):
            continue
        out.append(word)
    return out


def _is_needless(rest: Iterable[Token], free: bool) -> bool:
    following = next(iter(rest), None)
    if following is None:
        return True
    return following.type in CLOSERS or (free and following.type in ("_NL", "COMMENT"))


def _split(words: list[Token]) -> list[list[Token]]:
    """The words of every line, without the line ends."""
    lines: list[list[Token]] = [[]]
    for word in words:
        if word.type == "_NL":
            lines.append([])
        else:
            lines[-1].append(word)
    return lines


def _with_blank_lines(lines: list[list[Token]]) -> list[list[Token]]:
    """At most one blank line in a row, and none at the ends of the file or of brackets."""
    out: list[list[Token]] = []
    blank = False
    for line in lines:
        if not line:
            blank = True
            continue
        if blank and out and line[0].type not in CLOSERS and not _opens(out[-1]):
            out.append([])
        out.append(line)
        blank = False
    return out


def _opens(line: list[Token]) -> bool:
    words = [word for word in line if word.type != "COMMENT"]
    return bool(words) and words[-1].type in OPENERS


def _indented(lines: list[list[Token]]) -> list[_WrittenLine]:
    """Every line with its indentation and its words joined."""
    out: list[_WrittenLine] = []
    opened: list[Bracket] = []
    before: Token | None = None
    for words in lines:
        comment = ""
        if words and words[-1].type == "COMMENT":
            *words, last = words
            comment = _tidy(str(last))
        indent = _indentation(words, opened)
        text, opened = joined(words, before, opened, indent)
        before = words[-1] if words else before
        out.append(_WrittenLine(indent, text, comment) if text else _WrittenLine(indent, comment))
    return out


def _indentation(words: list[Token], opened: list[Bracket]) -> int:
    """Two more than the line that opened the innermost bracket; as that line if it closes it."""
    closing = 0
    for word in words:
        if word.type not in CLOSERS:
            break
        closing += 1
    if closing:
        return opened[-closing].indent
    return opened[-1].indent + _INDENT if opened else 0


def _tidy(comment: str) -> str:
    """A comment without trailing space, with a space after `#`."""
    text = comment.rstrip()
    return f"# {text[1:]}" if text[1:2] not in ("", " ", "\t", "#", "!") else text


def _written(lines: list[_WrittenLine]) -> list[str]:
    """The lines as text; comments behind neighbouring lines begin in one column."""
    out: list[str] = []
    run: list[_WrittenLine] = []
    for line in lines:
        if line.comment:
            run.append(line)
            continue
        out += _aligned(run)
        run = []
        out.append(" " * line.indent + line.text if line.text else "")
    return out + _aligned(run)


def _aligned(run: list[_WrittenLine]) -> list[str]:
    width = max((line.indent + len(line.text) for line in run), default=0)
    return [f"{' ' * line.indent}{line.text}".ljust(width) + f"  {line.comment}" for line in run]
