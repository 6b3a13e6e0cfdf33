"""HTML: elements whose text is escaped, and documents written in them.

Text that is not `Markup` is escaped. The result is well-formed XML, so that a test can parse it.
In a notebook, which strips style sheets, every element has its style inline, and text its colour
from the theme; on a separate page it has a class. Pictures are images with all of their data
inside: such an image runs no script and loads nothing, and it is shown where notebooks strip
`<svg>` itself (GitHub's viewer, JupyterLab before a notebook is trusted).
"""

from __future__ import annotations

import base64
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape

from meshdsl.carets import cells_of
from meshdsl.records import dataclass
from meshdsl.report.document import (
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
    Table,
    TableCell,
    TableRow,
    Text,
)

# --- elements --------------------------------------------------------------------------------

NAMESPACE = "http://www.w3.org/2000/svg"
_ALONE = frozenset({"img", "br", "rect", "line", "path", "circle"})
"""Elements that have no end tag when they are empty."""


class Markup(str):
    """Text that is already markup; only the functions of this module make any."""

    __slots__ = ()


Child = str | int | Markup
Attribute = str | int | float | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element. `_` in the name of an attribute is written `-`; one that is None is left out.

    >>> tag("td", "a < b", title='"', colspan=2)
    '<td title="&quot;" colspan="2">a &lt; b</td>'
    """
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    if not inside and name in _ALONE:
        return Markup(f"<{name}{text}/>")
    return Markup(f"<{name}{text}>{inside}</{name}>")


def join(*children: Child) -> Markup:
    """Several pieces, concatenated."""
    return Markup("".join(c if isinstance(c, Markup) else escaped(str(c)) for c in children))


def escaped(text: str) -> Markup:
    """Untrusted text: control characters shown as escapes, then HTML's special ones escaped."""
    if text.isprintable():
        return Markup(escape(text, quote=True))
    shown = "\n".join("".join(cells_of(line)) for line in text.split("\n"))
    return Markup(escape(shown, quote=True))


