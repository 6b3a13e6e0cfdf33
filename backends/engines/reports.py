"""What the processes of a run tell the one that watches them.

A report may be cut short, where its process was ended while it wrote. What is of another form than
these is none.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Told(TypedDict):
    """A diagnostic, less its place."""

    code: str
    message: str
    help: str | None


class Report(TypedDict):
    """How a process failed: `code` is that of a diagnostic where it refused the run.

    `collective` is the one it was in, where it is known.
    """

    rank: int
    kind: str
    message: str
    code: str | None
    line: int | None
    loops: dict[str, int]
    position: Any
    in_collective: bool
    collective: str
    diagnostics: list[Told]


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

TERMINATED = "Terminated"
"""The kind of the failure of a process that torchrun has ended, since another one had failed."""
