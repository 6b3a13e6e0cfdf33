"""A Pygments lexer for `.mdsl`, and highlighting with it.

The words are those of the language's own lexer, so that nothing is written twice: the coloured text
is what is read. The type of a name follows from its context: dims in `[ ]`, axes behind `@` and
`->`, operators before `(` and `[`. Broken text is highlighted as far as it can be read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any

from pygments.lexer import Lexer
from pygments.token import (
    Comment,
    Error,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Whitespace,
)

from meshdsl.records import dataclass

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Token as Word

DIM = Name.Constant
AXIS = Name.Label
FUNCTION = Name.Function
OPERATOR = Name.Builtin
SELECTOR = Name.Builtin.Pseudo
DTYPE = Keyword.Type
"""The kinds of names, as token types of Pygments."""

_PLAIN = {
    "NUMBER": Number,
    "STRING": String,
    "COMMENT": Comment.Single,
    "PIN": Name.Decorator,
    "SUB_AXIS": AXIS,
    "ELLIPSIS": DIM,
    "ARROW": Operator,
    "COMPARE": Operator,
    "PLUS": Operator,
    "MINUS": Operator,
    "STAR": Operator,
    "SLASH": Operator,
    "FLOORED": Operator,
    "MODULO": Operator,
    "CARET": Operator,
    "EQUAL": Operator,
    "UPDATE": Operator,
    "FOR": Keyword,
    "_NL": Whitespace,
}
"""The types of words that do not depend on context."""

_WORDS_IN_EXPRESSIONS = ("AND", "OR", "NOT")

# --- words -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words with a meaning: from the grammar, and from the tables of callables.

    `declarations`, `statements`, `links` (`on`, `extends`, …) and `logic` are reserved. `operators`
    are called with `( )` or `[ ]`; `settings` are initialisers, optimizers and schedules.
    """

    declarations: frozenset[str]
    statements: frozenset[str]
    links: frozenset[str]
    logic: frozenset[str]
    operators: frozenset[str]
    settings: frozenset[str]
    dtypes: frozenset[str]
    selectors: frozenset[str]


@functools.cache
def vocabulary() -> Vocabulary:
    """The words of the language as it is now."""
    from meshdsl.grammar import spelling
    from meshdsl.ir.types import DTYPES
    from meshdsl.named.declarations import RESERVED_TENSORS
    from meshdsl.named.from_syntax import INITS
    from meshdsl.named.optimizers import CALLS, OPTIMIZERS
    from meshdsl.named.prelude import prelude
    from meshdsl.ops.opdef import load_all
    from meshdsl.syntax.tokens import DECLARATIONS, RESERVED, STATEMENTS

    written = spelling()
    called = {name for name, opdef in load_all().items() if opdef.surface.items != "view"}
    links = RESERVED - DECLARATIONS - STATEMENTS - {*_WORDS_IN_EXPRESSIONS}
    return Vocabulary(
        declarations=frozenset(written[name] for name in DECLARATIONS),
        statements=frozenset(written[name] for name in STATEMENTS),
        links=frozenset(written[name] for name in links),
        logic=frozenset(written[name] for name in _WORDS_IN_EXPRESSIONS),
        operators=frozenset({*called, *prelude().functions, "grad"}),
        settings=frozenset({*INITS, *OPTIMIZERS, *CALLS}),
        dtypes=frozenset(DTYPES),
        selectors=frozenset(RESERVED_TENSORS),
    )


# --- types of names --------------------------------------------------------------------------


@dataclass(slots=True)
class _Bracket:
    """An open bracket. `right`: behind `=` or `->` since the last comma or line end."""

    kind: str
    of_dims: bool = False
    right: str = ""


