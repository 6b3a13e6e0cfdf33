"""The outcome of a command in the test's own process, and files for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Done:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def codes(self) -> list[str]:
        """The head of every diagnostic, such as `error[MD0301]`, in order."""
        words = (line.split(":")[0] for line in self.err.split("\n"))
        return [word for word in words if word.endswith("]") and "[MD" in word]


Cli = Callable[..., Done]
"""Runs `meshdsl ARGUMENTS…` in an empty folder."""


def write(text: str | bytes, name: str = "f.mdsl") -> str:
    """Write a file of the folder; its name."""
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name
