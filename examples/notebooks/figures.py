"""Pictures that notebooks 9 and 10 draw: a `Plot` of curves and points on axes with numbers."""

from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

from course import LINES

LEFT, TOP, WIDTH, HEIGHT = 64, 30, 430, 230
"""The pixels left of the axes, above them, and of the box between them."""

Curve = dict[float, float]


class Figure:
    """A picture that a notebook shows and that slides take: `save` writes it."""

    def _repr_svg_(self) -> str:
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8", newline="\n")


class Axis:
    """Where a value is along an axis, from 0 to 1, and which values get a number."""

    def __init__(self, values: list[float], log: bool) -> None:
        self.log = log
        least, most = min(values), max(values)
        if log:
            self.ends = (log10(least), log10(most))
            self.ticks = decades(sorted(set(values)))
            return
        base = least if least > most / 2 else 0.0
        step = 10.0 ** floor(log10(most - base or 1))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (most - base) / s <= 7)
        first, last = floor(base / step + 1e-9), ceil(most / step - 1e-9)
        self.ends = (first * step, last * step)
        self.ticks = [n * step for n in range(first, last + 1)]

    def __call__(self, value: float) -> float:
        """The share of the axis that is before a value."""
        first, last = self.ends
        return ((log10(value) if self.log else value) - first) / (last - first)


def decades(values: list[float]) -> list[float]:
    """The numbers at a logarithmic axis: few values themselves, else powers of ten, or 1, 2, 5."""
    if len(values) <= 8 and all(b > 1.5 * a for a, b in pairwise(values)):
        return values
    least, most = values[0], values[-1]
    powers = [10.0**e for e in range(floor(log10(least)), ceil(log10(most)) + 1)]
    whole = [p for p in powers if least <= p <= most]
    if len(whole) < 3:
        whole = [m * p for p in powers for m in (1, 2, 5) if least <= m * p <= most]
    return whole[:: max(1, len(whole) // 6)] if len(whole) > 8 else whole


class Plot(Figure):
    """Curves and labelled points. `log` says which axes are logarithmic: "", "x", "y" or "xy".

    Curves are `y` by `x`, points `(x, y)` by label, and dots points without one. As text it
    is a list of the numbers.
    """

    def __init__(
        self,
        title: str,
        curves: dict[str, Curve],
        points: dict[str, tuple[float, float]] | None = None,
        x: str = "",
        y: str = "",
        log: str = "",
        dots: list[tuple[float, float]] | None = None,
    ) -> None:
        self.title, self.curves, self.points = title, curves, points or {}
        self.dots = dots or []
        self.x, self.y, self.log = x, y, log

    def __repr__(self) -> str:
        head = f"{self.title} ({self.x}: {self.y})"
        rows = [
            f"{name}: " + ", ".join(f"{x:.4g}: {y:.4g}" for x, y in each.items())
            for name, each in self.curves.items()
        ]
        rows += [f"{name}: {x:.4g}: {y:.4g}" for name, (x, y) in self.points.items()]
        rows += [f"{len(self.dots)} dots"] if self.dots else []
        return "\n".join([head, *rows])

    def _repr_svg_(self) -> str:
        every = [pair for each in self.curves.values() for pair in each.items()]
        every += [*self.points.values(), *self.dots]
        across = Axis([x for x, _ in every], "x" in self.log)
        up = Axis([y for _, y in every], "y" in self.log)

        def at(x: float, y: float) -> tuple[float, float]:
            return LEFT + across(x) * WIDTH, TOP + HEIGHT - up(y) * HEIGHT

        right, bottom = LEFT + WIDTH, TOP + HEIGHT
        parts = [text(LEFT, 16, self.title, "start", "#222222", "bold")]
        for tick in across.ticks:
            x = LEFT + across(tick) * WIDTH
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
            parts.append(text(x, bottom + 16, number(tick), "middle"))
        for tick in up.ticks:
            y = bottom - up(tick) * HEIGHT
            parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
            parts.append(text(LEFT - 6, y + 4, number(tick), "end"))
        box = f'x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(f'<rect {box} fill="none" stroke="#888888"/>')
        parts.append(text(LEFT + WIDTH / 2, bottom + 34, self.x, "middle"))
        turned = f'<g transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)">'
        parts.append(f"{turned}{text(0, 0, self.y, 'middle')}</g>")
        for a, b in (at(*dot) for dot in self.dots):
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="#9a9a9a"/>')
        for index, (name, each) in enumerate(self.curves.items()):
            colour = LINES[index % len(LINES)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in each.items()))
            stroke = f'fill="none" stroke="{colour}" stroke-width="2"'
            parts.append(f'<polyline points="{corners}" {stroke}/>')
            for a, b in (at(x, y) for x, y in each.items()):
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>')
            parts.append(text(right + 12, TOP + 14 + 18 * index, name, "start", colour))
        for name, place in self.points.items():
            a, b = at(*place)
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="#222222"/>')
            late = across(place[0]) > 0.8
            parts.append(text(a - 8 if late else a + 8, b + 4, name, "end" if late else "start"))
        wide = right + 24 + max((7 * len(name) for name in self.curves), default=0)
        frame = f'width="{wide}" height="{bottom + 44}" viewBox="0 0 {wide} {bottom + 44}"'
        font = 'font-family="sans-serif" font-size="12"'
        back = f'<rect width="{wide}" height="{bottom + 44}" fill="#ffffff"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {font}>{back}{"".join(parts)}</svg>'
        )


def text(
    x: float, y: float, words: str, anchor: str, colour: str = "#222222", weight: str = "normal"
) -> str:
    """A text of a picture."""
    look = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """A number on an axis: 2k, 0.5."""
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
