"""A curve over the steps of a training run, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.report.html import Markup, tag
from meshdsl.report.palette import CURVE, EDGE, SOFT
from meshdsl.report.pictures import card, width_of, words

WIDTH, HEIGHT = 420.0, 140.0
"""The size of the curve in pixels, without its labels."""

MOST = 400
"""The number of points that are drawn: of longer runs, evenly chosen steps."""


def curve_picture(name: str, values: Sequence[float], first: int = 1) -> Markup:
    """The finite ones of `values` over the steps from `first` on, each axis from least to most."""
    points = [(first + i, v) for i, v in enumerate(values) if math.isfinite(v)]
    points = points[:: max(1, len(points) // MOST)] + points[-1:]
    low, high = (f(v for _, v in points) for f in (min, max)) if points else (0.0, 1.0)
    labels = (f"{high:.4g}", f"{low:.4g}")
    left, top = max(map(width_of, labels)) + 8, 22.0
    across = WIDTH / max(1, len(values) - 1)
    up = HEIGHT / (high - low or 1.0)
    drawn = " ".join(
        f"{left + (step - first) * across:.1f},{top + (high - value) * up:.1f}"
        for step, value in points
    )
    last = str(first + len(values) - 1)
    small: Mapping[str, Any] = {"fill": SOFT, "font_size": 11}
    return card(
        left + WIDTH + 4,
        top + HEIGHT + 18,
        words(left, 11, f"{name} over the steps"),
        tag("rect", x=left, y=top, width=WIDTH, height=HEIGHT, fill="none", stroke=EDGE),
        tag("polyline", points=drawn, fill="none", stroke=CURVE, stroke_width=1.5),
        *(words(0, top + y, text, **small) for y, text in zip((8, HEIGHT), labels, strict=True)),
        words(left, top + HEIGHT + 14, str(first), **small),
        words(left + WIDTH - width_of(last, 11), top + HEIGHT + 14, last, **small),
    )