@dataclass(slots=True)
class _Place:
    """The context of the next word of a text.

    `head` is the first word of the declaration, `functions` the names of all `def`s.
    """

    functions: frozenset[str] = frozenset()
    opened: list[_Bracket] = field(default_factory=list)
    head: str = ""
    last: str = ""
    pinned: bool = False

    @property
    def inside(self) -> _Bracket:
        """The innermost open bracket; one of no kind at the outside."""
        return self.opened[-1] if self.opened else _Bracket("")

    def follow(self, word: Word) -> None:
        """Advance behind `word`."""
        kind = word.type
        if kind in ("LPAR", "LSQB", "LBRACE"):
            around = self.inside
            of_dims = kind == "LSQB" or (kind == "LPAR" and around.of_dims and around.right != "=")
            self.opened.append(_Bracket(kind, of_dims, "" if kind == "LSQB" else around.right))
        elif kind in ("RPAR", "RSQB", "RBRACE"):
            del self.opened[-1:]
        self._side(kind)
        if self.last in ("PIN", "OVER"):
            self.pinned = kind == "LPAR"
        elif kind == "RPAR":
            self.pinned = False
        if kind in _HEADS and not self.opened:
            self.head = kind
        elif kind == "_NL" and not self.opened:
            self.head = ""
        if kind != "COMMENT":
            self.last = kind

    def _side(self, kind: str) -> None:
        if not self.opened:
            return
        if kind in ("COMMA", "_NL") and self.inside.kind != "LPAR":
            self.inside.right = ""
        elif kind == "EQUAL":
            self.inside.right = "="
        elif kind == "ARROW":
            self.inside.right = "->"


_HEADS = frozenset(
    {"USE", "DIM", "MESH", "LAYOUT", "SBP", "SCHEDULE", "WEIGHTS", "DEF", "PROGRAM", "EXPECT"}
)


def _type_of_name(text: str, following: str, place: _Place) -> Any:
    """The type of a name, from its context and the kind of word that follows."""
    if place.last in ("PIN", "OVER") or place.pinned:
        return Keyword.Constant if text == "none" else AXIS
    if place.last in _HEADS and place.last != "DIM":
        return FUNCTION if place.last in ("DEF", "PROGRAM") else Name.Class
    if place.last in ("EXTENDS", "ON", "WITH") and place.head in ("LAYOUT", "EXPECT"):
        return Name.Class
    if place.inside.of_dims and place.inside.right != "=":
        return DIM
    if place.head in _DECLARED and place.inside.kind in ("LBRACE", "LPAR", ""):
        return _DECLARED[place.head](text, following, place)
    return _type_in_expression(text, following, place)


def _type_in_expression(text: str, following: str, place: _Place) -> Any:
    words = vocabulary()
    if following in ("LPAR", "LSQB") and place.last not in ("PARAM", "DOT"):
        if text in place.functions:
            return FUNCTION
        if text in words.operators or text in words.settings:
            return OPERATOR
        return FUNCTION if following == "LPAR" else Name
    if text in words.dtypes and place.last in ("COLON", "COMMA", "EQUAL", "LPAR"):
        return DTYPE
    return DIM if place.last == "REPEAT" else Name


def _type_in_dim(text: str, following: str, place: _Place) -> Any:
    del text, following, place
    return DIM


def _type_in_mesh(text: str, following: str, place: _Place) -> Any:
    del text
    if place.last == "ON":
        return Name.Class
    return AXIS if following == "COLON" else DIM


def _type_in_layout(text: str, following: str, place: _Place) -> Any:
    if place.opened[:1] and place.opened[0].kind == "LPAR":
        return _type_of_option(text, following, place)
    if following in ("COLON", "DOT") or place.last == "DOT":
        return SELECTOR if text in vocabulary().selectors else Name
    if place.inside.right != "->":
        return DIM
    if place.last in ("NAME", "SUB_AXIS", "RPAR"):
        return Keyword
    return Keyword.Constant if text == "none" else AXIS


def _type_of_option(text: str, following: str, place: _Place) -> Any:
    """In the parentheses of a pipeline schedule: `(n, chunks=2, recompute=stage)`."""
    del text
    if following == "EQUAL":
        return Name
    return Keyword.Constant if place.inside.right == "=" else DIM


def _type_in_schedule(text: str, following: str, place: _Place) -> Any:
    if place.inside.kind == "LPAR":
        return _type_of_option(text, following, place)
    return OPERATOR


def _type_in_sbp(text: str, following: str, place: _Place) -> Any:
    if following in ("COLON", "DOT", "AT") or place.last in ("DOT", "AT"):
        return Name
    return Keyword.Constant if text in ("S", "B", "P", "max", "min", "sum", "prod") else Name


def _type_in_weights(text: str, following: str, place: _Place) -> Any:
    if following == "STRING":
        return Keyword
    is_init = text == "init" and following not in ("COLON", "DOT") and place.last != "DOT"
    return Keyword.Constant if is_init else Name


def _type_in_expect(text: str, following: str, place: _Place) -> Any:
    del text, following
    return Name if place.opened else Name.Class


