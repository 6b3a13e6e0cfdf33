"""Right and wrong answers to the exercises of notebooks 9 and 10: three of each."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

Answer = dict[str, Any]
Answers = dict[tuple[str, int], tuple[list[Answer], list[Answer]]]


def each(names: tuple[str, ...], *rows: tuple[Any, ...]) -> list[Answer]:
    """An answer for each row: its values by name."""
    return [dict(zip(names, row, strict=True)) for row in rows]


TIMES = ("gather_x", "gather_xy", "reduce_z")
CHIPS = ("most_x", "most_y")
BUBBLES = ("under_1f1b", "interleaved")

BASE = ["tokens -> x", "hidden -> y", "params: model -> x", "grads: model -> x"]
STREAM = ["y: model -> y", "target: model -> y"]
SPACE = ("layouts", "plans")

ANSWERS: Answers = {
    ("09", 0): (
        each(("rows_needed",), (319,), (319.0,), (318.2,)),
        each(("rows_needed",), (295,), (4096,), (0,)),
    ),
    ("09", 1): (
        each(TIMES, (23.3, 46.6, 11.65), (23, 46, 11.7), (23.30169, 46.60338, 11.65084)),
        each(TIMES, (23, 46, 190), (23.3, 46.6, 5.83), (93.2, 93.2, 11.65)),
    ),
    ("09", 2): (
        each(CHIPS, (4934, 11), (4934.0, 11.0), (math.floor(4194304 / 850), 28672 // 2550)),
        each(CHIPS, (8960, 11), (4934, 12), (1644, 33)),
    ),
    ("09", 3): (
        each(
            ("order",),
            (["pipe", "data", "tp"],),
            (["data", "pipe", "tp"],),
            ("pipe data tp".split(),),
        ),
        each(("order",), (["tp", "data", "pipe"],), (["data", "tp", "pipe"],), (["data", "tp"],)),
    ),
    ("09", 4): (
        each(
            BUBBLES, (63 / 575, 63 / 1087), (0.1096, 0.058), (Fraction(63, 575), Fraction(63, 1087))
        ),
        each(BUBBLES, (63 / 575, 63 / 575), (63 / 64, 0.058), (63 / 3135, 63 / 6207)),
    ),
    ("10", 0): (
        each(SPACE, (125, 125**20), (5**3, 5**60), (125.0, 125**20)),
        each(SPACE, (12, 240), (64, 64**20), (125, 20 * 125)),
    ),
    ("10", 1): (
        each(
            ("better",),
            (lambda p, i, n: "data" if p < i * n else "tensor",),
            (lambda p, i, n: ("data", "tensor")[p > n * i],),
            (lambda p, i, n: "tensor" if n < p / i else "data",),
        ),
        each(
            ("better",),
            (lambda p, i, n: "data",),
            (lambda p, i, n: "data" if p < 1e7 else "tensor",),
            (lambda p, i, n: "data" if p < i else "tensor",),
        ),
    ),
    ("10", 2): (
        each(
            ("mine",),
            ([*BASE, *STREAM],),
            ([*BASE, "y: model -> y"],),
            ([*BASE, *STREAM, "x: model -> y"],),
        ),
        each(
            ("mine",),
            (BASE,),
            (["tokens -> (x, y)"],),
            ([*BASE, "tokens -> y"],),
        ),
    ),
    ("10", 3): (
        each(("milliseconds",), (19.09,), (19.0,), (19.2,)),
        each(("milliseconds",), (47,), (9,), (16,)),
    ),
}
"""What an exercise gives values to, right and wrong, by notebook and exercise."""
