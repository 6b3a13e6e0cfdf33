"""What is known about one diagnostic code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One stable diagnostic code, for `meshdsl explain MD0301`.

    `meaning` says in a few sentences when the compiler reports it, `wrong` is a small example that
    it is reported for (empty where a text cannot show it), `way_out` says what to do about it.
    """

    code: str
    title: str
    meaning: str
    wrong: str
    way_out: str

    @property
    def explanation(self) -> str:
        """All of it as text of some lines."""
        parts = [f"{self.code}: {self.title}", self.meaning]
        if self.wrong:
            parts.append("\n".join(f"    {line}" for line in self.wrong.strip("\n").split("\n")))
        return "\n\n".join([*parts, self.way_out]) + "\n"