_DECLARED = {
    "DIM": _type_in_dim,
    "MESH": _type_in_mesh,
    "LAYOUT": _type_in_layout,
    "SBP": _type_in_sbp,
    "SCHEDULE": _type_in_schedule,
    "WEIGHTS": _type_in_weights,
    "EXPECT": _type_in_expect,
}
"""The types of names inside declarations without statements."""

# --- the lexer -------------------------------------------------------------------------------


class MdslLexer(Lexer):  # type: ignore[misc]
    """The lexer, registered with Pygments under the names `mdsl` and `meshdsl`."""

    name = "mdsl"
    aliases = ("mdsl", "meshdsl")
    filenames = ("*.mdsl",)
    mimetypes = ("text/x-mdsl",)

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        """Every character of `text` once: (offset, type, characters)."""
        from meshdsl.diagnostics import Source
        from meshdsl.syntax.tokens import lex

        words = lex(Source("", text))
        at = 0
        for word, type_ in _typed(words):
            start, end = word.start_pos or 0, word.end_pos or 0
            if start > at:
                yield at, Whitespace, text[at:start]
            yield start, type_, text[start:end]
            at = end
        if at < len(text):
            yield at, Whitespace, text[at:]


def _typed(words: list[Word]) -> Iterator[tuple[Word, Any]]:
    """The words with their types."""
    from meshdsl.syntax.tokens import NAMES_OF_ARGUMENTS

    seen = [w for w in words if w.type != "COMMENT"]
    following = {id(a): b.type for a, b in itertools.pairwise(seen)}
    place = _Place(frozenset(str(b) for a, b in itertools.pairwise(seen) if a.type == "DEF"))
    for word in words:
        after = following.get(id(word), "")
        if word.type == "NAME" or (word.type in NAMES_OF_ARGUMENTS and after == "EQUAL"):
            yield word, _type_of_name(str(word), after, place)
        else:
            yield word, _type_of_word(word)
        place.follow(word)


def _type_of_word(word: Word) -> Any:
    from meshdsl.syntax.tokens import DECLARATIONS, RESERVED

    if word.type.startswith("BAD"):
        return Error
    if word.type in DECLARATIONS:
        return Keyword.Declaration
    if word.type in _WORDS_IN_EXPRESSIONS:
        return Operator.Word
    if word.type in RESERVED or word.type == "MESH_TF":
        return Keyword
    if word.type == "NUMBER":
        return Number.Integer if str(word).replace("_", "").isdecimal() else Number.Float
    return _PLAIN.get(word.type, Punctuation)


# --- highlighting ----------------------------------------------------------------------------


def highlight_html(text: str) -> str:
    """`text` as a `<pre class="mdsl">` of coloured spans; everything of the text is escaped.

    The colours are those of `highlight_css`; without it the text is plain.
    """
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    inside = highlight(text, _lexer(), HtmlFormatter(nowrap=True, classprefix="mdsl-"))
    return f'<pre class="mdsl">{inside}</pre>'


def highlight_css() -> str:
    """The style sheet of `highlight_html`, for a light page and, by media query, a dark one.

    In Jupyter the page's own theme decides.
    """
    from pygments.formatters import HtmlFormatter

    def rules(style: str, selector: str) -> str:
        definitions = HtmlFormatter(style=style, classprefix="mdsl-").get_style_defs(selector)
        wanted = [line for line in str(definitions).splitlines() if f"{selector} .mdsl-" in line]
        return "\n".join(wanted)

    dark = "@media (prefers-color-scheme: dark) {\n" + rules(_DARK, "pre.mdsl") + "\n}"
    jupyter = rules(_LIGHT, '[data-jp-theme-light="true"] pre.mdsl')
    dark_jupyter = rules(_DARK, '[data-jp-theme-light="false"] pre.mdsl')
    return "\n".join([rules(_LIGHT, "pre.mdsl"), dark, jupyter, dark_jupyter])


def highlight_ansi(text: str, *, dark: bool = True) -> str:
    """`text` with the escape sequences of a terminal of 256 colours."""
    from pygments import highlight
    from pygments.formatters import Terminal256Formatter

    style = _DARK if dark else _LIGHT
    return str(highlight(text, _lexer(), Terminal256Formatter(style=style)))


_LIGHT, _DARK = "default", "github-dark"
"""Styles of Pygments."""


def _lexer() -> MdslLexer:
    return MdslLexer(stripnl=False, ensurenl=False)
