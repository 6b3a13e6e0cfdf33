"""Colours and measures of every picture: a card of its own, so that any theme can be around it."""

from __future__ import annotations

from meshdsl.notebook.svg import Child, Markup, drawing, join, tag

BACK, EDGE, INK, SOFT = "#fbfbfc", "#c9ced6", "#1b1f24", "#57606a"
BLOCKS = (
    "#9ecae9",
    "#ffd28f",
    "#a8d8a0",
    "#d7bde2",
    "#f5b7b1",
    "#cfd4da",
    "#f0e68c",
    "#9fdcd6",
)
"""What blocks and groups are filled with; `INK` can be read on each of them."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
MARGIN = 12.0
LETTER = 7.0
"""Pixels that a character of a label takes, generously."""

MOST = 8
"""Parts along one direction that are drawn; of more the first and the last."""


def colour(number: int) -> str:
    """The fill of a device or a block. Numbers that are 8 or 64 apart differ as well."""
    total = 0
    while number:
        number, rest = divmod(number, len(BLOCKS))
        total += rest
    return BLOCKS[total % len(BLOCKS)]


def card(width: float, height: float, *children: Child) -> Markup:
    """A drawing with a margin, on a background of its own."""
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
    """Text in a drawing; `y` is that of its line."""
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
    """Small text in lines of about `width` pixels."""
    import textwrap

    room = max(int(width / (LETTER * 11 / 12)), 36)
    return tuple(line for text in texts for line in textwrap.wrap(text, room))


def width_of(text: str, size: float = 12.0) -> float:
    """About how wide a text is, in pixels."""
    return len(text) * LETTER * size / 12


def shown(count: int) -> tuple[int | None, ...]:
    """The numbers that are drawn of 0 … count-1; None stands for those left out."""
    if count <= MOST:
        return tuple(range(count))
    return (*range(MOST - 2), None, count - 1)
