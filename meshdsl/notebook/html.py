"""What tables in notebooks share. Text takes its colour from the theme; tints suit any theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshdsl.notebook.look import MONO
from meshdsl.notebook.svg import Child, Markup, join, tag

Json = dict[str, Any]
TINTS = (
    "rgba(31,119,214,.28)",
    "rgba(240,150,20,.30)",
    "rgba(50,165,70,.28)",
    "rgba(160,90,200,.28)",
    "rgba(225,80,80,.28)",
    "rgba(20,165,160,.30)",
)
"""Backgrounds of what is split over the axes of a mesh; light or dark text can be read on them."""

TABLE = "border-collapse:collapse;text-align:left;margin:4px 0;font-size:13px"
ROW = "background:none;border:none"
CELL = "text-align:left;vertical-align:middle;padding:2px 8px;max-width:none;white-space:pre-wrap"
SENT = f"{CELL};background:rgba(240,170,0,.14);border-left:3px solid rgb(201,133,0)"
DIFFERS = f"{CELL};background:rgba(240,110,20,.20)"
LINE = f"{CELL};border-top:1px solid rgba(127,127,127,.4)"
CODE = f"font-family:{MONO};font-size:13px;background:none;padding:0"
LINES = f"{CODE};white-space:pre;overflow-x:auto"
PAGE = "overflow-x:auto;font-size:13px"


def plain_row(*cells: Markup) -> Markup:
    """A row without the stripes of the notebook."""
    return tag("tr", *cells, style=ROW)


def small(text: Child) -> Markup:
    """What matters less."""
    return tag("span", text, style="opacity:.75;font-size:12px")


def folded(head: Markup, details: Iterable[tuple[str, str]]) -> Markup:
    """A line that opens: pairs of a label and a text."""
    rows = (
        plain_row(tag("td", small(label), style=CELL), tag("td", text, style=CELL))
        for label, text in details
    )
    table = tag("table", tag("tbody", *rows), style=TABLE)
    return tag("details", tag("summary", head, style="cursor:pointer"), table)


def tint(axis: str, mesh: Mapping[str, int]) -> str:
    """The background that stands for an axis of a mesh."""
    return TINTS[list(mesh).index(axis) % len(TINTS)]


def split_dims(tensor: Json, mesh: Mapping[str, int]) -> Markup:
    """`f32[batch@rows 64→32, io 512]`, every split dim on the tint of its first axis."""
    sizes = zip(tensor["dims"], tensor["shape"], tensor["local_shape"], strict=True)
    dims = [_dim(d, n, local, tensor["order"].get(d, ()), mesh) for d, n, local in sizes]
    commas = [part for dim in dims for part in (", ", dim)][1:]
    partial = {a: c for a, c in tensor["placement"].items() if c.startswith("P")}
    tail = ""
    if partial:
        op = next(iter(partial.values()))[2:-1] or "sum"
        tail = f" a partial {op} over {', '.join(partial)}"
    return tag("code", f"{tensor['dtype']}[", *commas, "]", tag("b", tail), style=CODE)


def _dim(name: str, size: int, local: int, axes: Iterable[str], mesh: Mapping[str, int]) -> Markup:
    over = list(axes)
    if not over:
        return join(f"{name} {size}")
    at = over[0] if len(over) == 1 else f"({', '.join(over)})"
    style = f"background:{tint(over[0], mesh)};border-radius:3px;padding:0 3px"
    return tag("span", f"{name}@{at} {size}→{local}", style=style)
