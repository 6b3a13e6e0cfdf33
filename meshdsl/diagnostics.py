"""Sources, spans and diagnostics: the messages to a user, their places and the ways out.

A user's mistake is a `Diagnostic` with a stable code. It is collected in a `Diagnostics` bag, so
that one pass can report many; `DiagnosticError` carries one or more of them past code that cannot
go on. Our own mistakes are asserts.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NoReturn, TypeVar, cast

T = TypeVar("T")
S = TypeVar("S")

LONGEST_WORD = 100
"""Characters of a name that is compared with others."""

SHOWN = 1000
"""Characters of a line of the source that are repeated where it is quoted."""

Severity = Literal["error", "warning", "note"]

MAX_ERRORS = 20
"""Errors of one file that are reported before the rest is only counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A text that spans point into: `name` is shown to the user, lines end in a newline."""

    name: str
    text: str
    _starts: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def starts(self) -> list[int]:
        """Offsets of the first character of every line."""
        if not self._starts:
            self._starts.append(0)
            self._starts.extend(newline.end() for newline in re.finditer("\n", self.text))
        return self._starts

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column (both from 1) of a character offset."""
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its line end; empty past the end."""
        start, end = self.bounds(number)
        return self.text[start:end]

    def excerpt(self, number: int) -> str:
        """The text of line `number`, cut to the length that reports and comments show."""
        start, end = self.bounds(number)
        shown = self.text[start : min(end, start + SHOWN)]
        return shown if len(shown) == end - start else f"{shown}…"

    def bounds(self, number: int) -> tuple[int, int]:
        """The offsets of the first character of line `number` (from 1), and of its end."""
        if number > len(self.starts):
            return len(self.text), len(self.text)
        start = self.starts[number - 1]
        end = self.text.find("\n", start)
        return start, len(self.text) if end < 0 else end


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (exclusive) of a source."""

    source: Source
    start: int
    end: int

    @property
    def file(self) -> str:
        """The name of the source."""
        return self.source.name

    @property
    def is_in_option(self) -> bool:
        """Whether it is written in an option of a command, after which its source is named."""
        return self.source.name.startswith("--")

    @property
    def line(self) -> int:
        """Line of the first character, from 1."""
        return self.source.position(self.start)[0]

    @property
    def column(self) -> int:
        """Column of the first character, from 1."""
        return self.source.position(self.start)[1]

    @property
    def text(self) -> str:
        """The characters of the span."""
        return self.source.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.source, self.start, max(self.end, other.end))


@dataclass(frozen=True, slots=True)
class Related:
    """A second place of a diagnostic, such as the declaration of a misused name."""

    span: Span
    message: str


