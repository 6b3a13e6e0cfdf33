"""The lines of a program text while it is being written: statements with notes, and comments.

A line knows what a later decision asks of it: the names that it mentions and binds, whether it is
a statement, whether it opens a block. So nobody reads a line's text to find out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import NamedTuple

from meshdsl.backends.torch.line_breaks import INDENT, WIDTH, statement
from meshdsl.backends.torch.preamble import inert
from meshdsl.device.ir import Node
from meshdsl.records import dataclass


class TextLine(NamedTuple):
    """A line, the source place it comes from, and the statement of the device program.

    names:        what it reads of coordinates, blocks and variables.
    binds:        the variables that it assigns.
    is_statement: whether it is a statement or a part of one, not a comment or blank.
    opens:        whether it is the head of a block.
    """

    text: str
    place: str = ""
    node: Node | None = None
    names: frozenset[str] = frozenset()
    binds: frozenset[str] = frozenset()
    is_statement: bool = False
    opens: bool = False


@dataclass(slots=True)
class TextLines:
    """Lines at `depth` levels of indentation, now of the statement `node` at the `place`.

    `blocks` are the numbers of the blocks around, the innermost last. Names that are mentioned
    belong to the next statement.
    """

    lines: list[TextLine] = field(default_factory=list)
    depth: int = 1
    place: str = ""
    node: Node | None = None
    blocks: list[int] = field(default_factory=lambda: [0])
    _begun: int = 0
    _mentioned: set[str] = field(default_factory=set)

    def mention(self, name: str) -> str:
        """Note that the next statement reads a name; returns it."""
        self._mentioned.add(name)
        return name

    def names(self, start: int) -> set[str]:
        """The names that lines from number `start` on read."""
        return {name for line in self.lines[start:] for name in line.names}

    def binds(self, start: int) -> set[str]:
        """The variables that lines from number `start` on assign."""
        return {name for line in self.lines[start:] for name in line.binds}

    def has_statements(self, start: int) -> bool:
        """Whether a line from number `start` on is a statement."""
        return any(line.is_statement for line in self.lines[start:])

    def take_back(self, start: int) -> None:
        """Remove the lines from number `start` on, which are a statement to be written otherwise.

        What it read belongs to the next statement, and so does its node.
        """
        self.node = self.lines[start].node
        self._mentioned |= self.names(start)
        del self.lines[start:]

    # --- writing ---------------------------------------------------------------------------------

    def add(self, text: str = "") -> None:
        """One line as it is; none for no text."""
        blank = [TextLine("", self.place, self.node)]
        self.lines += self._lines([INDENT * self.depth + text]) if text else blank

    def line(self, text: str) -> TextLine:
        """A statement on one line, of no source place, which is put where it belongs later."""
        (line,) = self._lines([INDENT * self.depth + text])
        return line._replace(place="", node=None)

    def statement(self, text: str) -> None:
        """A statement, broken where it is too long."""
        self.lines += self._lines(statement(text, self.depth))

    def assign(self, names: Sequence[str], text: str, note: str = "") -> None:
        """An assignment, with `note` after it, or above it where there is no room."""
        target = ", ".join(names)
        lines = statement(f"{target} = {text}", self.depth)
        if note and len(lines) == 1 and len(lines[0]) + len(note) + 4 <= WIDTH:
            lines = [f"{lines[0]}  # {note}"]
        elif note:
            self.comment(f"{target}: {note}")
        self.lines += self._lines(lines, names)

    def unpack(self, names: Sequence[str], text: str) -> None:
        """An assignment of a tuple's items, which may be one."""
        target = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
        self.lines += self._lines(statement(f"{target} = {text}", self.depth), names)

    def comment(self, text: str) -> None:
        """A comment of as many lines as it takes."""
        width = WIDTH - 2 - len(INDENT) * self.depth
        for line in textwrap.wrap(inert(text), width, break_long_words=False):
            self.remark(line)

    def remark(self, text: str) -> None:
        """A comment on one line, as it is."""
        self.lines.append(TextLine(f"{INDENT * self.depth}# {text}", self.place, self.node))

    @contextmanager
    def under(self, head: str, optional: bool = False) -> Iterator[int]:
        """Write a block under its head; yields the number of lines before it.

        A block without statements is `pass`; where it is `optional`, it is left out with its head.
        """
        before = len(self.lines)
        self.add(head)
        self.lines[before] = self.lines[before]._replace(opens=True)
        self.depth += 1
        self._begun += 1
        self.blocks.append(self._begun)
        yield before
        if not self.has_statements(before + 1):
            if optional:
                del self.lines[before:]
            else:
                self.add("pass")
        self.blocks.pop()
        self.depth -= 1

    def _lines(self, texts: list[str], binds: Iterable[str] = ()) -> list[TextLine]:
        """The lines of one statement, with the names mentioned since the last one."""
        names, bound = frozenset(self._mentioned), frozenset(binds)
        self._mentioned.clear()
        return [TextLine(t, self.place, self.node, names, bound, True) for t in texts]
