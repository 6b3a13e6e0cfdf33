"""What names mean, statement by statement, in one function body that is being written."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.declarations import RESERVED_TENSORS
from meshdsl.named.ir import Value
from meshdsl.named.written_expressions import Written
from meshdsl.named.written_uses import Lives, scope_of
from meshdsl.syntax.tokens import RESERVED

UNSPEAKABLE = {word.lower() for word in RESERVED} | {*RESERVED_TENSORS, *DTYPES}
"""Words that can name no tensor, or had better not."""


@dataclass(slots=True)
class Names:
    """The variables of one function body.

    `meaning` is what each name stands for now, `text` how each value is written, `labels` the names
    that values of this body have. `around` are the names from outside of the innermost loop, which
    it would carry if it assigned them; `calls` counts the calls of each function.
    """

    path: tuple[str, ...]
    lives: Lives
    labels: frozenset[str]
    meaning: dict[str, Value] = field(default_factory=dict)
    text: dict[Value, Written] = field(default_factory=dict)
    around: frozenset[str] = frozenset()
    loops: tuple[Dim, ...] = ()
    calls: Counter[str] = field(default_factory=Counter)
    used: set[str] = field(default_factory=set)

    def has(self, value: Value) -> bool:
        """Whether `value` has its name in this body: not in a call inside, nor outside of it."""
        return value.name is not None and scope_of(value) == self.path

    def bind(self, value: Value, wanted: str, at: int) -> str:
        """Let `wanted`, or a name like it if it is taken, mean `value` from position `at` on."""
        name = wanted if self._is_free(wanted, value, at) else self.fresh(wanted)
        self.put(value, name)
        return name

    def put(self, value: Value, name: str) -> None:
        """Let `name` mean `value`."""
        self.meaning[name] = value
        self.text[value] = Written(name)
        self.used.add(name)

    def fresh(self, wanted: str) -> str:
        """A name like `wanted` that nothing in this body has."""
        stem = wanted if is_speakable(wanted) else "x"
        names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
        return next(n for n in names if n not in self.used | self.labels)

    def enter(self, loop: Dim, carried: Iterable[str]) -> Names:
        """The names inside a loop. Those that it carries keep their meaning until they are put."""
        around = frozenset(self.meaning).difference(carried)
        return Names(
            self.path,
            self.lives,
            self.labels,
            dict(self.meaning),
            self.text,
            around,
            (*self.loops, loop),
            self.calls,
            self.used,
        )

    def _is_free(self, name: str, value: Value, at: int) -> bool:
        old = self.meaning.get(name)
        if old is None:
            return is_speakable(name)
        if self.lives.last.get(old, 0) > at:
            return False
        return name not in self.around or self._may_be_carried(old, value)

    def _may_be_carried(self, old: Value, value: Value) -> bool:
        """Whether a loop may carry `old` on as `value`, though nobody reads it."""
        same = set(old.type.dims) == set(value.type.dims) and old.type.dtype == value.type.dtype
        return same and not set(self.loops) & set(old.type.dims)


def is_speakable(name: str) -> bool:
    """Whether a tensor may have this name."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and name not in UNSPEAKABLE
