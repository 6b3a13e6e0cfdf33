"""The lines of a program text while it is being written: statements with notes, and comments."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import NamedTuple

from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, statement
from meshdsl.backends.torch.preamble import inert
from meshdsl.device.ir import Node


class TextLine(NamedTuple):
    """A line, the source place it comes from, and the statement of the device program."""

    text: str
    place: str = ""
    node: Node | None = None


@dataclass(slots=True)
class TextLines:
    """Lines at `depth` levels of indentation, now of the statement `node` at the `place`."""

    lines: list[TextLine] = field(default_factory=list)
    depth: int = 1
    place: str = ""
    node: Node | None = None

    def add(self, text: str = "") -> None:
        """One line as it is."""
        self.lines.append(self._line(INDENT * self.depth + text if text else ""))

    def only_comments(self, start: int) -> bool:
        """Whether no line from number `start` on is a statement."""
        texts = (line.text for line in self.lines[start:])
        return all(not text or text.lstrip().startswith("#") for text in texts)

    def statement(self, text: str, note: str = "") -> None:
        """A statement, with `note` behind it; above it where there is no room."""
        lines = statement(text, self.depth)
        if note and len(lines) == 1 and len(lines[0]) + len(note) + 4 <= WIDTH:
            lines = [f"{lines[0]}  # {note}"]
        elif note:
            self.comment(f"{text.partition(' = ')[0]}: {note}")
        self.lines += map(self._line, lines)

    def comment(self, text: str) -> None:
        """A comment of as many lines as it takes."""
        for line in textwrap.wrap(
            inert(text), WIDTH - 2 - len(INDENT) * self.depth, break_long_words=False
        ):
            self.add(f"# {line}")

    def _line(self, text: str) -> TextLine:
        return TextLine(text, self.place, self.node)
