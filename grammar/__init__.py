"""The grammar of `.mdsl`, built when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Lark, Token

    from meshdsl.grammar.tables import Tables


class _KeepAll:
    """Tells lark which words to lex although no rule has them; passes the words on as they are."""

    always_accept = ("COMMENT", "AT", "BAD", "BAD_NAME", "BAD_NUMBER", "BAD_STRING")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


@functools.cache
def load() -> Lark:
    """The parser of `mdsl.lark`, made once per process; its tables are kept for the next one.

    Its trees carry positions. It keeps no state of its own between parses.
    """
    text = importlib.resources.files(__name__).joinpath("mdsl.lark").read_text("utf-8")
    parser = parser_of(text)
    parser.lexer = parser._build_lexer()  # else each `lex` makes one, and its regular expression
    return parser


def parser_of(text: str) -> Lark:
    """The parser of a grammar: of the tables in the cache, if there are any that are sound."""
    import lark
    from lark.exceptions import LarkError

    from meshdsl.disk_cache import read, write
    from meshdsl.grammar.tables import Tables

    key = hashlib.sha256(f"{FORMAT} {lark.__version__}\n{OPTIONS}\n{text}".encode()).hexdigest()
    kept = read("grammar", key, Tables)
    broken = (LarkError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
    with contextlib.suppress(*broken, re.error):
        if kept is not None:
            return _from_tables(kept)
    parser = lark.Lark(text, postlex=_KeepAll(), **OPTIONS)
    write("grammar", key, _tables(parser))
    return parser


FORMAT = 2
"""The form in which tables are kept."""

OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "lexer": "basic",
    "propagate_positions": True,
    "maybe_placeholders": True,
}


def _tables(parser: Lark) -> dict[str, Any]:
    """What `Lark.save` would pickle, less the options, which are known."""
    from lark.grammar import Rule
    from lark.lexer import TerminalDef

    data, memo = parser.memo_serialize([TerminalDef, Rule])
    return {"parser": data["parser"], "rules": data["rules"], "memo": memo}


def _from_tables(tables: Tables) -> Lark:
    from lark import Lark

    data, memo = tables.data(_KeepAll.always_accept)
    load_from_dict: Callable[..., Lark] = Lark._load_from_dict
    return load_from_dict({**data, "options": OPTIONS}, memo, postlex=_KeepAll())


@functools.cache
def spelling() -> dict[str, str]:
    """How each fixed word is written, by the name of its terminal: `{"ARROW": "->", …}`."""
    from lark.lexer import PatternStr

    fixed = (t for t in load().terminals if isinstance(t.pattern, PatternStr))
    return {**CONTEXTUAL, **{t.name: t.pattern.value for t in fixed}}


CONTEXTUAL = {"SCHEDULE": "schedule", "WEIGHTS": "weights", "USE": "use"}
"""Words that are names but where a declaration begins with them."""
