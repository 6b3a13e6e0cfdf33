"""A document: the content of a report, independent of terminal and page.

A report is a function from facts to a document. `terminal` and `html` write any document, and know
no report. Text is in pieces with a style; `extra` text is shown on a page alone, where there is
room for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from meshdsl.diagnostics import plural
from meshdsl.records import dataclass

# --- text ------------------------------------------------------------------------------------

Style = Literal[
    "", "strong", "muted", "code", "name", "number", "arrow", "sent", "amount", "differs", "title",
    "forward", "backward", "weights", "update",
]  # fmt: skip
"""The last four are work on a time axis, as `palette.Work` has it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text in one style; `axis` is the number of the mesh axis that splits it."""

    text: str
    style: Style = ""
    extra: bool = False
    axis: int | None = None


Text = tuple[Piece, ...]


def plain(text: Text) -> str:
    """The text without styles and `extra` pieces."""
    return "".join(p.text for p in text if not p.extra)


# --- blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text; on a terminal `indent` columns in, lines after the first `hang` more."""

    text: Text
    hang: int = 0
    indent: int = 0


def line(text: str, style: Style = "") -> Paragraph:
    """A paragraph in one style."""
    return Paragraph((Piece(text, style),))


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, made when it is written; `described` is its description in words.

    A terminal prints the description, unless the picture is `extra`.
    """

    draw: Callable[[], str]
    described: str
    caption: Text = ()
    extra: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """A head and its description, side by side.

    `asides` are one remark at different lengths, the longest first: a terminal takes the first that
    fits behind the body, else puts the longest below it.
    """

    head: Text
    body: Text
    asides: tuple[str, ...] = ()
    picture: Picture | None = None
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """A statement with its details, which a page folds."""

    head: Text
    details: tuple[Item, ...]
    indent: int = 0


@dataclass(frozen=True, slots=True)
class TableCell:
    """The entry of one column; a page shows `why` beside it."""

    text: Text
    differs: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A label and a cell for each column. `kind` and `data` are for the script of a page.

    If it is `plain`, a terminal marks differences in the label alone.
    """

    label: Text
    cells: tuple[TableCell, ...]
    kind: str = ""
    data: tuple[tuple[str, int | str], ...] = ()
    plain: bool = False

    @property
    def differs(self) -> bool:
        """Whether any column differs from the first."""
        return any(cell.differs for cell in self.cells)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a file: its position, and its text if available."""

    place: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Section:
    """Rows below a source line or a title; an `apart` section follows a blank line."""

    head: SourceLine | None
    body: tuple[Item | Note | TableRow, ...]
    apart: bool = False
    title: str = ""
    data: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Sections one below the other; `columns` are the names of the cells of rows.

    `label` is the width of a row's label on a terminal.
    """

    sections: tuple[Section, ...]
    columns: tuple[str, ...] = ()
    title: str = ""
    label: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """A title, names of columns, and lines of cells, some in a style."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str | Piece, ...], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines as they stand: nothing is wrapped."""

    lines: tuple[Text, ...]

    @staticmethod
    def of(text: str) -> Listing:
        """The lines of a text in one style."""
        return Listing(tuple((Piece(each, "code"),) for each in text.splitlines()))

    @property
    def text(self) -> str:
        """The lines without their styles."""
        return "\n".join(map(plain, self.lines))


@dataclass(frozen=True, slots=True)
class Beside:
    """Pictures side by side."""

    pictures: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """A blank line of a terminal."""


Block = Paragraph | Item | Note | Table | Grid | Listing | Picture | Beside | Gap
Document = tuple[Block, ...]

# --- words and numbers -----------------------------------------------------------------------

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNIT = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)")
"""The space between a number and its unit, where lines are not broken."""

NO_BREAK = "\u00a0"


def human(size: int) -> str:
    """Bytes to three digits in a suitable unit: `4 B`, `64 KiB`, `6.76 MiB`."""
    value, unit = float(size), 0
    while value >= 1023.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_digits(value)} {UNITS[unit]}"


def exact(size: int) -> str:
    """`64 KiB (65,536 B)`; bytes alone if there are few."""
    return f"{size:,} B" if size < 1024 else f"{human(size)} ({size:,} B)"


def scaled(flops: int) -> str:
    """FLOPs to three digits: `67.2 MFLOP`."""
    value, unit = float(flops), 0
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    return f"{_digits(value)} {units[unit]}"


def _digits(value: float) -> str:
    places = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """Seconds to three digits in a suitable unit: `12.3 µs`, `412 ms`, `0 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e9)} ns" if seconds else "0 s"


def counted(number: int, noun: str) -> str:
    """`1 device`, `3,072 devices`."""
    return f"{number:,} {plural(number, noun)}"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh and their sizes, `{ rows: 2, cols: 2 }`; nothing for one without axes."""
    axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.items())
    return f"{{ {axes} }}" if axes else ""


def aligned(table: list[list[str]]) -> list[str]:
    """Lines of text with aligned columns; an empty first column is left out."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if not widths[0]:
        table, widths = [line[1:] for line in table], widths[1:]
    padded = (("{:{}}".format(*c) for c in zip(line, widths, strict=True)) for line in table)
    return ["  ".join(cells).rstrip() for cells in padded]
