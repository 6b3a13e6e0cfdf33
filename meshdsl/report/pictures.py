"""Pictures of tensors, meshes, collectives and memory, and their tables as text.

A picture has its own background, so that any theme can be around it.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass
from meshdsl.report.document import aligned, human
from meshdsl.report.html import Attribute, Child, Markup, drawing, join, tag
from meshdsl.report.memory_kinds import KINDS, at_peak
from meshdsl.report.palette import BACK, EDGE, INK, MEMORY, PARTS, SOFT, colour
from meshdsl.report.shard_view import Holding

# --- colours and measures --------------------------------------------------------------------

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MARGIN = 12.0
LETTER = 7.0
"""The width in pixels of a character of a label, generously."""

MOST = 8
"""The number of parts drawn along one direction: the first ones and the last."""


def card(width: float, height: float, *children: Child) -> Markup:
    """A drawing with a margin and a background."""
    back = tag(
        "rect",
        x=0.5,
        y=0.5,
        width=width + 2 * MARGIN - 1,
        height=height + 2 * MARGIN - 1,
        rx=6,
        fill=BACK,
        stroke=EDGE,
    )
    inside = tag("g", *children, transform=f"translate({MARGIN:g} {MARGIN:g})")
    everything = tag("g", back, inside, font_family=FONT, font_size=12, fill=INK)
    return drawing(width + 2 * MARGIN, height + 2 * MARGIN, everything)


def words(x: float, y: float, text: str, **attributes: str | int | float | None) -> Markup:
    """Text in a drawing; `y` is that of the baseline."""
    return tag("text", text, x=x, y=y, **attributes)


def centred(x: float, y: float, text: str, **attributes: str | int | float | None) -> Markup:
    """Text around the point `x`, `y`."""
    return words(x, y + 4, text, text_anchor="middle", **attributes)


def upright(x: float, y: float, text: str, **attributes: str | int | float | None) -> Markup:
    """Text that reads upwards, around the point `x`, `y`."""
    turned = f"translate({x + 4:.1f} {y:.1f}) rotate(-90)"
    return tag("text", text, transform=turned, text_anchor="middle", **attributes)


def lines_of_text(x: float, y: float, lines: tuple[str, ...], fill: str = SOFT) -> Markup:
    """Small text below each other, the first line at `y`."""
    return join(*(words(x, y + 15 * i, t, fill=fill, font_size=11) for i, t in enumerate(lines)))


def wrapped(texts: tuple[str, ...], width: float) -> tuple[str, ...]:
    """Small text wrapped to about `width` pixels."""
    room = max(int(width / (LETTER * 11 / 12)), 36)
    return tuple(line for text in texts for line in textwrap.wrap(text, room))


def width_of(text: str, size: float = 12.0) -> float:
    """The approximate width of a text, in pixels."""
    return len(text) * LETTER * size / 12


def legend(fills: Mapping[str, str], heights: Mapping[str, float] = {}) -> tuple[Markup, float]:
    """What each fill means, in one line, and where the line ends.

    A sample is a square, or as high as `heights` has it.
    """
    entries, x = [], 0.0
    for meaning, fill in fills.items():
        height = heights.get(meaning, 11.0)
        place = {"x": x, "y": 1 + (11 - height) / 2, "width": 11, "height": height}
        entries.append(tag("rect", fill=fill, stroke=INK, stroke_width=0.6, **place))
        entries.append(words(x + 16, 11, meaning, font_size=11))
        x += 16 + width_of(meaning, 11) + 14
    return join(*entries), x


def shown(count: int) -> tuple[int | None, ...]:
    """The numbers of 0 … count-1 to draw; None marks omitted ones."""
    if count <= MOST:
        return tuple(range(count))
    return (*range(MOST - 2), None, count - 1)


# --- a grid ----------------------------------------------------------------------------------

GAP = 12.0
TITLE, TICK = 17.0, 14.0
Index = tuple[int | None, ...]
"""A number for each direction, None where parts are omitted."""


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction: its name and length, and a label for each part (empty if it needs none)."""

    name: str
    ticks: tuple[str, ...] = ("",)
    size: str = ""

    @property
    def title(self) -> str:
        """The title `batch 64`, or the name alone."""
        return f"{self.name} {self.size}".rstrip()

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """The parts that are drawn."""
        return shown(len(self.ticks))

    def tick(self, number: int | None) -> str:
        """The label of one part."""
        return "…" if number is None else self.ticks[number]

    def part(self, number: int | None) -> str:
        """The text `batch 0–31`; of a direction in one piece `batch 64`."""
        return f"{self.name} {self.tick(number)}" if self.ticked else self.title

    @property
    def ticked(self) -> bool:
        """Whether any part has a label."""
        return any(self.tick(n) for n in self.numbers)


