"""A view as a file: its pictures as SVG, or all of it as a page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.diagnostics import fail
from meshdsl.output_files import write_whole
from meshdsl.records import dataclass
from meshdsl.report.document import Beside, Block, Document, Item, Paragraph, Picture, Table, plain
from meshdsl.report.html import Markup, html, tag
from meshdsl.report.pictures import FONT, card, lines_of_text, wrapped

if TYPE_CHECKING:
    from meshdsl.report.views.parts import View

PAGE, DRAWING = ".html", ".svg"
"""The endings of what a view is written as."""


def save(view: View, path: str | os.PathLike[str]) -> None:
    """Write a view: to `.svg` its pictures, to `.html` all of it. A file there is replaced.

    Raises:
        DiagnosticError: the name has another ending, or the view has no picture (MD0602); the
            system refuses to write there (MD0501).
    """
    out = Path(path)
    ending = out.suffix.lower()
    if ending not in (PAGE, DRAWING):
        stem = out.name.split(".")[0] or "view"
        meant = out.with_name(stem + DRAWING) if out.name else stem + DRAWING
        help = f'write `.save("{meant}")`, or `{PAGE}` for a page'
        fail("MD0602", f"a view is saved as {DRAWING} or {PAGE}: `{out}`", help=help)
    content = view.page() if ending == PAGE else svg(view.document)
    if not content:
        help = f'write `.save("{out.with_suffix(PAGE)}")`'
        fail("MD0602", f"this view is a text, with no picture for `{out}`", help=help)
    write_whole(out, content)


# --- a page --------------------------------------------------------------------------------------

HEAD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'"/>
<meta name="color-scheme" content="light dark"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>meshdsl</title><style>body {{ font-family: {FONT}; margin: 24px }}</style></head>
"""
"""What is above the body of a page: nothing runs and nothing is loaded; light or dark."""


def page(document: Document) -> str:
    """A document as a page of its own, without scripts."""
    return f"{HEAD}<body>{html(document)}</body></html>\n"


# --- pictures ------------------------------------------------------------------------------------

GAP = 10.0
"""Pixels between pictures."""
LINE = 15.0
"""Pixels from a line of text to the next."""
LEAST = 320.0
"""Pixels to which the text above a narrow picture is wrapped."""

_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')


@dataclass(frozen=True, slots=True)
class PictureRow:
    """Pictures side by side, and the text above them."""

    text: str
    pictures: tuple[str, ...]

    @property
    def sizes(self) -> tuple[tuple[float, float], ...]:
        """The width and the height of each picture, in pixels."""
        found = (_SIZE.match(each) for each in self.pictures)
        return tuple((float(m[1]), float(m[2])) for m in found if m)

    @property
    def width(self) -> float:
        """The pixels of all pictures, with the gaps between them."""
        return sum(width for width, _ in self.sizes) + GAP * (len(self.pictures) - 1)

    @property
    def lines(self) -> tuple[str, ...]:
        """The text, wrapped to the pictures."""
        return wrapped((self.text,), max(self.width, LEAST)) if self.text else ()

    @property
    def height(self) -> float:
        """The pixels of the text and the pictures below it."""
        return LINE * len(self.lines) + max(height for _, height in self.sizes)


def svg(document: Document) -> str:
    """All pictures of a document, one below the other, with their captions; "" without any."""
    rows = tuple(_rows(document))
    if len(rows) == 1 and len(rows[0].pictures) == 1 and not rows[0].text:
        return rows[0].pictures[0]
    if not rows:
        return ""
    parts, y = [], 0.0
    for row in rows:
        parts.append(lines_of_text(0, y + 11, row.lines))
        x, top = 0.0, y + LINE * len(row.lines)
        for each, (width, _) in zip(row.pictures, row.sizes, strict=True):
            parts.append(tag("g", Markup(each), transform=f"translate({x:g} {top:g})"))
            x += width + GAP
        y += row.height + GAP
    return card(max(max(row.width, LEAST) for row in rows), y - GAP, *parts)


def _rows(document: Document) -> Iterator[PictureRow]:
    """The pictures of a document; the text of one without a caption is what is just above it."""
    above: Block | None = None
    for block in document:
        match block:
            case Picture():
                yield PictureRow(plain(block.caption) or _text(above), (block.draw(),))
            case Beside():
                text = "; ".join(filter(None, (plain(p.caption) for p in block.pictures)))
                yield PictureRow(text, tuple(p.draw() for p in block.pictures))
            case Table():
                items = (i for s in block.sections for i in s.body if isinstance(i, Item))
                yield from (PictureRow(_text(i), (i.picture.draw(),)) for i in items if i.picture)
        above = block


def _text(block: Block | None) -> str:
    """A paragraph or an item as text; "" for anything else."""
    match block:
        case Paragraph():
            return plain(block.text).strip()
        case Item():
            return f"{plain(block.head).strip()}: {plain(block.body).strip()}"
    return ""
