"""Fixes of commands, tried: carried out on the arguments, and the command run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshdsl.cli import common
from meshdsl.cli.app import app
from meshdsl.cli.corrected import arguments, of_command
from meshdsl.cli.options import _command, spread_settings
from meshdsl.diagnostics import Diagnostic, Fix
from meshdsl.syntax.edits import apply

from .command import Cli


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code of a command, and its diagnostics."""

    code: int
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> set[str]:
        """The codes of the errors."""
        return {d.code for d in self.diagnostics if d.severity == "error"}


ENDS = (
    "meshdsl.backends.engines.execution.run",
    "meshdsl.backends.train.training_run.train",
    "meshdsl.backends.train.evaluation.plan_of",
    "meshdsl.backends.generate.generation.generate",
)
"""What a command that is right comes to: the devices start."""


def _started(*given: object, **named: object) -> None:
    raise SystemExit(0)


def heard(cli: Cli, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The outcome of a command; devices are not started."""
    shown: list[Diagnostic] = []
    with monkeypatch.context() as patch:
        patch.setattr(common, "show", lambda diagnostics: shown.extend(diagnostics))
        for function in ENDS:
            patch.setattr(function, _started)
        done = cli(*words)
    return Outcome(done.code, tuple(shown))


def after(words: Sequence[str], fix: Fix, folder: Path) -> list[str] | None:
    """The words of a command after a fix; one of a file is carried out in the file."""
    if of_command(fix) is None:
        name = fix.edits[0].span.source.name
        if not (folder / name).is_file():
            return None  # a line of standard input
        (folder / name).write_text(apply((folder / name).read_text(), fix.edits))
        return list(words)
    edited = arguments(_command(app), spread_settings(list(words))).after(fix)
    assert edited is not None, f"{fix} changes nothing of {words}"
    return list(edited.words)


def check_fix(
    run: Callable[[Sequence[str]], Outcome], words: Sequence[str], first: Outcome, wrong: Diagnostic
) -> None:
    """The message is gone where the fixed command runs, and there is no error of another code."""
    second = run(words)
    assert (wrong.code, wrong.message) not in {(d.code, d.message) for d in second.diagnostics}, (
        words,
        wrong,
    )
    assert second.errors <= first.errors, (words, second)
    assert second.code <= first.code, (words, second)