NOWHERE = Direction("")


@dataclass(frozen=True, slots=True)
class BlockCell:
    """The rectangle of one block."""

    x: float
    y: float
    width: float
    height: float
    index: Index

    @property
    def centre(self) -> tuple[float, float]:
        """The centre of the cell."""
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def left_out(self) -> bool:
        """Whether the cell marks omitted parts."""
        return None in self.index

    @property
    def room(self) -> int:
        """The number of characters that fit."""
        return int((self.width - 6) / LETTER)


@dataclass(frozen=True, slots=True)
class PanelGrid:
    """The directions from the outermost: panels down, panels across, rows, columns."""

    directions: tuple[Direction, Direction, Direction, Direction]
    cell: tuple[float, float]

    @classmethod
    def of(
        cls, inner: list[Direction], cell: tuple[float, float] | None = None, least: float = 46
    ) -> PanelGrid:
        """Up to four directions, the last across; cells as wide as labels and `least` require."""
        assert len(inner) <= 4, f"{len(inner)} directions cannot be drawn"
        four = (*[NOWHERE] * (4 - len(inner)), *inner)
        panels, rows, columns = (len(d.numbers) for d in four[1:])
        ticks = max(width_of(four[3].tick(n), 11) + 8 for n in four[3].numbers)
        captions = [width_of(d.part(n), 11) for d in four[:2] if d.ticked for n in d.numbers]
        ticks = max(ticks, max(captions, default=0) / columns)
        width = max(ticks, least, min(116, 250 / columns, 460 / (columns * panels)))
        height = max(28, min(46, 130 / rows))
        a, b, c, d = four
        return cls((a, b, c, d), cell or (width, height))

    # --- measures ----------------------------------------------------------------------------

    @property
    def left(self) -> float:
        """The space at the left, for the title and the labels of the rows."""
        rows = self.directions[2]
        ticks = max(width_of(rows.tick(n), 11) for n in rows.numbers) + 10 if rows.ticked else 0
        return (TITLE if rows.title else 0) + ticks

    @property
    def _above(self) -> float:
        """The space above the cells of a panel, for its caption and the labels of its columns."""
        return TICK * (self._captions + self.directions[3].ticked)

    @property
    def _captions(self) -> int:
        """The number of captions above each panel."""
        return sum(d.ticked for d in self.directions[:2])

    @property
    def _panel(self) -> tuple[float, float]:
        rows, columns = (len(d.numbers) for d in self.directions[2:])
        return columns * self.cell[0], rows * self.cell[1] + self._above

    @property
    def top(self) -> float:
        """The space above all panels, for the title of the columns."""
        return TITLE if self.directions[3].title else 0

    @property
    def width(self) -> float:
        """The total width."""
        across = len(self.directions[1].numbers)
        most = self.left + across * (self._panel[0] + GAP) - GAP
        return max(most, self.left + width_of(self.directions[3].title))

    @property
    def height(self) -> float:
        """The total height; at least that of the title of the rows."""
        down = len(self.directions[0].numbers)
        most = self.top + down * (self._panel[1] + GAP) - GAP
        return max(most, self.top + self._above + width_of(self.directions[2].title))

    def _corner(self, panel: tuple[int, int]) -> tuple[float, float]:
        """The corner of a panel, by its indices."""
        width, height = self._panel
        return self.left + panel[1] * (width + GAP), self.top + panel[0] * (height + GAP)

    # --- drawing -----------------------------------------------------------------------------

    def cells(self) -> Iterator[BlockCell]:
        """Every block, panel by panel and row by row."""
        width, height = self.cell
        for places in itertools.product(*(enumerate(d.numbers) for d in self.directions)):
            (a, _), (b, _), (row, _), (column, _) = places
            x, y = self._corner((a, b))
            index = tuple(number for _, number in places)
            at = (x + column * width, y + self._above + row * height)
            yield BlockCell(*at, width, height, index)

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


