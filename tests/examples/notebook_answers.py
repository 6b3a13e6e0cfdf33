"""Right and wrong answers to exercises of notebooks 1 to 5, 9 and 10: three of each."""

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
STORED = ("with_tp", "with_sp", "selective")
CHIPS = ("most_x", "most_y")
BUBBLES = ("under_1f1b", "interleaved")

BASE = ["tokens -> x", "hidden -> y", "params: model -> x", "grads: model -> x"]
STREAM = ["y: model -> y", "target: model -> y"]
SPACE = ("layouts", "plans")
BOUNDS = ("tokens_one_axis", "tokens_three_axes")


def by_position(*rows: str) -> list[Answer]:
    """Signatures of `wq`, `wk`, `wv` and `wo`, one digit each."""
    names = ("wq", "wk", "wv", "wo")
    return [{"signatures": {n: f"S({d})" for n, d in zip(names, r, strict=True)}} for r in rows]


ANSWERS: Answers = {
    ("01", 0): (
        each(
            ("tall",),
            ({"cols": ("a", "b")},),
            ({"cols": ("b", "a")},),
            ({"rows": None, "cols": ("a", "b")},),
        ),
        each(
            ("tall",), ({"rows": ("a", "b")},), ({"cols": "a", "rows": "a"},), ({"columns": "a"},)
        ),
    ),
    ("01", 3): (
        each(
            ("layout",),
            ("layout mine { rows -> b, cols -> a }",),
            ("layout mine { cols -> a, rows -> b }",),
            ("layout mine {\n  cols -> a\n  x: rows -> b\n  y: rows -> b\n}",),
        ),
        each(
            ("layout",),
            ("layout mine { rows -> a, cols -> b }",),
            ("layout mine { rows -> b }",),
            ("",),
        ),
    ),
    ("02", 1): (
        each(
            ("passes",),
            ({"negate", "double", "transpose", "sum of rows"},),
            (["transpose", "double", "negate", "sum of rows"],),
            (frozenset({"negate", "double", "sum of rows", "transpose"}),),
        ),
        each(
            ("passes",),
            ({"negate", "double"},),
            ({"negate", "double", "transpose", "sum of rows", "relu"},),
            (set(),),
        ),
    ),
    ("02", 2): (
        each(("largest",), (60,), (60.0,), (64 - 4,)),
        each(("largest",), (64,), (63,), (0,)),
    ),
    ("02", 3): (
        each(("least_d",), (5100,), (2 * 4.59e14 / 1.8e11,), (5101,)),
        each(("least_d",), (10_200,), (850,), (5000,)),
    ),
    ("02", 4): (
        each(
            ("block_to_send",),
            (lambda d, step, n: (d - step) % n,),
            (lambda d, step, n: (d + n - step) % n,),
            (lambda d, step, n: d - step if d >= step else d - step + n,),
        ),
        each(
            ("block_to_send",),
            (lambda d, step, n: d - step,),
            (lambda d, step, n: (d + step) % n,),
            (lambda d, step, n: step,),
        ),
    ),
    ("03", 1): (
        each(("turning_point",), (2048,), (2 * 1024,), (2048.0,)),
        each(("turning_point",), (1024,), (512,), (0,)),
    ),
    ("03", 2): (
        [
            {"choice": z}
            for z in ("zero1", "zero2", "md.layout('state: model -> data', extends=zero0)")
        ],
        [
            {"choice": z}
            for z in ("zero0", "zero3", "md.layout('params: model -> data', extends=zero0)")
        ],
    ),
    ("03", 3): (
        each(BOUNDS, (2550, 850), (2550.0, 850.0), (2551, 851)),
        each(BOUNDS, (2550, 2550), (850, 2550), (5100, 1700)),
    ),
    ("04", 3): (
        each(STORED, (23, 14.25, 4.25), (23.0, 114 / 8, 34 / 8), (23.02, 14.2, Fraction(17, 4))),
        each(STORED, (14.25, 14.25, 4.25), (93, 24.25, 4.25), (23, 14.25, 0)),
    ),
    ("05", 0): (
        each(
            ("as_sbp",),
            ({"x": "S(0), B", "w1": "S(0), S(1)", "w2": "S(1), S(0)"},),
            (dict(w2="S(1), S(0)", w1="S(0), S(1)", x="S(0), B"),),
            ({"x": "S(0),B", "w1": "S(0),S(1)", "w2": "S(1),S(0)", "y": "S(0),B"},),
        ),
        each(
            ("as_sbp",),
            ({"x": "S(0), B", "w1": "S(0), S(1)", "w2": "S(0), S(1)"},),
            ({"x": "S(0), B", "w1": "S(1), S(0)", "w2": "S(0), S(1)"},),
            ({"x": "S(0), S(2)", "w1": "S(0), S(1)", "w2": "S(1), S(0)"},),
        ),
    ),
    ("05", 1): (
        each(
            ("layout",),
            (["m -> row", "n -> col", "a: k -> col", "b: k -> row"],),
            (["b: k -> row", "a: k -> col", "n -> col", "m -> row"],),
            ("m -> row, n -> col, a: k -> col, b: k -> row",),
        ),
        each(
            ("layout",),
            (["m -> row", "n -> col", "a: k -> col"],),
            (["m -> row", "n -> col", "k -> col"],),
            (["m -> col", "n -> row", "a: k -> row", "b: k -> col"],),
        ),
    ),
    ("05", 2): (
        by_position("1110", "1110", "1110"),
        by_position("0001", "1111", "3110"),
    ),
    ("05", 3): (
        each(
            ("hurry",),
            ("layout hurry { batch -> data, hidden -> tp }",),
            ("layout hurry { hidden -> tp, batch -> data }",),
            ("layout hurry { batch -> data, hidden -> tp, model -> none }",),
        ),
        each(
            ("hurry",),
            ("layout hurry { batch -> data, model -> tp }",),
            ("layout hurry { batch -> data, hidden -> tp, hiden -> tp }",),
            ("",),
        ),
    ),
    ("05", 4): (
        each(("rule",), ("y: seq -> tp",), ("y: seq->tp",), ("y: seq -> (tp)",)),
        each(("rule",), ("y: model -> tp",), ("y: sequence -> tp",), ("y: seq -> data",)),
    ),
    ("09", 0): (
        each(("rows_needed",), (319,), (319.0,), (318.2,)),
        each(("rows_needed",), (295,), (4096,), (0,)),
    ),
    ("09", 1): (
        each(TIMES, (23.3, 46.6, 11.65), (23, 46, 11.7), (23.30169, 46.60338, 11.65084)),
        each(TIMES, (23, 46, 190), (23.3, 46.6, 5.83), (23.3e-6, 46.6e-6, 11.65e-6)),
    ),
    ("09", 2): (
        each(CHIPS, (4934, 11), (4934.0, 11.0), (math.floor(4194304 / 850), 28672 // 2550)),
        each(CHIPS, (8960, 11), (4934, 12), (4933.9, 11.2)),
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
        each(SPACE, (125, 125**20), (5**3, 5**60), (125.0, 125.0**20)),
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
        each(("milliseconds",), (47,), (16,), (-1,)),
    ),
}
"""What an exercise gives values to, right and wrong, by notebook and exercise."""
