"""Failures of a running device program, and the choice of the one to report.

Devices run in parallel, so which one fails first is chance. The error that is first in program
order is reported, so that it is the same in every engine and at every run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from meshdsl.backends.runtime.array_files import PARSING
from meshdsl.diagnostics import Diagnostic, advice
from meshdsl.option_edits import give
from meshdsl.records import dataclass

HELP = {
    "MD0501": "check the file, its space and its permissions",
    "MD0545": "name a folder with more space in the environment: `TMPDIR=/scratch meshdsl …`",
    "MD0701": "`--engine reference` runs the program itself, without devices",
    "MD0702": "this is a mistake of the compiler, not of the program; please report it",
    "MD0705": "the end of its log stands above",
    "MD0721": "where memory ran out, smaller dims (`--set`) or another mesh take less",
    "MD0801": "check the tensor that the indices come from",
    "MD0802": "divide by `maximum(n, 1)` where the result at 0 is not used",
    "MD0803": "give the most rows that there can be in total, or leave `rows=` out",
}


FIXES = {"MD0705": (give("--engine", "local", safe=False),)}
"""The same run in another way."""


class RunError(Exception):
    """A run that failed.

    `code` is that of a diagnostic. Where they apply: the `device` (its rank), the `place` in
    the source (`mlp.mdsl:15`), the `line` of the emitted text, and the `collective`.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        device: int | None = None,
        place: str | None = None,
        line: int | None = None,
        collective: str | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help
        self.device, self.place, self.line, self.collective = device, place, line, collective

    @property
    def diagnostic(self) -> Diagnostic:
        """The error as a diagnostic for the user."""
        fixes = FIXES.get(self.code, ())
        help = advice(fixes, self.help or HELP.get(self.code))
        return Diagnostic(self.code, self.message, help=help, fixes=fixes)


class CollectiveError(Exception):
    """Devices that do not agree on a collective."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One device's error: its line of the emitted text, and the counters of its loops.

    `position` orders errors of one statement. A `consequence` of another device's end is reported
    only when there is nothing else. `step` counts how often the device had begun anew.
    """

    device: int
    kind: str
    message: str
    line: int | None = None
    loops: Mapping[str, int] | None = None
    position: tuple[int, ...] = ()
    consequence: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class TextLoop:
    """A `for` of the emitted text: its lines and the name of its counter."""

    first: int
    last: int
    counter: str


def loops_of(text: str) -> tuple[TextLoop, ...]:
    """The `for` loops of a text, outer before inner."""
    with PARSING:
        tree = ast.parse(text)
    loops = (
        TextLoop(node.lineno, node.end_lineno or node.lineno, node.target.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
    )
    return tuple(sorted(loops, key=lambda loop: (loop.first, -loop.last)))


def program_order(loops: tuple[TextLoop, ...], failure: Failure) -> tuple[int, ...]:
    """The sort key of a failure in program order: by line, within a loop first by its counter."""
    if failure.line is None:
        return ()
    order: list[int] = []
    for loop in loops:
        if loop.first < failure.line <= loop.last:
            order += [loop.first, (failure.loops or {}).get(loop.counter, 0)]
    return (*order, failure.line)


def first_failure(text: str, failures: list[Failure]) -> Failure:
    """The failure to report: causes before consequences, then in program order."""
    return earliest(loops_of(text), failures)


def earliest(loops: tuple[TextLoop, ...], failures: list[Failure]) -> Failure:
    """The failure to report, given the loops of the text."""

    def key(failure: Failure) -> tuple[Any, ...]:
        order = program_order(loops, failure)
        return failure.consequence, failure.step, order, failure.position, failure.device

    return min(failures, key=key)


def place_of(lines: Mapping[int, str], line: int | None) -> str:
    """The place in the source of a line of the emitted text; or that line, where it has none."""
    return lines.get(line or 0) or f"line {line} of its program"


def position_of(position: Any) -> tuple[int, ...]:
    """The global position that an index error names, by dim; empty for any other error."""
    return tuple(position.values()) if isinstance(position, dict) else ()


def as_error(failure: Failure, lines: Mapping[int, str] | None) -> tuple[str, str, dict[str, Any]]:
    """Code, message and details of a failure: the arguments of a `RunError`."""
    place = (lines or {}).get(failure.line or 0)
    details = {"device": failure.device, "line": failure.line, "place": place}
    if failure.kind == CollectiveError.__name__:
        return "MD0702", failure.message, details
    if failure.kind in ("IndexOutOfRange", "DividedByZero", "TooManyRows"):
        code, _, message = failure.message.partition(" ")
        return code, message, details
    at = f" at {place}" if place else f", line {failure.line} of its program" * bool(failure.line)
    message = f"device {failure.device} failed{at}: {failure.kind}: {failure.message}"
    return "MD0701", message, details
