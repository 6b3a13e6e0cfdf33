"""A wrong command after a fix: edits of options carried out on its arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from meshdsl.diagnostics import Diagnostic, Fix, OptionEdit
from meshdsl.records import dataclass
from meshdsl.syntax.edits import apply

LONGEST = 400
"""Characters of a command that is printed again."""


@dataclass(frozen=True, slots=True)
class CommandWords:
    """The words of a command, and of each option the names it has and whether it takes a value."""

    words: tuple[str, ...]
    options: Mapping[str, tuple[frozenset[str], bool]]

    def after(self, fix: Fix) -> CommandWords | None:
        """The arguments with a fix carried out; None where it does not change these alone."""
        edits = of_command(fix)
        if edits is None:
            return None
        words: list[str] | None = list(self.words)
        for edit in edits:
            words = words and self._edited(words, edit)
        return CommandWords(tuple(words), self.options) if words else None

    def _edited(self, words: list[str], edit: OptionEdit) -> list[str] | None:
        """The words after one edit; None where what it replaces is not among them."""
        if not edit.option:
            return _replaced(words, edit)
        places = [place for place in self._places(words, edit.option) if _is_meant(place, edit)]
        if edit.option == SETTING and edit.value is not None and not places:
            return [*words, SETTING, str(edit.value)]
        new = [] if edit.value is None else [edit.option]
        new += [edit.value] if isinstance(edit.value, str) else []
        if places:
            start, end, _ = places[0]
            return [*words[:start], *new, *words[end:]]
        return [*words, *new] if new and edit.old is None else None

    def _places(self, words: list[str], option: str) -> Iterable[tuple[int, int, str]]:
        """The words of an option where it is given, each as start, end and value."""
        names, takes_value = self.options.get(option, (frozenset({option}), True))
        for start, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name not in names:
                continue
            if equals or not takes_value:
                yield start, start + 1, value
            else:
                end = min(start + 2, len(words))
                yield start, end, "".join(words[start + 1 : end])


def _replaced(words: list[str], edit: OptionEdit) -> list[str] | None:
    """The words with another in place of one; of `--option=3` what is before the sign."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == edit.old or (edit.old is not None and name == edit.old.partition("=")[0]):
            new = [] if edit.value is None else [str(edit.value)]
            if new and word != edit.old:
                new = [f"{edit.value}{equals}{value}"]
            return [*words[:at], *new, *words[at + 1 :]]
    return None


SETTING = "--set"
"""The option that is given once for each dim."""


def _is_meant(place: tuple[int, int, str], edit: OptionEdit) -> bool:
    """Whether an option with its value is the one that an edit replaces."""
    if edit.option == SETTING and isinstance(edit.value, str) and edit.old is None:
        return place[2].partition("=")[0].strip() == edit.value.partition("=")[0]
    return edit.old is None or place[2] == edit.old


def of_command(fix: Fix) -> tuple[OptionEdit, ...] | None:
    """The edits of arguments that a fix is, those of values included; None: it edits a file."""
    sources = {edit.span.source.name: edit.span.source.text for edit in fix.edits}
    if not all(name.startswith("--") for name in sources):
        return None
    values = (
        OptionEdit(
            name, apply(text, (e for e in fix.edits if e.span.source.name == name)), old=text
        )
        for name, text in sources.items()
    )
    return (*fix.options, *values)


# --- the command that runs -------------------------------------------------------------------

_RUNNING: ContextVar[tuple[str, Any, tuple[str, ...]] | None] = ContextVar("_RUNNING", default=None)
"""The name of the program, its parser, and the arguments."""


@contextmanager
def running(name: str, parser: Any, words: Iterable[str]) -> Iterator[None]:
    """While a command runs, `corrected` knows its arguments; `parser` is click's."""
    token = _RUNNING.set((name, parser, tuple(words)))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def corrected(diagnostic: Diagnostic) -> str | None:
    """The command that runs, after the first fix; None where that is a choice, or no edit of it."""
    fix, now = next(iter(diagnostic.fixes), None), _RUNNING.get()
    if fix is None or not fix.safe or now is None:
        return None
    name, parser, words = now
    after = arguments(parser, words).after(fix)
    text = None if after is None else shlex.join([name, *after.words])
    return None if text is None or len(text) > LONGEST else text


def arguments(parser: Any, words: Iterable[str]) -> CommandWords:
    """The words of a command with what its parser says of options."""
    typed = tuple(words)
    commands = getattr(parser, "commands", None)
    if commands is not None:
        parser = commands[typed[0]] if typed and typed[0] in commands else None
    options: dict[str, tuple[frozenset[str], bool]] = {}
    for parameter in parser.params if parser is not None else ():
        names = frozenset(parameter.opts)
        takes_value = not getattr(parameter, "is_flag", False)
        options |= dict.fromkeys(names, (names, takes_value))
    return CommandWords(typed, options)
