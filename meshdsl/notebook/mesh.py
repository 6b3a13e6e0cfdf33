"""A mesh with its devices, as a picture and as text. Axes beyond four are told, not drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshdsl.notebook.grid import GAP, Cell, Direction, Grid
from meshdsl.notebook.look import (
    BLOCKS,
    INK,
    card,
    centred,
    lines_of_text,
    width_of,
    wrapped,
)
from meshdsl.notebook.svg import Markup, join, tag
from meshdsl.notebook.tensor import tables
from meshdsl.placed.sbp import Mesh

AXES = 4
CELL = (56.0, 44.0)


def drawn_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that are drawn, in order: those with several devices before the others."""
    several = [a for a, n in mesh.axes if n > 1]
    chosen = list(dict.fromkeys([*several, *mesh.names]))[:AXES]
    return tuple(a for a in mesh.names if a in chosen)


def directions(mesh: Mesh) -> list[Direction]:
    """The axes as directions; the last varies fastest and goes across."""
    return [Direction(a, tuple(map(str, range(mesh.size(a))))) for a in drawn_axes(mesh)]


def rank_at(mesh: Mesh, index: Sequence[int | None]) -> int | None:
    """The rank at an index of the grid, 0 along axes that are not drawn; None: left out."""
    drawn = drawn_axes(mesh)
    numbers = index[len(index) - len(drawn) :]
    if None in numbers:
        return None
    at = dict(zip(drawn, numbers, strict=True))
    rank = 0
    for axis, size in mesh.axes:
        rank = rank * size + (at.get(axis) or 0)
    return rank


def notes(mesh: Mesh) -> tuple[str, ...]:
    """How many devices there are, and what is not drawn."""
    left = [f"{a}:{n}" for a, n in mesh.axes if a not in drawn_axes(mesh)]
    several = f"{mesh.devices:,} device{'s' if mesh.devices > 1 else ''}"
    return (several, *([f"not drawn: {', '.join(left)}"] if left else []))


def picture(mesh: Mesh) -> Markup:
    """The mesh as a drawing."""
    grid = Grid.of(directions(mesh), CELL)
    said = wrapped(notes(mesh), max(grid.width, 250))
    boxes = join(*_devices(mesh, grid))
    below = lines_of_text(0, grid.height + GAP + 8, said)
    width = max(grid.width, *(width_of(t, 11) for t in said))
    return card(width, grid.height + GAP + 15 * len(said), grid.labels(), boxes, below)


def _devices(mesh: Mesh, grid: Grid) -> Iterator[Markup]:
    """A box with its rank for every device."""
    for cell in grid.cells():
        rank = rank_at(mesh, cell.index)
        if rank is None:
            yield centred(*cell.centre, "…")
            continue
        yield device(cell, rank, BLOCKS[5])


def device(cell: Cell, rank: int, fill: str) -> Markup:
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


def text(mesh: Mesh) -> str:
    """The same as tables of ranks."""
    lines = tables(directions(mesh), lambda index: str(rank_at(mesh, index)))
    return "\n".join([*lines, *notes(mesh)])
