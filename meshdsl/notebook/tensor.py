"""A tensor coloured by who holds what, as a picture and as text. Dims beyond four are told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from meshdsl.notebook.grid import GAP, NOWHERE, Cell, Direction, Grid, Index
from meshdsl.notebook.held import Holding
from meshdsl.notebook.look import (
    BACK,
    INK,
    card,
    centred,
    colour,
    lines_of_text,
    shown,
    width_of,
    wrapped,
)
from meshdsl.notebook.svg import Attribute, Markup, drawing, join, tag

DIMS = 4
STACK = 4.0
"""Pixels by which a copy stands out behind the block in front."""

WIDEST = 150.0
"""Pixels that a block may take for its label."""

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


def drawn_dims(held: Holding, most: int = DIMS) -> tuple[str, ...]:
    """The dims that are drawn, in order: at most `most`, those that are split before the others."""
    split = [d for d in held.dims if held.parts(d) > 1]
    chosen = list(dict.fromkeys([*split, *reversed(held.dims)]))[:most]
    return tuple(d for d in held.dims if d in chosen)


def notes(held: Holding) -> tuple[str, ...]:
    """What a picture says below: copies, parts of a value, and dims that are not drawn."""
    left = [d for d in held.dims if d not in drawn_dims(held)]
    if not left:
        return held.notes
    said = (f"{d} ({held.parts(d)} parts)" if held.parts(d) > 1 else f"{d} (whole)" for d in left)
    return (*held.notes, f"not drawn: {', '.join(said)}")


# --- the picture -----------------------------------------------------------------------------


def picture(held: Holding) -> Markup:
    """The tensor as a drawing: blocks with the devices that hold them."""
    dims = drawn_dims(held)
    labels = map(held.label, held.holders(dims).values())
    widest = max(width_of(label) for label in labels) + 16
    grid = Grid.of([_direction(held, d) for d in dims], least=min(widest, WIDEST))
    depth = STACK * _behind(held)
    said = wrapped(notes(held), max(grid.width + depth, 250))
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


def _blocks(held: Holding, grid: Grid, dims: tuple[str, ...]) -> Iterator[Markup]:
    holders = held.holders(dims)
    colours = {block: colour(ranks[0]) for block, ranks in holders.items()}
    for cell in grid.cells():
        if cell.left_out:
            yield _left_out(cell)
            continue
        block = _block_of(cell.index, dims)
        yield _block(
            held, cell, colours[block], held.label(holders[block], cell.room - _behind(held))
        )


def _block_of(index: Index, dims: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(n for n in index[len(index) - len(dims) :] if n is not None)


def _block(held: Holding, cell: Cell, fill: str, label: str) -> Markup:
    """A block, its copies behind it, hatched where it is a part of a sum."""
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


def _left_out(cell: Cell) -> Markup:
    return centred(*cell.centre, "…")


# --- the same as text ------------------------------------------------------------------------


def text(held: Holding) -> str:
    """The same as tables of text, one for each panel."""
    dims = drawn_dims(held)
    holders = held.holders(dims)

    def label(index: Index) -> str:
        return held.label(holders[_block_of(index, dims)], 24)

    return "\n".join([*tables([_direction(held, d) for d in dims], label), *notes(held)])


def tables(directions: list[Direction], label: Callable[[Index], str]) -> Iterator[str]:
    """Lines of text for blocks in up to four directions, the last of them across."""
    found = (*[NOWHERE] * (4 - len(directions)), *directions)
    *outer, rows, columns = found
    for panel in itertools.product(*(d.numbers for d in outer)):
        said = [d.part(n) for d, n in zip(outer, panel, strict=True) if d.ticked]
        yield from [f"{', '.join(said)}:"] if said else []
        table = [["", *(columns.part(n) for n in columns.numbers)]]
        for row in rows.numbers:
            cells = ((*panel, row, c) for c in columns.numbers)
            table.append([rows.part(row), *("…" if None in c else label(c) for c in cells)])
        yield from aligned([line for line in table if any(line)])


def aligned(table: list[list[str]]) -> Iterator[str]:
    """Columns below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if not widths[0]:
        table, widths = [line[1:] for line in table], widths[1:]
    for line in table:
        cells = (f"{t:{w}}" for t, w in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


# --- small, for a line of a table ------------------------------------------------------------


def thumbnail(held: Holding) -> Markup:
    """The blocks alone, very small: rows and columns of two dims, those that are split first."""
    *_, rows, columns = ("", "", *drawn_dims(held, 2))
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
