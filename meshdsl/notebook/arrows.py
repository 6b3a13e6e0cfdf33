"""Collectives drawn on the mesh: arrows between the devices of each group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meshdsl.notebook.grid import GAP, Cell, Grid
from meshdsl.notebook.look import INK, card, centred, colour, lines_of_text, width_of, wrapped
from meshdsl.notebook.mesh import device, directions, rank_at
from meshdsl.notebook.svg import Markup, join, tag
from meshdsl.placed.sbp import Mesh

CELL = (76.0, 60.0)
BULGE = 24.0
"""Pixels by which an arrow bends around the devices between its ends."""

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
    """Who sends to whom in a group: around a ring, or in an all_to_all each to each."""
    if kind == "all_to_all":
        return list(itertools.combinations(members, 2))
    if len(members) == 2 and kind == "all_reduce":
        return [(members[0], members[1])]
    return list(itertools.pairwise([*members, members[0]])) if len(members) > 1 else []


def both_ways(kind: str) -> bool:
    """Whether an arrow has two heads."""
    return kind in ("all_reduce", "all_to_all")


def picture(
    mesh: Mesh, kind: str, groups: Sequence[Sequence[int]], sends: Sequence[Pair], note: str
) -> Markup:
    """The mesh with its groups in colours, and an arrow for each pair of `sends`."""
    grid = Grid.of(directions(mesh), CELL)
    cells = {rank: c for c in grid.cells() if (rank := rank_at(mesh, c.index)) is not None}
    colours = {r: colour(i) for i, group in enumerate(groups) for r in group}
    lines = join(*_arrows(kind, sends, cells))
    boxes = join(*(_device(c, r, colours) for r, c in cells.items()), *_gaps(mesh, grid))
    said = wrapped((note,), max(grid.width, 250))
    below = lines_of_text(0, grid.height + GAP + 8, said)
    width = max(grid.width, *(width_of(t, 11) for t in said))
    height = grid.height + GAP + 15 * len(said)
    return card(width, height, HEAD, grid.labels(), boxes, lines, below)


def _device(cell: Cell, rank: int, colours: dict[int, str]) -> Markup:
    return device(_inner(cell), rank, colours[rank])


def _inner(cell: Cell) -> Cell:
    """The box of a device, with room for arrows around it."""
    return Cell(cell.x + 9, cell.y + 9, cell.width - 18, cell.height - 18, cell.index)


def _gaps(mesh: Mesh, grid: Grid) -> Iterator[Markup]:
    """Dots where devices are left out."""
    for cell in grid.cells():
        if rank_at(mesh, cell.index) is None:
            yield centred(*cell.centre, "…")


def _arrows(kind: str, sends: Sequence[Pair], cells: dict[int, Cell]) -> Iterator[Markup]:
    for source, target in sends:
        if source in cells and target in cells and source != target:
            yield _arrow(cells[source], cells[target], both_ways(kind), kind == "reduce_scatter")


def _arrow(source: Cell, target: Cell, both: bool, dashed: bool) -> Markup:
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


def _path(source: Cell, target: Cell) -> str:
    """Straight between neighbours; bent around the devices between others of a row or column."""
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
