"""The tables of the parser as the cache keeps them: what they may hold, and what is sound in them.

The classes are those that `lark.Lark.save` would pickle, with their names in the field `__type__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
Width = Annotated[int, Meta(ge=0)]
One = Annotated[list[str], Meta(min_length=1, max_length=1)]


class _Table(Struct, forbid_unknown_fields=True, tag_field="__type__"):
    pass


class Reference(Struct, forbid_unknown_fields=True):
    """The number of a rule or a terminal."""

    number: Number = field(name="@")


Action = Annotated[list[Number | Reference], Meta(min_length=2, max_length=2)]
"""0 and the state that comes next, or 1 and the rule that ends."""


class _PatternStr(_Table, tag="PatternStr"):
    value: str
    flags: list[str]
    raw: str


class _PatternRE(_Table, tag="PatternRE"):
    value: str
    flags: list[str]
    raw: str
    width: Annotated[list[Width], Meta(min_length=2, max_length=2)] = field(name="_width")


class _Terminal(_Table, tag="Terminal"):
    name: str
    filter_out: bool


class _NonTerminal(_Table, tag="NonTerminal"):
    name: str


class TerminalDef(_Table):
    """A word of the language."""

    name: str
    pattern: _PatternStr | _PatternRE
    priority: int


class _RuleOptions(_Table, tag="RuleOptions"):
    keep_all_tokens: bool
    expand1: bool
    priority: int | None
    template_source: str | None
    empty_indices: list[bool]

    def is_of_other(self, rule: Rule) -> bool:
        """Whether these cannot be the options of a rule."""
        return bool(self.empty_indices) and self.empty_indices.count(False) != len(rule.expansion)


class Rule(_Table):
    """A rule of the grammar."""

    origin: _NonTerminal
    expansion: list[_Terminal | _NonTerminal]
    order: Number
    alias: str | None
    options: _RuleOptions


class _LexerConf(_Table, tag="LexerConf"):
    terminals: list[Reference]
    ignore: list[str]
    g_regex_flags: Literal[0]
    use_bytes: Literal[False]
    lexer_type: Literal["basic"]


class _ParserConf(_Table, tag="ParserConf"):
    rules: list[Reference]
    start: One
    parser_type: Literal["lalr"]


class _States(Struct, forbid_unknown_fields=True):
    tokens: dict[Number, str]
    states: dict[Number, dict[Number, Action]]
    start_states: dict[str, Number]
    end_states: dict[str, Number]


class _Frontend(_Table, tag="ParsingFrontend"):
    lexer_conf: _LexerConf
    parser_conf: _ParserConf
    parser: _States


END = "$END"
"""The word that lark puts behind the last one of a text."""

Known = TypeVar("Known", TerminalDef, Rule)


class Tables(Struct, forbid_unknown_fields=True):
    """A parser: its tables, and the rules and terminals that these have numbers of."""

    parser: _Frontend
    rules: list[Reference]
    memo: dict[Number, TerminalDef | Rule]

    def data(self, free: Iterable[str]) -> tuple[dict[str, Any], dict[int, Any]]:
        """What lark makes a parser of, with words that are in no rule: those that are `free`.

        Raises ValueError where a name or a number is of nothing.
        """
        self._check({*free})
        found = msgspec.to_builtins(self)
        return {"parser": found["parser"], "rules": found["rules"]}, found["memo"]

    def _check(self, free: set[str]) -> None:
        lexer, conf, table = self.parser.lexer_conf, self.parser.parser_conf, self.parser.parser
        words = {self._of(r, TerminalDef).name for r in lexer.terminals}
        rules = [self._of(r, Rule) for r in (*self.rules, *self._reduced())]
        tokens = {*table.tokens.values()}
        names = {part.name for rule in rules for part in rule.expansion}
        origins = {rule.origin.name for rule in rules}
        sound = (
            tokens == names | origins | {END},
            len(tokens) == len(table.tokens),
            words - tokens - free == {*lexer.ignore},
            {n for state in table.states.values() for n in state} <= table.tokens.keys(),
            {*table.end_states.values(), *self._shifted()} <= table.states.keys(),
            {*table.start_states.values()} <= table.states.keys(),
            table.start_states.keys() == table.end_states.keys() == {*conf.start},
            {r.number for r in (*lexer.terminals, *self.rules)} == self.memo.keys(),
            self.rules == conf.rules,
            not any(rule.options.is_of_other(rule) for rule in rules),
        )
        if not all(sound):
            raise ValueError("a name or a number is of nothing")

    def _of(self, reference: Reference, kind: type[Known]) -> Known:
        found = self.memo.get(reference.number)
        if not isinstance(found, kind):
            raise ValueError(f"{reference.number} is no {kind.__name__}")
        return found

    def _actions(self) -> Iterable[list[int | Reference]]:
        return (a for state in self.parser.parser.states.values() for a in state.values())

    def _shifted(self) -> Iterator[int]:
        """The states that come next. Raises ValueError where an action is none."""
        for what, which in self._actions():
            if what not in (0, 1) or (what == 1) != isinstance(which, Reference):
                raise ValueError("this is no action")
            if isinstance(which, int):
                yield which

    def _reduced(self) -> Iterator[Reference]:
        return (which for _, which in self._actions() if isinstance(which, Reference))
