"""The words of a text and its parse tree, from the tables of a grammar.

This is what every command runs; the library that makes the tables (`build.py`) is not imported for
it.
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
    """A word of a text: its kind, and its offsets where it has a place."""

    __slots__ = ("end_pos", "start_pos", "type")

    type: str
    start_pos: int | None
    end_pos: int | None

    def __new__(
        cls, type: str, text: str, start_pos: int | None = None, end_pos: int | None = None
    ) -> Token:
        """A word of one kind."""
        token = str.__new__(cls, text)
        token.type, token.start_pos, token.end_pos = type, start_pos, end_pos
        return token

    def as_kind(self, type: str, text: str | None = None) -> Token:
        """The word, or another text in its place, as one of another kind."""
        return Token(type, self if text is None else text, self.start_pos, self.end_pos)

    def __repr__(self) -> str:
        return f"Token({self.type!r}, {str(self)!r})"


@dataclass(slots=True, eq=False)
class Tree:
    """What a rule has read: its name and its parts, None where an optional one was not written.

    It lies between the first and the last word that it was made of. The outer offsets are those of
    what a rule around it leaves out, too, as brackets around an expression. A tree without words
    has no offsets.
    """

    data: str
    children: list[Part]
    start_pos: int | None = None
    end_pos: int | None = None
    outer_start: int | None = None
    outer_end: int | None = None


Part: TypeAlias = Token | Tree | None

LAST = Token("$END", "")
"""The word behind the last one of any text."""

FREE = ("COMMENT", "AT", "BAD", "BAD_NAME", "BAD_NUMBER", "BAD_STRING")
"""Words that no rule has, and that are read all the same."""


class UnexpectedWord(Exception):
    """The parser takes no word of this kind now."""


@dataclass(slots=True, eq=False)
class Parser:
    """Tables that are sound, and the expression that matches any word: its group is the kind."""

    tables: Tables
    pattern: re.Pattern[str]

    def words(self, text: str) -> Iterator[Token]:
        """The words of a text with their places. Raises ValueError where nothing matches."""
        match, ignored, kept = self.pattern.match, {*self.tables.ignored}, self.tables.words
        at = 0
        while at < len(text):
            matched = match(text, at)
            if matched is None:
                raise ValueError(f"no word begins at {at}")
            kind, start, at = matched.lastgroup or "", at, matched.end()
            if kind in ignored:
                continue
            token = str.__new__(Token, matched.group())
            if kind in kept:
                kind = kept[kind].get(token, kind)
            token.type, token.start_pos, token.end_pos = kind, start, at
            yield token


@dataclass(slots=True, eq=False)
class Parse:
    """One parse: the states on the stack, the first below all parts, and a part for each other."""

    tables: Tables
    states: list[int]
    parts: list[Part] = field(default_factory=list)

    def feed(self, token: Token) -> None:
        """Take the next word; after `LAST` the first part is the tree of the text.

        Raises UnexpectedWord; the rules that end before the word have been made trees then.
        """
        actions, gotos, rules = self.tables.actions, self.tables.gotos, self.tables.rules
        states, parts, kind = self.states, self.parts, token.type
        while True:
            action = actions[states[-1]].get(kind)
            if action is None:
                raise UnexpectedWord(kind)
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
        """Whether the parser would take a word of this kind now."""
        states = [*self.states]
        while (action := self.tables.actions[states[-1]].get(kind, 0)) < 0:
            rule = self.tables.rules[~action]
            del states[len(states) - rule.size :]
            states.append(self.tables.gotos[states[-1]][rule.name])
        return kind in self.tables.actions[states[-1]]

    def accepts(self) -> frozenset[str]:
        """The kinds of words that the parser would take now."""
        return frozenset(kind for kind in self.choices() if self.takes(kind))

    def choices(self) -> Mapping[str, int]:
        """What the parser does now, by the kind of the word; it may be that a rule ends."""
        return self.tables.actions[self.states[-1]]


def _made(rule: Rule, read: list[Any]) -> Part:
    """What a rule makes of the parts that it has read."""
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
