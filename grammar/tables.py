"""The tables of the parser as they are cached, and checks of cached ones."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, Struct

from meshdsl.grammar.parser import FREE

State = Annotated[int, Meta(ge=0)]


class Rule(Struct, array_like=True, forbid_unknown_fields=True):
    """A rule: its nonterminal, the name of its tree, and how many parts it reduces.

    `taken` are the children of the tree, in order: 2 * i is the part i, 2 * i + 1 are the children
    of that part, and -1 is None, an optional part that was not written. The only child of a rule
    that `is_transparent` is its tree.
    """

    name: str
    tree: str
    size: State
    taken: list[Annotated[int, Meta(ge=-1)]]
    is_transparent: bool

    def is_sound(self) -> bool:
        """Whether its children are among its parts."""
        return all(number < 2 * self.size for number in self.taken)


class Tables(Struct, forbid_unknown_fields=True):
    """A parser: its tokens, and the LALR tables of its states.

    `keywords` has, by kind such as NAME, the texts that are of another kind, and that kind.
    `actions` has, by state and kind of the next token, the state after a shift, or ~ of the number
    of the rule to reduce by. `gotos` has the state after a reduction, by state and nonterminal.
    """

    pattern: str
    ignored: list[str]
    keywords: dict[str, dict[str, str]]
    spelling: dict[str, str]
    rules: list[Rule]
    actions: list[dict[str, int]]
    gotos: list[dict[str, State]]
    start: State

    def compiled(self) -> re.Pattern[str]:
        """The expression that matches any token.

        Raises ValueError if a name or a number of the tables refers to nothing, and re.error.
        """
        pattern = re.compile(self.pattern)
        states, kinds = len(self.actions), {kind for row in self.actions for kind in row}
        sound = (
            len(self.gotos) == states > self.start,
            all(-len(self.rules) <= n < states for row in self.actions for n in row.values()),
            all(n < states for row in self.gotos for n in row.values()),
            {rule.name for rule in self.rules} == {name for row in self.gotos for name in row},
            all(rule.is_sound() for rule in self.rules),
            pattern.groupindex.keys() - kinds - {*FREE} == {*self.ignored},
            self.keywords.keys() <= pattern.groupindex.keys(),
            all(self._kind(pattern, text) == kind for kind, text in self.spelling.items()),
        )
        if not all(sound) or pattern.match(""):
            raise ValueError("a name or a number is of nothing")
        return pattern

    def _kind(self, pattern: re.Pattern[str], text: str) -> str | None:
        """The kind of a token's text."""
        matched = pattern.fullmatch(text)
        kind = matched and matched.lastgroup
        return self.keywords.get(kind, {}).get(text, kind) if kind else None
