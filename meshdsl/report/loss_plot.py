"""The loss over the steps of a training run, drawn in characters: the end of `meshdsl train`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS, ROWS = 60, 8
FEWEST = 10
"""The fewest steps that are worth a plot."""

TRAINED, HELD_OUT = "*", "o"


class LossPlot:
    """Hears the events of a run, and draws its loss: of batches, and where it was held out."""

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._points: dict[str, list[tuple[int, float]]] = {TRAINED: [], HELD_OUT: []}

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the run."""
        kinds = {"step": TRAINED, "eval": HELD_OUT}
        if (sign := kinds.get(event["kind"])) and self._loss in event["values"]:
            self._points[sign].append((event["step"], float(event["values"][self._loss])))

    def lines(self) -> Iterator[str]:
        """The plot, each axis from least to most; no line of a run of fewer than `FEWEST` steps."""
        steps = [step for step, _ in self._points[TRAINED]]
        if len(steps) < FEWEST:
            return
        first, last = steps[0], steps[-1]
        columns = min(COLUMNS, len(steps))
        drawn = {s: _means(p, first, last, columns) for s, p in self._points.items()}
        heights = [height for means in drawn.values() for height in means.values()]
        if not heights:
            return
        low, high = min(heights), max(heights)
        grid = [[" "] * columns for _ in range(ROWS)]
        for sign, means in drawn.items():
            for column, height in means.items():
                down = (high - height) / (high - low or 1.0)
                grid[round(down * (ROWS - 1))][column] = sign
        held_out = f" ({TRAINED} trained on, {HELD_OUT} held out)" if drawn[HELD_OUT] else ""
        yield f"{self._loss} over steps {first} to {last}{held_out}:"
        yield from _framed(grid, f"{high:.4g}", f"{low:.4g}")


def _means(
    points: Sequence[tuple[int, float]], first: int, last: int, columns: int
) -> dict[int, float]:
    """The mean of the finite numbers in each column that has one."""
    numbers: dict[int, list[float]] = {}
    for step, value in points:
        if math.isfinite(value):
            column = (step - first) * columns // (last - first + 1)
            numbers.setdefault(column, []).append(value)
    return {column: sum(n) / len(n) for column, n in numbers.items()}


def _framed(grid: Sequence[Sequence[str]], high: str, low: str) -> Iterator[str]:
    width = max(len(high), len(low))
    labels = [high, *[""] * (len(grid) - 2), low]
    for label, row in zip(labels, grid, strict=True):
        yield f"{label:>{width}} |{''.join(row)}".rstrip()
