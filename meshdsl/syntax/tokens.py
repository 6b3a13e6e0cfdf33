"""Text to words, and the limits that are checked before anything is parsed."""

from __future__ import annotations

import itertools
import re

from meshdsl.diagnostics import Diagnostic, Related, Source, Span
from meshdsl.grammar import CONTEXTUAL, load
from meshdsl.grammar.parser import Token

OPENERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
"""The closing word of each opening word."""

CLOSERS = frozenset(OPENERS.values())

DECLARATIONS = frozenset(
    {"USE", "DIM", "MESH", "LAYOUT", "SBP", "SCHEDULE", "WEIGHTS", "DEF", "PROGRAM", "EXPECT"}
)  # fmt: skip
"""Words that begin a declaration."""

STATEMENTS = frozenset({"PARAM", "REPEAT", "RECOMPUTE", "RETURN", "MINIMIZE"})
"""Words that begin a statement."""

OPTIONS = frozenset({"ON", "EXTENDS", "AT", "OVER", "BY", "WITH"})
"""Words that begin nothing."""

NAMES_OF_ARGUMENTS = OPTIONS | {"RECOMPUTE"}
"""Words that are names before the `=` of an argument."""

RESERVED = (DECLARATIONS - CONTEXTUAL.keys()) | STATEMENTS | OPTIONS | {"AND", "OR", "NOT"}
"""Words that cannot be names."""

FOREIGN_STARTS = {
    "let": frozenset({"NAME"}),
    "for": frozenset({"NAME"}),
    "if": frozenset({"NAME", "NUMBER", "LPAR", "NOT", "MINUS"}),
    "else": frozenset({"LBRACE", "COLON"}),
}
"""Names that begin a statement of other languages, with the kinds of words that follow there."""

FOREIGN_WORDS = frozenset({"if", "else", "in"})
"""Names that other languages have inside of a statement."""

FOREIGN = frozenset({"IF", "ELSE", "LET", "FOR", "IN", "AUGMENT", "POWER"})
"""Words that are only read to be refused."""

MAX_NESTING = 100
"""Brackets and braces that may be open at once."""


MAX_WORDS = 500_000
"""The most words of a text: more than any program that is small enough to be compiled."""

MAX_NAME = 255
"""Characters that a name may have."""

OPERATORS = frozenset(
    {"PLUS", "MINUS", "STAR", "SLASH", "FLOORED", "MODULO", "CARET", "COMPARE", "AND", "OR"}
)
"""Signs between two operands."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_name(name: str) -> bool:
    """Whether the language allows this name."""
    return _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME and not is_reserved(name)


def is_reserved(name: str) -> bool:
    """Whether this is a word that cannot be a name."""
    return name.islower() and name.upper() in RESERVED


def lex(source: Source) -> list[Token]:
    """Every word of the text with its place; comments and line ends are words too, spaces are not.

    Never fails: unknown words come as `BAD`, `BAD_NAME`, `BAD_NUMBER` or `BAD_STRING`.
    Of a text with more than `MAX_WORDS` words, one more than these.
    """
    words = list(itertools.islice(load().tokens(source.text), MAX_WORDS + 1))
    for index in range(len(words) - 1):
        if words[index] in _CONTEXTUAL and _begins_declaration(words, index):
            word = words[index]
            words[index] = word.as_kind(_CONTEXTUAL[word])
        elif index > 1 and words[index] == "for" and words[index - 2].type == "EXPECT":
            words[index] = words[index].as_kind("FOR")
    return words


_CONTEXTUAL = {word: kind for kind, word in CONTEXTUAL.items()}


def _begins_declaration(words: list[Token], index: int) -> bool:
    """Whether a name begins a line, and another name follows: so no statement or entry does."""
    first = index == 0 or words[index - 1].type == "_NL"
    return first and words[index].type == words[index + 1].type == "NAME"


def significant(tokens: list[Token]) -> list[Token]:
    """The words that the parser sees: no comments, one line end per run, one at the very end.

    No line end comes first. The last one is synthetic, of no width, where the file has none.
    """
    words: list[Token] = []
    ended = True
    for token in tokens:
        if token.type != "COMMENT" and not (ended and token.type == "_NL"):
            words.append(token)
            ended = token.type == "_NL"
    if not ended:
        words.append(words[-1].as_kind("_NL", ""))
    return words


def span_of(source: Source, token: Token) -> Span:
    """The span of a word."""
    assert token.start_pos is not None
    assert token.end_pos is not None
    return Span(source, token.start_pos, token.end_pos)


def beyond_limits(source: Source, tokens: list[Token]) -> Diagnostic | None:
    """A complaint about more than `MAX_WORDS` words, or about the first word that is too much.

    That is a name that is too long, or a bracket that is nested deeper than `MAX_NESTING`.
    """
    if len(tokens) > MAX_WORDS:
        message = f"the text has more than {MAX_WORDS:,} words"
        help = "write what is done many times with `repeat` and `def`; other files hold data"
        return Diagnostic("MD0017", message, span_of(source, tokens[-1]), help=help)
    opened: list[Token] = []
    for token in tokens:
        if len(token) > MAX_NAME and token.type in ("NAME", "SUB_AXIS", "BAD_NAME"):
            message = f"a name of {len(token):,} characters; it may have {MAX_NAME}"
            help = "choose a shorter name"
            return Diagnostic("MD0017", message, span_of(source, token), help=help)
        if token.type in OPENERS:
            opened.append(token)
        elif token.type in CLOSERS and opened:
            opened.pop()
        if len(opened) > MAX_NESTING:
            return Diagnostic(
                "MD0008",
                f"brackets are nested more than {MAX_NESTING} deep",
                span_of(source, token),
                related=(Related(span_of(source, opened[0]), "the outermost is opened here"),),
                help="give parts of the expression names of their own",
            )
    return None