@dataclass(frozen=True, slots=True)
class Edit:
    """The characters of a span replaced by `text`; an empty span inserts it."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class OptionEdit:
    """An option of a command that is given or left out, or another argument that is replaced.

    `value` is that of the option; True of one that takes none, None where it is left out. `old` is
    the value that is replaced, of an option that may be given several times. Without an `option`
    the argument `old` is replaced: a file, a command, an option itself.
    """

    option: str
    value: str | bool | None = None
    old: str | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A way out that a machine can take: edits that do not overlap, of one source or of a command.

    `title` says what they do, as an editor's menu shows it: ``write `hidden` ``. One that is not
    `safe` is a choice among several, or changes what others rely on, such as the name of an input:
    an editor offers it, `check --fix` leaves it. `said` are the words of the help line where they
    are not the title; empty where the help of a fix before it says them too. `options` are edits of
    the command's arguments; a source whose name is that of an option (`--mesh`) is its value.
    """

    title: str
    edits: tuple[Edit, ...] = ()
    safe: bool = True
    said: str | None = None
    options: tuple[OptionEdit, ...] = ()

    @classmethod
    def write(cls, span: Span, text: str, safe: bool = True) -> Fix:
        """The fix that writes `text` in the place of a span."""
        return cls(f"write `{text}`", (Edit(span, text),), safe)

    @classmethod
    def declare(cls, line: str, edit: Edit) -> Fix:
        """The fix that adds a declaration; the user may want another."""
        return cls(f"declare `{line}`", (edit,), safe=False)

    def is_of(self, text: str) -> bool:
        """Whether it edits this text, and not a command or the value of an option."""
        return bool(self.edits) and all(edit.span.source.text == text for edit in self.edits)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One message to the user: a stable code, a sentence, a place, and ways out (`help`).

    Further lines of `message`, where there are any, are a table or the end of a log. `fixes` are
    the ways out that can be carried out as they stand, the best first. `help` is printed from
    them (`advice`); where there are none, it is the sentence that is given.
    A `strict` note is an error, as a warning is, where `--strict` is given.
    """

    code: str
    message: str
    span: Span | None = None
    severity: Severity = "error"
    related: tuple[Related, ...] = ()
    help: str | None = None
    fixes: tuple[Fix, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        if self.help is None and self.fixes:
            object.__setattr__(self, "help", advice(self.fixes))


def advice(fixes: Iterable[Fix], *others: str | None) -> str | None:
    """The help line of fixes, then whatever else may be done or said, or None of nothing.

    Fixes that begin alike are told together: ``write `--engine local` or `--engine torchrun` ``.
    """
    ways: dict[str, list[str]] = {}
    for fix in fixes:
        verb, quote, name = fix.title.partition(" `") if fix.said is None else (fix.said, "", "")
        ways.setdefault(verb, []).append(f"{quote.strip()}{name}")
    said = "; or ".join(f"{verb} {_either(names)}".rstrip() for verb, names in ways.items() if verb)
    return "; ".join(filter(None, (said, *others))).replace("?; ", "? ") or None


def _either(names: list[str]) -> str:
    """`a`, `b` or `c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


class DiagnosticError(Exception):
    """Diagnostics raised past code that cannot go on without an answer.

    After one that `is_last` no more are looked for.
    """

    is_last: ClassVar[bool] = False

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "; ".join(f"{d.code}: {d.message}" for d in self.diagnostics)


class Poisoned(DiagnosticError):
    """Something depends on what was already reported as wrong: there is nothing to add."""

    def __init__(self) -> None:
        super().__init__()


def all_of(steps: Iterable[Callable[[], T]]) -> list[T]:
    """The results of steps of which none needs another; raises the errors of all of them."""
    results: list[T] = []
    errors: list[Diagnostic] = []
    failed = False
    for step in steps:
        try:
            results.append(step())
        except DiagnosticError as error:
            if error.is_last:
                raise
            failed = True
            errors += error.diagnostics
    if failed:
        raise DiagnosticError(*errors) if errors else Poisoned
    return results


def both(first: Callable[[], T], second: Callable[[], S]) -> tuple[T, S]:
    """The results of two steps of which neither needs the other; raises the errors of both."""
    one, other = all_of((first, second))
    return cast("tuple[T, S]", (one, other))


def fail(
    code: str,
    message: str,
    span: Span | None = None,
    *related: Related,
    help: str | None = None,
    fixes: tuple[Fix, ...] = (),
) -> NoReturn:
    """Raise one error diagnostic."""
    diagnostic = Diagnostic(code, message, span, related=related, help=help, fixes=fixes)
    raise DiagnosticError(diagnostic)


class Diagnostics:
    """The bag that one compilation collects its diagnostics in, without repeats, in order."""

    def __init__(self) -> None:
        self._items: list[Diagnostic] = []
        self._known: set[tuple[object, ...]] = set()

    def add(self, *diagnostics: Diagnostic) -> None:
        """Add the diagnostics that are not there yet (the same code, message and place).

        Places are the same in texts that are: the value of an option is read anew for each use.
        """
        for item in diagnostics:
            if (key := _identity(item)) not in self._known:
                self._known.add(key)
                self._items.append(item)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The diagnostics of severity `error`."""
        return tuple(d for d in self._items if d.severity == "error")

    def promote_warnings(self) -> None:
        """Make every warning, and every `strict` note, an error, as `--strict` wants it."""
        self._items = [
            replace(d, severity="error") if d.severity == "warning" or d.strict else d
            for d in self._items
        ]

    def of(self, step: Callable[[], T]) -> T | None:
        """The result of a step; None where it raises, and then its errors are added."""
        try:
            return step()
        except DiagnosticError as error:
            if error.is_last:
                raise
            self.add(*error.diagnostics)
            return None

    def told(self, step: Callable[[], T], how: Callable[[Diagnostic], Diagnostic]) -> T:
        """The result of a step; what it adds and what it raises is told as `how` makes of it."""
        before = len(self._items)
        try:
            return step()
        except DiagnosticError as error:
            if error.is_last or not error.diagnostics:
                raise
            raise DiagnosticError(*map(how, error.diagnostics)) from None
        finally:
            added = self._items[before:]
            del self._items[before:]
            self._known.difference_update(map(_identity, added))
            self.add(*map(how, added))

    def raise_all(self) -> None:
        """Raise all diagnostics as one `DiagnosticError` if there is an error among them."""
        if self.errors:
            raise DiagnosticError(*self)

    def raise_errors(self) -> None:
        """Raise every error collected so far as one `DiagnosticError`, if there is any."""
        if self.errors:
            raise DiagnosticError(*self.errors)


class Immediate(Diagnostics):
    """A bag for what is executed step by step: an error is raised where it is found."""

    def of(self, step: Callable[[], T]) -> T | None:
        """The result of a step; its errors are raised."""
        return step()


def _identity(item: Diagnostic) -> tuple[object, ...]:
    """What two diagnostics that say the same have in common: code, message and place."""
    span = item.span
    place = None if span is None else (span.file, span.source.text, span.start, span.end)
    return (item.code, item.message, place)


def counted(number: int, noun: str) -> str:
    """`1 dim`, `2 dims`, `no dims`."""
    return f"{number or 'no'} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """`dim` of one, `dims` or `micro-batches` of another number."""
    ending = "es" if noun.endswith("ch") else "s"
    return noun if number == 1 else noun + ending


def did_you_mean(name: str, known: list[str]) -> str | None:
    """A `did you mean` sentence for a misspelt `name`, or None when nothing known is close."""
    close = closest(name, known)
    return f"did you mean `{close}`?" if close else None


def spelled_right(span: Span, name: str, known: list[str]) -> tuple[Fix, ...]:
    """The fixes that write the known names closest to a misspelt one; none when nothing is close.

    They are safe where one name alone is the closest, and none where `span` is not that name: a
    place in Python may be that of a whole call.
    """
    if span.text != name:
        return ()
    close = all_closest(name, known)
    meant = f"did you mean {' or '.join(f'`{word}`' for word in close)}?"
    return tuple(
        Fix(f"write `{word}`", (Edit(span, word),), len(close) == 1, "" if index else meant)
        for index, word in enumerate(close)
    )


def closest(name: str, known: list[str]) -> str | None:
    """The known name that a misspelt one is closest to, or None when nothing is close."""
    close = all_closest(name, known)
    return close[0] if close else None


NEARLY = 0.05
"""Two names are equally close to a third whose likenesses (of 1) differ by less than this."""


BEGUN = 3
"""So many letters that begin a known name mean it; fewer say too little."""


def all_closest(name: str, known: list[str]) -> list[str]:
    """The known names that are, equally, closest to a misspelt one.

    A name longer than `LONGEST_WORD` is no slip of the pen: comparing takes the product of the
    lengths.
    """
    from difflib import SequenceMatcher, get_close_matches

    words = list(dict.fromkeys(word for word in known if len(word) <= LONGEST_WORD))
    if len(name) > LONGEST_WORD:
        return []
    begun = [word for word in words if len(name) >= BEGUN and word.startswith(name)]
    close = begun or get_close_matches(name, words, n=3, cutoff=0.6)
    likeness = {word: SequenceMatcher(None, word, name).ratio() for word in close}
    most = max(likeness.values(), default=0.0)
    nearest = sorted(close, key=likeness.__getitem__, reverse=True)
    return [word for word in nearest if likeness[word] > most - NEARLY]
