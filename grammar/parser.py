"""The tokens of a text and its parse tree, by the tables of a grammar.

Every command runs this. It does not import lark, which generates the tables (`build.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeAlias

from meshdsl.records import dataclass

if TYPE_CHECKING:
    from meshdsl.grammar.tables import Rule, Tables


class Token(str):
    """A token: its text, its kind, and its offsets, None where it is not in the text."""

    __slots__ = ("end_pos", "start_pos", "type")

    type: str
    start_pos: int | None
    end_pos: int | None

    def __new__(
        cls, type: str, text: str, start_pos: int | None = None, end_pos: int | None = None
    ) -> Token:
        """A token of a kind."""
        token = str.__new__(cls, text)
        token.type, token.start_pos, token.end_pos = type, start_pos, end_pos
        return token

    def as_kind(self, type: str, text: str | None = None) -> Token:
        """The token with another kind, and with another text if one is given."""
        return Token(type, self if text is None else text, self.start_pos, self.end_pos)

    def __repr__(self) -> str:
        return f"Token({self.type!r}, {str(self)!r})"


@dataclass(slots=True, eq=False)
class Tree:
    """The parse tree of a rule: its name and its parts, None for an optional one that is missing.

    Its offsets are those of its first and its last token. The outer offsets include tokens that a
    rule around it drops, such as brackets around an expression. A tree without tokens has none.
    """

    data: str
    children: list[Part]
    start_pos: int | None = None
    end_pos: int | None = None
    outer_start: int | None = None
    outer_end: int | None = None


Part: TypeAlias = Token | Tree | None

END = Token("$END", "")
"""The token after the last one of a text."""

FREE = ("COMMENT", "AT", "BAD", "BAD_NAME", "BAD_NUMBER", "BAD_STRING")
"""Tokens that no rule has, and that are read nevertheless."""


class UnexpectedToken(Exception):
    """The parser accepts no token of this kind in its state."""


@dataclass(slots=True, eq=False)
class Parser:
    """Checked tables, and the expression that matches any token: its group is the kind."""

    tables: Tables
    pattern: re.Pattern[str]

    def tokens(self, text: str) -> Iterator[Token]:
        """The tokens of a text with their offsets. Raises ValueError where nothing matches."""
        match, ignored, keywords = self.pattern.match, {*self.tables.ignored}, self.tables.keywords
        at = 0
        while at < len(text):
            matched = match(text, at)
            if matched is None:
                raise ValueError(f"no token begins at {at}")
            kind, start, at = matched.lastgroup or "", at, matched.end()
            if kind in ignored:
                continue
            token = str.__new__(Token, matched.group())
            if kind in keywords:
                kind = keywords[kind].get(token, kind)
            token.type, token.start_pos, token.end_pos = kind, start, at
            yield token


@dataclass(slots=True, eq=False)
class Parse:
    """One parse: the stack of states, and a part for each state but the first."""

    tables: Tables
    states: list[int]
    parts: list[Part] = field(default_factory=list)

    def feed(self, token: Token) -> None:
        """Reduce, then shift the next token. After `END` the first part is the tree of the text.

        Raises UnexpectedToken; reductions before the token have been done then.
        """
        actions, gotos, rules = self.tables.actions, self.tables.gotos, self.tables.rules
        states, parts, kind = self.states, self.parts, token.type
        while True:
            action = actions[states[-1]].get(kind)
            if action is None:
                raise UnexpectedToken(kind)
            if action >= 0:
                states.append(action)
                parts.append(token)
                return
            rule = rules[~action]
            read: list[Part] = []
            if rule.size:
                read = parts[-rule.size :]
                del parts[-rule.size :], states[-rule.size :]
            parts.append(_made(rule, read))
            states.append(gotos[states[-1]][rule.name])

    def takes(self, kind: str) -> bool:
        """Whether the parser would shift a token of this kind now."""
        states = [*self.states]
        while (action := self.tables.actions[states[-1]].get(kind, 0)) < 0:
            rule = self.tables.rules[~action]
            del states[len(states) - rule.size :]
            states.append(self.tables.gotos[states[-1]][rule.name])
        return kind in self.tables.actions[states[-1]]

    def accepts(self) -> frozenset[str]:
        """The kinds of tokens that the parser would shift now."""
        return frozenset(kind for kind in self.choices() if self.takes(kind))

    def choices(self) -> Mapping[str, int]:
        """The action in the present state by the kind of the next token: a shift or a reduction."""
        return self.tables.actions[self.states[-1]]


def _made(rule: Rule, read: list[Any]) -> Part:
    """The tree of a rule, of the parts that it reduces."""
    children = _children(rule, read)
    if rule.is_transparent and len(children) == 1:
        tree = children[0]
        if not isinstance(tree, Tree):
            return tree
    else:
        tree = Tree(rule.tree, children)
    start = end = None
    for part in read:
        if isinstance(part, Token):
            first, last = part.start_pos, part.end_pos
        else:
            first, last = part.outer_start, part.outer_end
        if first is not None:
            start, end = first if start is None else start, last
    if start is not None:
        if tree.start_pos is None:  # else it was made before, and this rule adds only brackets
            tree.start_pos, tree.end_pos = start, end
        tree.outer_start, tree.outer_end = start, end
    return tree


def _children(rule: Rule, read: list[Any]) -> list[Part]:
    """The parts of the tree of a rule."""
    children: list[Part] = []
    for number in rule.taken:
        if number < 0:
            children.append(None)
        elif number % 2 == 0:
            children.append(read[number // 2])
        else:
            inner = read[number // 2].children
            if children:
                children += inner
            else:
                children = inner  # a list that grows by its last item is not copied for each
    return children
