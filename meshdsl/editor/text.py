"""A document as the compiler reads it, and the positions that the protocol counts in it."""

from __future__ import annotations

from difflib import SequenceMatcher

from lsprotocol import types as lsp

from meshdsl.diagnostics import Diagnostic, Source, Span
from meshdsl.records import dataclass
from meshdsl.syntax.parse import source_of

_BOM = "\ufeff"


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """The text of one version of a document.

    `source` has normal line ends and no byte order mark; `shift` is that mark's width in the first
    line of the client. `refusal` is why the text is no program at all: a NUL byte.
    """

    source: Source
    encoding: str
    shift: int = 0
    refusal: Diagnostic | None = None

    @classmethod
    def of(cls, name: str, text: str, encoding: str) -> Text:
        """The text as the client has it; `encoding` is the one that the two have agreed on."""
        bare = text.removeprefix(_BOM)
        source, refusal = source_of(name, bare)
        _ = source.starts  # found once, before other threads read them
        shift = _units(_BOM, encoding) if len(bare) < len(text) else 0
        return cls(source, encoding, shift, refusal)

    def offset(self, position: lsp.Position) -> int:
        """The character at a position; past the end of a line, that end."""
        start, end = self.source.bounds(position.line + 1)
        wanted = position.character - (self.shift if position.line == 0 else 0)
        line = self.source.text[start:end]
        if self.encoding == "utf-32" or line.isascii():
            return start + max(0, min(wanted, len(line)))
        for index, char in enumerate(line):
            if wanted <= 0:
                return start + index
            wanted -= _units(char, self.encoding)
        return end

    def position(self, offset: int) -> lsp.Position:
        """The position of a character."""
        line, column = self.source.position(min(max(offset, 0), len(self.source.text)))
        start = self.source.starts[line - 1]
        units = _units(self.source.text[start : start + column - 1], self.encoding)
        return lsp.Position(line - 1, units + (self.shift if line == 1 else 0))

    def range(self, span: Span) -> lsp.Range:
        """The range of a span of this source."""
        return lsp.Range(self.position(span.start), self.position(span.end))

    def owns(self, span: Span) -> bool:
        """Whether a span lies in this document."""
        return span.source is self.source

    def line_end(self, line: int) -> lsp.Position:
        """The position behind the last character of a line, counted from 1."""
        return self.position(self.source.bounds(line)[1])


def _units(text: str, encoding: str) -> int:
    """The width of a text in the code units of an encoding."""
    if text.isascii() or encoding == "utf-32":
        return len(text)
    if encoding == "utf-8":
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text) + sum(char > "\uffff" for char in text)


MIDDLE = 1000
"""Lines between the first and the last edit that are compared one by one."""


@dataclass(frozen=True, slots=True)
class LineMap:
    """The lines of an older text in a newer one.

    `blocks` are equal lines: their first line in the old text and in the new one, from 0, and
    their number.
    """

    blocks: tuple[tuple[int, int, int], ...]

    @classmethod
    def between(cls, old: Source, new: Source) -> LineMap:
        """The map from `old` to `new`."""
        if old is new:
            return cls(((0, 0, len(new.starts)),))
        before, after = old.text.split("\n"), new.text.split("\n")
        head = _common(before, after)
        tail = _common(before[head:][::-1], after[head:][::-1])
        ends = len(before) - tail, len(after) - tail
        blocks = [(0, 0, head), (*ends, tail)]
        if max(ends) - head <= MIDDLE:
            middle = SequenceMatcher(None, before[head : ends[0]], after[head : ends[1]], False)
            blocks += [(head + a, head + b, size) for a, b, size in middle.get_matching_blocks()]
        return cls(tuple(blocks))

    def now(self, line: int) -> int | None:
        """The line, from 1, that an old line has become; None if it was edited."""
        found = (line - a + b for a, b, size in self.blocks if a < line <= a + size)
        return next(found, None)

    def then(self, line: int) -> int | None:
        """The old line that a line was; None if it was edited."""
        found = (line - b + a for a, b, size in self.blocks if b < line <= b + size)
        return next(found, None)


def _common(one: list[str], other: list[str]) -> int:
    """The number of equal lines at the front."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