def _number(value: str | int | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def drawing(width: float, height: float, *children: Child) -> Markup:
    """A whole SVG, `width` by `height` pixels."""
    return tag(
        "svg",
        *children,
        xmlns=NAMESPACE,
        width=float(width),
        height=float(height),
        viewBox=f"0 0 {_number(float(width))} {_number(float(height))}",
    )


_NAMED = re.compile(r' id="(\w+)"')


def _with_own_names(drawing: str) -> str:
    """A drawing whose patterns and arrow heads have names that no other one on a page has.

    Those of one that is hidden are drawn nowhere.
    """
    suffix = f"{zlib.crc32(drawing.encode('utf-8')):08x}"
    for name in set(_NAMED.findall(drawing)):
        drawing = drawing.replace(f'id="{name}"', f'id="{name}{suffix}"')
        drawing = drawing.replace(f"url(#{name})", f"url(#{name}{suffix})")
    return drawing


# --- styles ----------------------------------------------------------------------------------

MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
TINTS = (
    "rgba(31,119,214,.28)",
    "rgba(240,150,20,.30)",
    "rgba(50,165,70,.28)",
    "rgba(160,90,200,.28)",
    "rgba(225,80,80,.28)",
    "rgba(20,165,160,.30)",
)
"""Backgrounds of dims split over mesh axes; light or dark text is legible on them."""

_CELL = (
    "text-align:left;vertical-align:middle;padding:2px 8px;max-width:none;white-space:pre-wrap;"
    "font-weight:normal"
)
_SMALL = "opacity:.75;font-size:12px"
LOOKS = {
    "document": "overflow-x:auto;font-size:13px",
    "table": "border-collapse:collapse;text-align:left;margin:4px 0;font-size:13px",
    "row": "background:none;border:none",
    "cell": _CELL,
    "differs": f"{_CELL};background:rgba(240,110,20,.20)",
    "note": f"{_CELL};background:rgba(240,170,0,.14);border-left:3px solid rgb(201,133,0)",
    "line": f"{_CELL};border-top:1px solid rgba(127,127,127,.4)",
    "number": f"font-family:{MONO};{_SMALL};margin-right:8px",
    "muted": _SMALL,
    "extra": f"display:block;{_SMALL}",
    "mark": "font-weight:bold",
    "code": f"font-family:{MONO};font-size:13px;background:none;padding:0",
    "listing": f"font-family:{MONO};white-space:pre;overflow-x:auto",
    "summary": "cursor:pointer",
    "figure": "display:inline-block;vertical-align:top;margin:0 10px 8px 0",
    "picture": "max-width:100%;height:auto",
    **{
        f"axis{number}": f"font-family:{MONO};background:{tint};border-radius:3px;padding:0 3px"
        for number, tint in enumerate(TINTS)
    },
}
"""The style of each part in a notebook; on a page the keys are classes."""

ELEMENTS = {
    "strong": ("b", ""),
    "sent": ("b", ""),
    "name": ("code", "code"),
    "code": ("code", "code"),
    "muted": ("span", "muted"),
}
"""The element of a style, and its look."""

ARROWS = {"=> ": "⇒ "}
"""Signs drawn otherwise than on a terminal; the room of a missing one is left out."""


def html(document: Document) -> Markup:
    """A document for a notebook: it needs neither a script nor anything from elsewhere."""
    return HTMLWriter().write(document)


@dataclass(frozen=True, slots=True)
class HTMLWriter:
    """Writes documents; with `classes`, for a page with its own style sheet.

    With `inline`, drawings are parts of that page, which has `page.picture_colours` of its theme.
    """

    classes: bool = False
    inline: bool = False

    def write(self, document: Document) -> Markup:
        """The document as one element. Adjacent items and notes form one table."""
        blocks = [b for b in document if not isinstance(b, Gap)]
        groups = itertools.groupby(blocks, key=lambda b: isinstance(b, Item | Note))
        parts = (
            [self._table(Table((Section(None, tuple(group)),)))]  # type: ignore[arg-type]
            if rows
            else map(self._block, group)
            for rows, group in groups
        )
        return self._tag("div", "document", *itertools.chain.from_iterable(parts))

    def _tag(self, name: str, look: str, /, *children: Child, **attributes: Attribute) -> Markup:
        """An element in one of `LOOKS`."""
        own = {"class_": look} if self.classes else {"style": LOOKS.get(look)}
        return tag(name, *children, **(own | attributes))

    def _block(self, block: object) -> Markup:
        match block:
            case Paragraph():
                return tag("p", self.text(block.text))
            case Table():
                return self._table(block)
            case Grid():
                return self._grid(block)
            case Listing():
                return self._tag("pre", "listing", block.text)
            case Picture():
                return self._picture(block)
            case Beside():
                return tag("div", *map(self._picture, block.pictures))
        raise AssertionError(f"{type(block).__name__} is no block of a page")

    # --- text --------------------------------------------------------------------------------

    def text(self, text: Text) -> Markup:
        """A text in its styles; `extra` text has its own line."""
        alike = itertools.groupby(text, key=lambda p: replace(p, text=""))
        return join(*(self._piece(p, "".join(q.text for q in run)) for p, run in alike))

    def _piece(self, piece: Piece, words: str) -> Markup:
        """Words in the style of a piece."""
        if piece.style == "arrow":
            return join(ARROWS.get(words, ""))
        if piece.axis is not None:
            return self._tag("span", f"axis{piece.axis % len(TINTS)}", words)
        if piece.extra and not piece.style:
            return self._tag("span", "extra", words)
        element, look = ELEMENTS.get(piece.style, ("", ""))
        if not element:
            return join(words)
        return self._tag(element, look, words) if look else tag(element, words)

    # --- pictures ----------------------------------------------------------------------------

    def _picture(self, picture: Picture) -> Markup:
        caption = tag("div", self.text(picture.caption)) if picture.caption else Markup("")
        return self._tag("div", "figure", caption, self._image(picture))

    def _image(self, picture: Picture) -> Markup:
        if self.inline:
            described = (
                f'<svg class="picture" role="img" aria-label="{escaped(picture.described)}" '
            )
            return Markup(_with_own_names(picture.draw()).replace("<svg ", described, 1))
        data = base64.b64encode(picture.draw().encode("utf-8")).decode("ascii")
        source = f"data:image/svg+xml;base64,{data}"
        return self._tag("img", "picture", src=source, alt=picture.described)

    # --- tables ------------------------------------------------------------------------------

    def _table(self, table: Table) -> Markup:
        pictured = any(isinstance(e, Item) and e.picture for s in table.sections for e in s.body)
        columns = len(table.columns) + 1 if table.columns else 2 + pictured
        head = [self._head(table.title, table.columns)] if table.columns else []
        bodies = (self._section(s, table, columns) for s in table.sections)
        return self._tag("table", "table", *head, *bodies)

    def _head(self, title: str, names: Iterable[str]) -> Markup:
        named = (self._tag("th", "cell", tag("b", n), scope="col") for n in names)
        first = self._tag("th", "cell", self._tag("span", "muted", title), scope="col")
        return tag("thead", self._row(first, *named))

    def _row(self, *cells: Child, **attributes: Attribute) -> Markup:
        return self._tag("tr", "row", *cells, **attributes)

    def _section(self, section: Section, table: Table, columns: int) -> Markup:
        rows = []
        if section.head is not None:
            place = self._tag("span", "number", section.head.place)
            code = tag("b", self._tag("code", "code", (section.head.text or "").rstrip()))
            rows.append(self._row(self._tag("th", "line", place, code, colspan=columns)))
        if section.title:
            title = self._tag("span", "muted", section.title)
            rows.append(self._row(self._tag("th", "line", title, colspan=columns)))
        rows += (row for entry in section.body for row in self._entry(entry, columns))
        return tag("tbody", *rows, **{f"data_{key}": value for key, value in section.data})

    def _entry(self, entry: Item | Note | TableRow, columns: int) -> Iterator[Markup]:
        match entry:
            case Item():
                yield self._item(entry, columns == 3)
            case Note():
                yield self._row(self._tag("td", "note", self._note(entry), colspan=columns))
            case TableRow():
                yield self._cells(entry)

    def _item(self, item: Item, pictured: bool) -> Markup:
        image = [self._image(item.picture)] if item.picture else []
        first = [self._tag("td", "cell", *image)] if pictured else []
        aside = [" ", self._tag("span", "muted", item.asides[0])] if item.asides else []
        body = self._tag("td", "cell", self.text(item.body), *aside)
        # Heads are padded with spaces for terminals.
        heads = ((p, p.text.strip()) for p in item.head)
        named = [part for p, words in heads if words for part in (" ", self._piece(p, words))][1:]
        return self._row(*first, self._tag("td", "cell", *named), body)

    def _note(self, note: Note) -> Markup:
        items = (self._item(item, False) for item in note.details)
        details = self._tag("table", "table", tag("tbody", *items))
        return tag("details", self._tag("summary", "summary", self.text(note.head)), details)

    def _cells(self, row: TableRow) -> Markup:
        head = self._tag("th", "cell", self._mark(row.differs), self.text(row.label), scope="row")
        look = {"class_": f"item {row.kind}" if row.data else row.kind} if self.classes else {}
        data = {f"data_{key}": value for key, value in row.data}
        return self._row(head, *map(self._cell, row.cells), **look, **data)

    def _cell(self, cell: TableCell) -> Markup:
        look = "differs" if cell.differs else "cell"
        inside = (self._mark(cell.differs), self.text(cell.text))
        return self._tag("td", look, *inside, title=cell.why or None)

    def _mark(self, differs: bool) -> Markup:
        return self._tag("span", "mark", "≠ ", title="columns differ") if differs else Markup("")

    def _grid(self, grid: Grid) -> Markup:
        names = (self._tag("th", "cell", tag("b", name)) for name in grid.head)
        pieces = ((c if isinstance(c, Piece) else Piece(c) for c in cells) for cells in grid.lines)
        lines = (self._row(*(self._tag("td", "cell", self.text((p,))) for p in r)) for r in pieces)
        inside = (tag("thead", self._row(*names)), tag("tbody", *lines))
        return tag("div", tag("b", grid.title), self._tag("table", "table", *inside))
