"""The grammar of `.mdsl`, built when it is first needed."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lark import Lark, Token


class _KeepAll:
    """Tells lark which words to lex although no rule has them; passes the words on as they are."""

    always_accept = ("COMMENT", "AT", "BAD", "BAD_NAME", "BAD_NUMBER", "BAD_STRING")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


@functools.cache
def load() -> Lark:
    """The parser of `mdsl.lark`, made once per process (about 40 ms, never cached on disk).

    Its trees carry positions. It keeps no state of its own between parses.
    """
    from lark import Lark

    text = importlib.resources.files(__name__).joinpath("mdsl.lark").read_text("utf-8")
    return Lark(
        text,
        parser="lalr",
        lexer="basic",
        postlex=_KeepAll(),
        propagate_positions=True,
        maybe_placeholders=True,
    )


@functools.cache
def spelling() -> dict[str, str]:
    """How each fixed word is written, by the name of its terminal: `{"ARROW": "->", …}`."""
    from lark.lexer import PatternStr

    return {t.name: t.pattern.value for t in load().terminals if isinstance(t.pattern, PatternStr)}
