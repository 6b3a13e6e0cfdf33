"""What a command of the test's own process came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


Cli = Callable[..., Done]
"""Runs `meshdsl ARGUMENTS…` in an empty folder."""
