"""What the processes of a run tell the one that watches them, as it is read back.

A report may be cut short, where its process was ended while it wrote. What is of another form than
these is no report: ValueError.
"""

from __future__ import annotations

import json
from typing import Any, NotRequired, TypedDict

from meshdsl.disk_cache import checked


class Told(TypedDict):
    """A diagnostic, less its place."""

    code: str
    message: str
    help: str | None


class Report(TypedDict):
    """How a process failed; `exit` is its code, `code` that of the diagnostic of a refused run."""

    rank: int
    exit: int
    kind: str
    message: str
    line: int | None
    loops: dict[str, int]
    position: Any
    in_collective: bool
    code: NotRequired[str]
    collective: NotRequired[str]
    diagnostics: NotRequired[list[Told]]


class Activity(TypedDict):
    """What a process is doing: its `mark` stays while it does the same, its `beat` counts."""

    pid: int
    beat: int
    mark: int
    line: int | None
    collective: str
    outside: str


Timed = list[tuple[int, int, int]]
"""Lines that were timed: the line, the beginning and the end."""


def report_from_json(text: str) -> Report:
    """The report of a failure."""
    report: Any = checked(json.loads(text), Report)
    if report["exit"] == 2 and "code" not in report:
        raise ValueError("a refused run without a code")
    return report  # type: ignore[no-any-return]


def activity_from_json(text: str) -> Activity:
    """The report of an activity."""
    return checked(json.loads(text), Activity)


def timed_from_json(text: str) -> Timed:
    """The lines that a process has timed."""
    return checked(json.loads(text), Timed)


def token_from_json(text: str) -> int:
    """A token that a process has chosen."""
    return checked(json.loads(text), int)
