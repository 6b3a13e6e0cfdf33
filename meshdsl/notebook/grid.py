"""Blocks in up to four directions: panels below and beside each other, rows and columns in each.

Both tensors and meshes are drawn on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.notebook.look import LETTER, SOFT, centred, shown, upright, width_of, words
from meshdsl.notebook.svg import Markup, join

GAP = 12.0
TITLE, TICK = 17.0, 14.0
Index = tuple[int | None, ...]
"""A number for each direction, None where parts are left out."""


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction: a name, how long it is, and a label for each part (empty: it needs none)."""

    name: str
    ticks: tuple[str, ...] = ("",)
    size: str = ""

    @property
    def title(self) -> str:
        """`batch 64`, or the name alone."""
        return f"{self.name} {self.size}".rstrip()

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """The parts that are drawn."""
        return shown(len(self.ticks))

    def tick(self, number: int | None) -> str:
        """The label of one part."""
        return "…" if number is None else self.ticks[number]

    def part(self, number: int | None) -> str:
        """`batch 0–31`; of a direction that is in one piece `batch 64`."""
        return f"{self.name} {self.tick(number)}" if self.ticked else self.title

    @property
    def ticked(self) -> bool:
        """Whether any part has a label."""
        return any(self.tick(n) for n in self.numbers)


NOWHERE = Direction("")


@dataclass(frozen=True, slots=True)
class Cell:
    """Where one block is drawn."""

    x: float
    y: float
    width: float
    height: float
    index: Index

    @property
    def centre(self) -> tuple[float, float]:
        """The middle of it."""
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def left_out(self) -> bool:
        """Whether it stands for parts that are not drawn."""
        return None in self.index

    @property
    def room(self) -> int:
        """How many characters fit in it."""
        return int((self.width - 6) / LETTER)


@dataclass(frozen=True, slots=True)
class Grid:
    """The directions from the outermost: panels down, panels across, rows, columns."""

    directions: tuple[Direction, Direction, Direction, Direction]
    cell: tuple[float, float]

    @classmethod
    def of(
        cls, inner: list[Direction], cell: tuple[float, float] | None = None, least: float = 46
    ) -> Grid:
        """Up to four directions, the last across; cells as wide as labels and `least` want them."""
        assert len(inner) <= 4, f"{len(inner)} directions cannot be drawn"
        found = (*[NOWHERE] * (4 - len(inner)), *inner)
        panels, rows, columns = (len(d.numbers) for d in found[1:])
        ticks = max(width_of(found[3].tick(n), 11) + 8 for n in found[3].numbers)
        captions = [width_of(d.part(n), 11) for d in found[:2] if d.ticked for n in d.numbers]
        ticks = max(ticks, max(captions, default=0) / columns)
        width = max(ticks, least, min(116, 250 / columns, 460 / (columns * panels)))
        height = max(28, min(46, 130 / rows))
        a, b, c, d = found
        return cls((a, b, c, d), cell or (width, height))

    # --- measures ----------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """Room at the left, for the title and the labels of the rows."""
        rows = self.directions[2]
        ticks = max(width_of(rows.tick(n), 11) for n in rows.numbers) + 6 if rows.ticked else 0
        return (TITLE if rows.title else 0) + ticks

    @property
    def _above(self) -> float:
        """Room above the cells of a panel, for its caption and the labels of its columns."""
        return TICK * (self._captions + self.directions[3].ticked)

    @property
    def _captions(self) -> int:
        """How many lines stand above each panel."""
        return sum(d.ticked for d in self.directions[:2])

    @property
    def _panel(self) -> tuple[float, float]:
        rows, columns = (len(d.numbers) for d in self.directions[2:])
        return columns * self.cell[0], rows * self.cell[1] + self._above

    @property
    def top(self) -> float:
        """Room above all panels, for the title of the columns."""
        return TITLE if self.directions[3].title else 0

    @property
    def width(self) -> float:
        """Of all of it."""
        across = len(self.directions[1].numbers)
        most = self.left + across * (self._panel[0] + GAP) - GAP
        return max(most, self.left + width_of(self.directions[3].title))

    @property
    def height(self) -> float:
        """Of all of it; at least what the title of the rows takes."""
        down = len(self.directions[0].numbers)
        most = self.top + down * (self._panel[1] + GAP) - GAP
        return max(most, self.top + self._above + width_of(self.directions[2].title))

    def _corner(self, panel: tuple[int, int]) -> tuple[float, float]:
        """Where a panel begins, by its place."""
        width, height = self._panel
        return self.left + panel[1] * (width + GAP), self.top + panel[0] * (height + GAP)

    # --- what is drawn -----------------------------------------------------------------------

    def cells(self) -> Iterator[Cell]:
        """Every block, panel by panel and row by row."""
        width, height = self.cell
        for places in itertools.product(*(enumerate(d.numbers) for d in self.directions)):
            (a, _), (b, _), (row, _), (column, _) = places
            x, y = self._corner((a, b))
            index = tuple(number for _, number in places)
            at = (x + column * width, y + self._above + row * height)
            yield Cell(*at, width, height, index)

    def labels(self) -> Markup:
        """Titles, captions of panels, and labels of rows and columns."""
        return join(*self._titles(), *self._panels(), *self._row_ticks())

    def _titles(self) -> Iterator[Markup]:
        rows, columns = self.directions[2:]
        if columns.title:
            yield words(self.left, 11, columns.title, fill=SOFT)
        if rows.title:
            middle = self.top + self._above + len(rows.numbers) * self.cell[1] / 2
            least = self.top + self._above + width_of(rows.title) / 2
            yield upright(7, max(middle, least), rows.title, fill=SOFT)

    def _panels(self) -> Iterator[Markup]:
        outer, inner, _, columns = self.directions
        for a, b in itertools.product(enumerate(outer.numbers), enumerate(inner.numbers)):
            x, y = self._corner((a[0], b[0]))
            said = [d.part(n) for d, n in ((outer, a[1]), (inner, b[1])) if d.ticked]
            yield from (words(x, y + 10 + TICK * i, s, font_size=11) for i, s in enumerate(said))
            if columns.ticked:
                down = y + self._above - 8
                for i, n in enumerate(columns.numbers):
                    middle = x + (i + 0.5) * self.cell[0]
                    yield centred(middle, down, columns.tick(n), fill=SOFT, font_size=11)

    def _row_ticks(self) -> Iterator[Markup]:
        rows = self.directions[2]
        for a in range(len(self.directions[0].numbers) if rows.ticked else 0):
            _, y = self._corner((a, 0))
            for i, n in enumerate(rows.numbers):
                middle = y + self._above + (i + 0.5) * self.cell[1]
                yield words(
                    self.left - 5,
                    middle + 4,
                    rows.tick(n),
                    text_anchor="end",
                    fill=SOFT,
                    font_size=11,
                )
