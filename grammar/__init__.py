"""The grammar of `.mdsl`, built when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Lark, Token


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
    import lark
    from lark.exceptions import LarkError

    from meshdsl.kept import read, write

    text = importlib.resources.files(__name__).joinpath("mdsl.lark").read_text("utf-8")
    key = hashlib.sha256(f"{lark.__version__}\n{OPTIONS}\n{text}".encode()).hexdigest()
    kept = read("grammar", key)
    broken = (LarkError, ValueError, KeyError, TypeError, AttributeError, AssertionError)
    with contextlib.suppress(*broken):
        if kept is not None:
            return _from_tables(kept)
    parser = lark.Lark(text, postlex=_KeepAll(), **OPTIONS)
    write("grammar", key, _tables(parser))
    return parser


OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "lexer": "basic",
    "propagate_positions": True,
    "maybe_placeholders": True,
}


def _tables(parser: Lark) -> list[Any]:
    """What `Lark.save` would pickle, as JSON can hold it: keys that are numbers become text."""
    from lark.grammar import Rule
    from lark.lexer import TerminalDef

    data, memo = parser.memo_serialize([TerminalDef, Rule])
    data["options"] = {**data["options"], "postlex": None}
    return [data, memo]


def _from_tables(tables: list[Any]) -> Lark:
    from lark import Lark

    data, memo = (_numbered(part) for part in tables)
    load_from_dict: Callable[..., Lark] = Lark._load_from_dict
    return load_from_dict(data, memo, postlex=_KeepAll())


def _numbered(part: Any) -> Any:
    """The same with numbers for keys that are digits."""
    if isinstance(part, list):
        return [_numbered(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {int(k) if k.isdigit() else k: _numbered(v) for k, v in part.items()}


@functools.cache
def spelling() -> dict[str, str]:
    """How each fixed word is written, by the name of its terminal: `{"ARROW": "->", …}`."""
    from lark.lexer import PatternStr

    fixed = (t for t in load().terminals if isinstance(t.pattern, PatternStr))
    return {**CONTEXTUAL, **{t.name: t.pattern.value for t in fixed}}


CONTEXTUAL = {"SCHEDULE": "schedule"}
"""Words that are names but where a declaration begins with them."""
