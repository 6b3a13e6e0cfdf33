"""Documents on a terminal: lines of styled parts, printed to a console.

Text from a file is never read as markup, nor does it reach the terminal as a control character.
Columns that are too many for the width are shown one below the other.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from meshdsl.carets import cut, safe
from meshdsl.report.document import (
    NO_BREAK,
    UNIT,
    Beside,
    Document,
    Gap,
    Grid,
    Item,
    Listing,
    Note,
    Paragraph,
    Picture,
    Piece,
    Section,
    SourceLine,
    Style,
    Table,
    TableCell,
    TableRow,
    Text,
    plain,
)
from meshdsl.report.palette import ON_A_TERMINAL

if TYPE_CHECKING:
    from rich.console import Console

Line = tuple[tuple[str, str], ...]
"""One line of the screen: parts of text, each with its style."""

LEAST_WIDTH = 60
LEAST_WRAPPED = 24
LEAST_CELL = 20
GAP = 2
ENDLESS = 1_000_000
"""A width at which no line is wrapped."""

STYLES: dict[Style, str] = {
    "number": "blue",
    "strong": "bold",
    "name": "cyan",
    "muted": "dim",
    "sent": "bold yellow",
    "amount": "bold yellow",
    "arrow": "bold yellow",
    "differs": "bold yellow",
    "title": "italic",
    **ON_A_TERMINAL,
}
STYLE_OF: dict[str, Style] = {look: style for style, look in STYLES.items()}
"""A style by its name in rich; those that look alike are one."""

IN_ASCII = str.maketrans({"→": "->", "×": "x", "…": "...", "–": "-", "≠": "!"})


def print_document(document: Document, console: Console | None = None) -> None:
    """Print a document on a console, by default on the standard output."""
    from rich.console import Console
    from rich.text import Text as RichText

    console = console or Console(highlight=False)
    ascii_only = console.options.ascii_only
    for line in lines(document, console.width):
        parts = [(_in_ascii(text) if ascii_only else text, style) for text, style in line]
        console.print(RichText.assemble(*parts), soft_wrap=True, highlight=False)


def _in_ascii(text: str) -> str:
    return text.translate(IN_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def text(document: Document, width: int = ENDLESS) -> str:
    """The text of a document without styles, with no spaces at ends of lines."""
    return "\n".join("".join(t for t, _ in line).rstrip() for line in lines(document, width))


def lines(document: Document, width: int) -> Iterator[Line]:
    """The lines of a document, at most `width` columns wide where words allow it."""
    for block in document:
        for line in _block(block, width):
            parts = ((safe(p.text), STYLES.get(p.style, "")) for p in line)
            alike = itertools.groupby(parts, key=lambda part: part[1])
            yield tuple(("".join(text for text, _ in run), style) for style, run in alike)


def _block(block: object, width: int) -> Iterator[Text]:
    room = max(width, LEAST_WIDTH)
    match block:
        case Paragraph():
            yield from _paragraph(block, room)
        case Item():
            yield from _item(block, room)
        case Note():
            yield from _note(block, room)
        case Table():
            yield from _Columns(block, room).lines()
        case Grid():
            yield from _grid(block, width)
        case Listing():
            yield from block.lines
        case Picture() if not block.extra:
            yield from ((Piece(line),) for line in block.described.split("\n"))
        case Beside():
            yield from (line for p in block.pictures for line in _block(p, width))
        case Gap():
            yield ()


def _paragraph(block: Paragraph, width: int) -> Iterator[Text]:
    pad = (Piece(" " * block.indent),) if block.indent else ()
    yield from ((*pad, *line) for line in wrapped(block.text, width - block.indent, block.hang))


def _item(item: Item, width: int) -> Iterator[Text]:
    """The head, the body beside it, and an aside behind that or below it."""
    head = (Piece(" " * item.indent + item.head[0].text, item.head[0].style), *item.head[1:])
    used = len(plain(head))
    if width - used < LEAST_WRAPPED:  # the body stands below a head that leaves it no room
        yield _trimmed(head)
        used = item.indent + 4
        head = (Piece(" " * used),)
    pad = (Piece(" " * used),)
    first, *others = wrapped(item.body, width - used)
    laid_out = [(*head, *first), *((*pad, *line) for line in others)]
    room = width - used - len(plain((others or [first])[-1])) - 3
    fitting = next((a for a in item.asides if len(a) <= room), None)
    if fitting is not None:
        laid_out[-1] = (*laid_out[-1], Piece(f"   {fitting}", "muted"))
    yield from laid_out
    if item.asides and fitting is None:
        below = wrapped((Piece(item.asides[0], "muted"),), width - used)
        yield from ((*pad, *line) for line in below)


def _note(note: Note, width: int) -> Iterator[Text]:
    pad = Piece(" " * note.indent)
    first, *others = wrapped(note.head, width - note.indent, hang=3)
    yield (pad, *first)
    yield from ((pad, Piece(plain(line))) for line in others)
    for item in note.details:
        yield from _item(item, width)


def source_line(line: SourceLine, width: int) -> Text:
    """A line of a file with its number, cut to the width."""
    if line.text is None:
        return (Piece(f"{line.place} |", "number"),)
    shown = cut(line.text, width - len(line.place) - 3).rstrip()
    return (Piece(f"{line.place} | ", "number"), Piece(shown, "strong"))


# --- lines of words --------------------------------------------------------------------------


def wrapped(text: Text, width: int, hang: int = 0) -> list[Text]:
    """Lines of `text`, at least one, all but the first `hang` deep; numbers keep their units.

    All have the style of the first piece: a terminal has few.
    """
    broken = textwrap.wrap(
        UNIT.sub(NO_BREAK, plain(text)),
        max(width, LEAST_WRAPPED),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(Piece(line.replace(NO_BREAK, " "), text[0].style),) for line in broken or [""]]


# --- columns ---------------------------------------------------------------------------------


class _Columns:
    """A table on the screen: its columns side by side, or, if `stacked`, one below the other."""

    def __init__(self, table: Table, width: int) -> None:
        self.table, self.width = table, width
        room = width - table.label - GAP
        self.cell = room // max(len(table.columns), 1) - GAP
        self.stacked = self.cell < LEAST_CELL

    def lines(self) -> Iterator[Text]:
        """The lines of all sections."""
        if self.table.columns and not self.stacked:
            letters = tuple(TableCell((Piece(name, "strong"),)) for name in self.table.columns)
            yield from self._row(TableRow((Piece(""),), letters))
        for section in self.table.sections:
            yield from self._section(section)

    def _section(self, section: Section) -> Iterator[Text]:
        if section.apart:
            yield ()
        if section.head is not None:
            yield source_line(section.head, self.width)
        for entry in section.body:
            yield from (
                self._row(entry) if isinstance(entry, TableRow) else _block(entry, self.width)
            )

    def _row(self, row: TableRow) -> Iterator[Text]:
        """A row, on as many lines of the screen as its longest cell needs."""
        mark, label = "≠" if row.differs else "", plain(row.label)
        texts = [_cell(cell, row.plain) for cell in row.cells]
        yield from (self._stacked if self.stacked else self._beside)(mark, label, texts)

    def _beside(self, mark: str, label: str, texts: Sequence[Piece]) -> Iterator[Text]:
        name, columns = _cut(label, self.table.label), [_cut(p.text, self.cell) for p in texts]
        for number in range(max(len(name), *(len(c) for c in columns))):
            sign = mark if number == 0 else ""
            shown = f"{_at(name, number):{self.table.label}}"
            head = (Piece(f"{sign:2}", "differs"), Piece(shown, "name"))
            parts = [
                Piece(f"{'':{GAP}}{_at(cut_texts, number):{self.cell}}", p.style)
                for cut_texts, p in zip(columns, texts, strict=True)
            ]
            yield _trimmed((*head, *parts))

    def _stacked(self, mark: str, label: str, texts: Sequence[Piece]) -> Iterator[Text]:
        for part in _cut(label, self.width - 2):
            yield (Piece(f"{mark:2}", "differs"), Piece(part, "name"))
            mark = ""
        for letter, p in zip(self.table.columns, texts, strict=True):
            for number, part in enumerate(_cut(p.text, self.width - 7)):
                yield (Piece(f"    {'' if number else letter:3}"), Piece(part, p.style))


def _cell(cell: TableCell, unsigned: bool) -> Piece:
    """A cell in one style, with the sign of a difference."""
    words = plain(cell.text)
    if cell.differs:
        return Piece(words if unsigned else f"≠ {words}", "differs")
    return Piece(words, cell.text[0].style)


def _cut(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width`; longer words are broken, numbers keep units."""
    found = textwrap.wrap(UNIT.sub(NO_BREAK, text), width, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in found] or [""]


def _at(found: Sequence[str], number: int) -> str:
    return found[number] if number < len(found) else ""


def _trimmed(line: Text) -> Text:
    """A line without spaces at its end."""
    pieces = list(line)
    while pieces and not pieces[-1].text.strip():
        pieces.pop()
    if pieces:
        pieces[-1] = Piece(pieces[-1].text.rstrip(), pieces[-1].style)
    return tuple(pieces)


def _grid(grid: Grid, width: int) -> Iterator[Text]:
    """A table laid out by rich: columns share the width, cells are folded."""
    from rich import table
    from rich.console import Console
    from rich.text import Text as RichText

    rich_table = table.Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    for heading in grid.head:
        rich_table.add_column(heading, overflow="fold")
    for cells in grid.lines:
        pieces = (c if isinstance(c, Piece) else Piece(c) for c in cells)
        rich_table.add_row(*(RichText(p.text, STYLES.get(p.style, "")) for p in pieces))
    for line in Console(width=width, force_jupyter=False).render_lines(rich_table, pad=False):
        yield tuple(Piece(p.text, STYLE_OF.get(str(p.style), "")) for p in line)
