"""Spaces between the words of a line in the canonical form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.records import dataclass
from meshdsl.syntax.tokens import CLOSERS, OPENERS

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Token

_OPERAND_ENDS = frozenset(
    {"NAME", "SUB_AXIS", "NUMBER", "STRING", "RPAR", "RSQB", "RBRACE", "ELLIPSIS"}
)
_TOUCHES_NEXT = frozenset({"LPAR", "LSQB", "PIN", "DOT", "CARET"})
_TOUCHES_LAST = frozenset({"RPAR", "RSQB", "COMMA", "COLON", "PIN", "DOT", "CARET"})


@dataclass(frozen=True, slots=True)
class Bracket:
    """An open bracket: its kind, the indentation of its line, and whether it lists parameters."""

    kind: str
    indent: int
    header: bool


def joined(
    words: list[Token], before: Token | None, opened: list[Bracket], indent: int
) -> tuple[str, list[Bracket]]:
    """The words of one line as text, and the brackets that are open after it.

    `before` is the word before the line and `opened` are the brackets open there; the line is
    indented by `indent`.
    """
    opened = list(opened)
    last: Token | None = None
    header = False
    text = ""
    for word in words:
        if last is not None and _apart(before, last, word, opened):
            text += " "
        text += word
        header = header or word.type in ("DEF", "PROGRAM")
        _follow(opened, word, indent, header)
        before, last = last or before, word
    return text, opened


def _follow(opened: list[Bracket], word: Token, indent: int, header: bool) -> None:
    if word.type in OPENERS:
        braces = sum(bracket.kind == "LBRACE" for bracket in opened)
        base = 2 * braces if word.type == "LBRACE" else indent
        opened.append(Bracket(word.type, base, header and not _nested(opened)))
    elif word.type in CLOSERS:
        opened.pop()


def _nested(opened: list[Bracket]) -> bool:
    return bool(opened) and opened[-1].kind != "LBRACE"


def _apart(before: Token | None, last: Token, word: Token, opened: list[Bracket]) -> bool:
    """Whether there is a space between two neighbours; `before` is the word before them."""
    inside = opened[-1] if opened else None
    if "EQUAL" in (last.type, word.type):
        return inside is None or inside.kind != "LPAR" or inside.header
    if last.type == "COLON" and inside is not None and inside.kind == "LSQB":
        return word.type == "ARROW"
    if last.type in _TOUCHES_NEXT or word.type in _TOUCHES_LAST:
        return False
    if {last.type, word.type} == {"LBRACE", "RBRACE"}:
        return False
    if last.type == "MINUS":
        return before is not None and before.type in _OPERAND_ENDS
    if word.type in ("LPAR", "LSQB"):
        return last.type not in _OPERAND_ENDS
    return True