# --- a tensor --------------------------------------------------------------------------------

DIMS = 4
STACK = 4.0
"""The offset in pixels of a copy behind the block in front."""

WIDEST = 150.0
"""The greatest width of a block for its label, in pixels."""

HATCH = tag(
    "defs",
    tag(
        "pattern",
        tag("path", d="M0 0V7", stroke=INK, stroke_width=1.3, stroke_opacity=0.5),
        id="hatch",
        width=7,
        height=7,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    ),
)


def _drawn_dims(held: Holding, most: int = DIMS) -> tuple[str, ...]:
    """The dims to draw, in order: at most `most`, split dims first."""
    split = [d for d in held.dims if held.parts(d) > 1]
    chosen = list(dict.fromkeys([*split, *reversed(held.dims)]))[:most]
    return tuple(d for d in held.dims if d in chosen)


def _tensor_notes(held: Holding) -> tuple[str, ...]:
    """The notes below a picture: replicas, partial values, and dims that are not drawn."""
    left = [d for d in held.dims if d not in _drawn_dims(held)]
    if not left:
        return held.notes
    said = (f"{d} ({held.parts(d)} parts)" if held.parts(d) > 1 else f"{d} (whole)" for d in left)
    return (*held.notes, f"not drawn: {', '.join(said)}")


def tensor_picture(held: Holding) -> Markup:
    """The tensor as a drawing: blocks with their devices."""
    dims = _drawn_dims(held)
    labels = map(held.label, held.holders(dims).values())
    widest = max(width_of(label) for label in labels) + 16
    grid = PanelGrid.of([_direction(held, d) for d in dims], least=min(widest, WIDEST))
    depth = STACK * _behind(held)
    said = wrapped(_tensor_notes(held), max(grid.width + depth, 250))
    height = grid.height + depth + (GAP + 15 * len(said) if said else 0)
    width = max(grid.width + depth, 60, *(width_of(t, 11) for t in said))
    blocks = join(*_blocks(held, grid, dims))
    below = lines_of_text(0, grid.height + depth + GAP + 8, said)
    return card(width, height, HATCH, grid.labels(), blocks, below)


def _direction(held: Holding, dim: str) -> Direction:
    parts = held.parts(dim)
    ticks = tuple(held.extent(dim, i) for i in range(parts)) if parts > 1 else ("",)
    return Direction(dim, ticks, str(held.size(dim)))


def _behind(held: Holding) -> int:
    return min(held.copies - 1, 2)


def _blocks(held: Holding, grid: PanelGrid, dims: tuple[str, ...]) -> Iterator[Markup]:
    holders = held.holders(dims)
    colours = {block: colour(ranks[0]) for block, ranks in holders.items()}
    for cell in grid.cells():
        if cell.left_out:
            yield centred(*cell.centre, "…")
            continue
        block = _block_of(cell.index, dims)
        yield _block(
            held, cell, colours[block], held.label(holders[block], cell.room - _behind(held))
        )


