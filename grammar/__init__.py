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
    _take_over(parser)
    return parser


def _take_over(parser: Lark) -> None:
    """Let the trees of a parser have the positions that are read, and find its rules by identity.

    The rules of its tables are equal to those of which it makes trees, but others: each word would
    compare some, symbol by symbol.
    """
    from lark.parse_tree_builder import PropagatePositions
    from lark.parsers.lalr_analysis import Reduce

    makers: dict[Any, Any] = parser._callbacks
    for rule, make in makers.items():
        if isinstance(make, PropagatePositions):
            makers[rule] = _with_positions(make.node_builder)
    states = parser.parser.parser._parse_table.states.values()
    for rule in {id(r): r for s in states for action, r in s.values() if action is Reduce}.values():
        makers[rule] = makers.pop(rule)


def _with_positions(build: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The maker of a rule's tree, with the positions of its first and last word.

    Lark's gives it eleven, by line and column too. Two are read here; two more say how far the
    words go that a rule leaves out of its tree, as brackets around an expression.
    """
    from lark.lexer import Token
    from lark.tree import Meta, Tree

    new_meta: Callable[[], Any] = Meta

    def positioned(children: list[Any]) -> Any:
        tree = build(children)
        if tree.__class__ is not Tree:
            return tree
        for child in children:
            if child.__class__ is Token:
                start = child.start_pos
                break
            its = child._meta
            if its is not None and not its.empty:
                start = its.container_start_pos
                break
        else:
            return tree  # there is no word in it
        for child in reversed(children):
            if child.__class__ is Token:
                end = child.end_pos
                break
            its = child._meta
            if its is not None and not its.empty:
                end = its.container_end_pos
                break
        meta: Any = tree._meta or new_meta()
        tree._meta = meta
        if meta.empty:  # else it is the tree of a child, which ends where that does
            meta.empty = False
            meta.start_pos, meta.end_pos = start, end
        meta.container_start_pos, meta.container_end_pos = start, end
        return tree

    return positioned


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