def _block_of(index: Index, dims: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(n for n in index[len(index) - len(dims) :] if n is not None)


def _block(held: Holding, cell: BlockCell, fill: str, label: str) -> Markup:
    """A block, its replicas behind it, hatched if it is partial."""
    behind = _behind(held)
    size = {"width": cell.width - 4 - STACK * behind, "height": cell.height - 4 - STACK * behind}
    frame: dict[str, Attribute] = {**size, "rx": 2, "stroke": INK, "stroke_width": 0.8}
    copies = (
        tag("rect", x=cell.x + 2 + STACK * i, y=cell.y + 2 + STACK * i, fill=BACK, **frame)
        for i in range(behind, 0, -1)
    )
    x, y = cell.x + 2, cell.y + 2
    front = tag("rect", x=x, y=y, fill=fill, **frame)
    middle = (x + size["width"] / 2, y + size["height"] / 2)
    if not held.partial:
        return join(*copies, front, centred(*middle, label))
    hatched = tag("rect", x=x, y=y, fill="url(#hatch)", **size)
    plate = width_of(label) + 6
    under = tag(
        "rect", x=middle[0] - plate / 2, y=middle[1] - 9, width=plate, height=18, rx=3, fill=BACK
    )
    return join(*copies, front, hatched, under, centred(*middle, label))


def thumbnail(held: Holding) -> Markup:
    """The blocks without labels, very small: rows and columns of two dims, split dims first."""
    *_, rows, columns = ("", "", *_drawn_dims(held, 2))
    dims = tuple(d for d in (rows, columns) if d)
    numbers = [shown(held.parts(d)) if d else (0,) for d in (rows, columns)]
    width, height = 44 / len(numbers[1]), 26 / len(numbers[0])
    holders = held.holders(dims)
    colours = {block: colour(ranks[0]) for block, ranks in holders.items()}
    boxes = []
    for (i, row), (j, column) in itertools.product(*map(enumerate, numbers)):
        index = [n for n, d in ((row, rows), (column, columns)) if d]
        place = {"x": 1 + j * width, "y": 1 + i * height, "width": width, "height": height}
        fill = BACK if None in index else colours[_block_of(tuple(index), dims)]
        boxes.append(tag("rect", fill=fill, stroke=INK, stroke_width=0.6, **place))
        if held.partial:
            boxes.append(tag("rect", fill="url(#hatch)", **place))
    return drawing(46, 28, HATCH, *boxes)


def tensor_text(held: Holding) -> str:
    """The picture as tables of text, one for each panel."""
    dims = _drawn_dims(held)
    holders = held.holders(dims)

    def label(index: Index) -> str:
        return held.label(holders[_block_of(index, dims)], 24)

    return "\n".join([*_tables([_direction(held, d) for d in dims], label), *_tensor_notes(held)])


def _tables(directions: list[Direction], label: Callable[[Index], str]) -> Iterator[str]:
    """Lines of text for blocks in up to four directions, the last of them across."""
    four = (*[NOWHERE] * (4 - len(directions)), *directions)
    *outer, rows, columns = four
    for panel in itertools.product(*(d.numbers for d in outer)):
        said = [d.part(n) for d, n in zip(outer, panel, strict=True) if d.ticked]
        yield from [f"{', '.join(said)}:"] if said else []
        table = [["", *(columns.part(n) for n in columns.numbers)]]
        for row in rows.numbers:
            cells = ((*panel, row, c) for c in columns.numbers)
            table.append([rows.part(row), *("…" if None in c else label(c) for c in cells)])
        yield from aligned([line for line in table if any(line)])


# --- a mesh ----------------------------------------------------------------------------------

AXES = 4
DEVICE = (56.0, 44.0)
"""The size in pixels of a device with its margin …"""

ROOMY = (76.0, 60.0)
"""… and with room for arrows."""


def _drawn_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes to draw, in order: those with several devices before the others."""
    several = [a for a, n in mesh.axes if n > 1]
    chosen = list(dict.fromkeys([*several, *mesh.names]))[:AXES]
    return tuple(a for a in mesh.names if a in chosen)


def _directions(mesh: Mesh) -> list[Direction]:
    """The axes as directions; the last varies fastest and goes across."""
    return [Direction(a, tuple(map(str, range(mesh.size(a))))) for a in _drawn_axes(mesh)]


def _rank_at(mesh: Mesh, index: Sequence[int | None]) -> int | None:
    """The rank at an index of the grid, 0 along axes that are not drawn; None if omitted."""
    drawn = _drawn_axes(mesh)
    numbers = index[len(index) - len(drawn) :]
    if None in numbers:
        return None
    at = dict(zip(drawn, numbers, strict=True))
    rank = 0
    for axis, size in mesh.axes:
        rank = rank * size + (at.get(axis) or 0)
    return rank


def _mesh_notes(mesh: Mesh) -> tuple[str, ...]:
    """The number of devices, and the axes that are not drawn."""
    left = [f"{a}:{n}" for a, n in mesh.axes if a not in _drawn_axes(mesh)]
    several = f"{mesh.devices:,} device{'s' if mesh.devices > 1 else ''}"
    return (several, *([f"not drawn: {', '.join(left)}"] if left else []))


def mesh_picture(mesh: Mesh) -> Markup:
    """The mesh as a drawing."""
    grid = PanelGrid.of(_directions(mesh), DEVICE)
    said = wrapped(_mesh_notes(mesh), max(grid.width, 250))
    boxes = join(*_devices(mesh, grid))
    below = lines_of_text(0, grid.height + GAP + 8, said)
    width = max(grid.width, *(width_of(t, 11) for t in said))
    return card(width, grid.height + GAP + 15 * len(said), grid.labels(), boxes, below)


def _devices(mesh: Mesh, grid: PanelGrid) -> Iterator[Markup]:
    """A box for every device, with its rank."""
    for cell in grid.cells():
        rank = _rank_at(mesh, cell.index)
        if rank is None:
            yield centred(*cell.centre, "…")
            continue
        yield _device(cell, rank, PARTS[5])


def _device(cell: BlockCell, rank: int, fill: str) -> Markup:
    """One device."""
    box = tag(
        "rect",
        x=cell.x + 7,
        y=cell.y + 7,
        width=cell.width - 14,
        height=cell.height - 14,
        rx=5,
        fill=fill,
        stroke=INK,
        stroke_width=0.8,
    )
    return join(box, centred(*cell.centre, str(rank)))


def mesh_text(mesh: Mesh) -> str:
    """The mesh as tables of ranks."""
    lines = _tables(_directions(mesh), lambda index: str(_rank_at(mesh, index)))
    return "\n".join([*lines, *_mesh_notes(mesh)])


# --- a collective ----------------------------------------------------------------------------

BULGE = 24.0
"""The pixels by which an arrow bends around the devices between its ends."""

HEAD = tag(
    "defs",
    tag(
        "marker",
        tag("path", d="M0 0L8 4L0 8z", fill=INK),
        id="head",
        markerWidth=8,
        markerHeight=8,
        refX=7,
        refY=4,
        markerUnits="userSpaceOnUse",
        orient="auto-start-reverse",
    ),
)
Pair = tuple[int, int]


def pairs(kind: str, members: Sequence[int]) -> list[Pair]:
    """Pairs of sender and receiver in a group: around a ring, or all to all for an all_to_all."""
    if kind == "all_to_all":
        return list(itertools.combinations(members, 2))
    if len(members) == 2 and kind == "all_reduce":
        return [(members[0], members[1])]
    return list(itertools.pairwise([*members, members[0]])) if len(members) > 1 else []


def collective_picture(
    mesh: Mesh, kind: str, groups: Sequence[Sequence[int]], sends: Sequence[Pair], note: str
) -> Markup:
    """The mesh with its groups in colours, and an arrow for each pair of `sends`."""
    grid = PanelGrid.of(_directions(mesh), ROOMY)
    cells = {rank: c for c in grid.cells() if (rank := _rank_at(mesh, c.index)) is not None}
    colours = {r: colour(i) for i, group in enumerate(groups) for r in group}
    lines = join(*_arrows(kind, sends, cells))
    boxes = join(*(_device(_inner(c), r, colours[r]) for r, c in cells.items()), *_gaps(mesh, grid))
    said = wrapped((note,), max(grid.width, 250))
    below = lines_of_text(0, grid.height + GAP + 8, said)
    width = max(grid.width, *(width_of(t, 11) for t in said))
    height = grid.height + GAP + 15 * len(said)
    return card(width, height, HEAD, grid.labels(), boxes, lines, below)


def _inner(cell: BlockCell) -> BlockCell:
    """The box of a device, with room for arrows around it."""
    return BlockCell(cell.x + 9, cell.y + 9, cell.width - 18, cell.height - 18, cell.index)


def _gaps(mesh: Mesh, grid: PanelGrid) -> Iterator[Markup]:
    """Dots in place of omitted devices."""
    for cell in grid.cells():
        if _rank_at(mesh, cell.index) is None:
            yield centred(*cell.centre, "…")


def _arrows(kind: str, sends: Sequence[Pair], cells: dict[int, BlockCell]) -> Iterator[Markup]:
    for source, target in sends:
        if source in cells and target in cells and source != target:
            both = kind in ("all_reduce", "all_to_all")
            yield _arrow(cells[source], cells[target], both, kind == "reduce_scatter")


def _arrow(source: BlockCell, target: BlockCell, both: bool, dashed: bool) -> Markup:
    return tag(
        "path",
        d=_path(source, target),
        fill="none",
        stroke=INK,
        stroke_width=1.4,
        stroke_dasharray="4 2" if dashed else None,
        marker_end="url(#head)",
        marker_start="url(#head)" if both else None,
    )


def _path(source: BlockCell, target: BlockCell) -> str:
    """The path of an arrow: straight between neighbours, else bent around the devices between."""
    (x0, y0), (x1, y1) = source.centre, target.centre
    half_width, half_height = source.width / 2 - 16, source.height / 2 - 16
    across, down = x1 - x0, y1 - y0
    if abs(down) < 1:
        if 0 < across <= source.width + GAP + 1 or 0 > across >= -(source.width + GAP + 1):
            side, shift = (half_width if across > 0 else -half_width), (4 if across < 0 else -4)
            return _straight(x0 + side, y0 + shift, x1 - side, y1 + shift)
        y = y0 + half_height
        return _bent(x0, y, x1, y, 0, BULGE * 0.8)
    if abs(across) < 1:
        if abs(down) <= source.height * 1.8:
            side, shift = (half_height if down > 0 else -half_height), (4 if down < 0 else -4)
            return _straight(x0 + shift, y0 + side, x1 + shift, y1 - side)
        x = x0 + half_width
        return _bent(x, y0, x, y1, BULGE, 0)
    right, below = (1 if across > 0 else -1), (1 if down > 0 else -1)
    start = (x0 + right * half_width * 0.8, y0 + below * half_height)
    end = (x1 - right * half_width * 0.8, y1 - below * half_height)
    return _straight(*start, *end)


def _straight(x0: float, y0: float, x1: float, y1: float) -> str:
    return f"M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"


def _bent(x0: float, y0: float, x1: float, y1: float, right: float, below: float) -> str:
    controls = f"{x0 + right:.1f} {y0 + below:.1f} {x1 + right:.1f} {y1 + below:.1f}"
    return f"M{x0:.1f} {y0:.1f}C{controls} {x1:.1f} {y1:.1f}"


# --- memory ----------------------------------------------------------------------------------

WIDTH, HEIGHT, STEP = 380.0, 20.0, 30.0


def kinds_held(rows: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """The kinds that any row has; `rows` maps a title to the `memory` of a report."""
    return tuple(k for k in KINDS if any(at_peak(row)[k] for row in rows.values()))


def memory_table(rows: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """The header and a line for each row: every kind, and the total."""
    kinds = kinds_held(rows)
    head = ["held per device", *(KINDS[k] for k in kinds), "at most"]
    return [head] + [
        [title, *(human(at_peak(row)[k]) for k in kinds), human(row["peak"])]
        for title, row in rows.items()
    ]


def memory_picture(rows: Mapping[str, Mapping[str, int]]) -> Markup:
    """A bar for each row, to one scale, with its total."""
    kinds = kinds_held(rows)
    left = max(width_of(title) for title in rows) + 10
    most = max(1, *(row["peak"] for row in rows.values()))
    top = 24.0
    entries, right = legend({KINDS[kind]: MEMORY[kind] for kind in kinds})
    parts = [entries]
    for number, (title, row) in enumerate(rows.items()):
        y = top + number * STEP
        parts.append(words(0, y + 14, title))
        parts.append(_bar(kinds, row, left, y, WIDTH / most))
        end = left + WIDTH * row["peak"] / most + 8
        parts.append(words(end, y + 14, human(row["peak"]), fill=SOFT))
    return card(max(left + WIDTH + 80, right), top + STEP * len(rows), *parts)


def _bar(
    kinds: Sequence[str], row: Mapping[str, int], left: float, y: float, scale: float
) -> Markup:
    parts, x, amounts = [], left, at_peak(row)
    for kind in kinds:
        width = amounts[kind] * scale
        parts.append(_filled(kind, x=x, y=y, width=width, height=HEIGHT))
        x += width
    return join(*parts)


def _filled(kind: str, **place: Attribute) -> Markup:
    return tag("rect", fill=MEMORY[kind], stroke=INK, stroke_width=0.6, **place)
