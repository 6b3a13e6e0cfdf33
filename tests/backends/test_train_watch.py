"""Watching `device` statement by statement: loops, several lines, what is done in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshdsl.backends.engines.in_process import load
from meshdsl.backends.train.nan_search import NonFiniteWatch, statements_of
from tests.backends.training_text import training_text

TABLES = "INPUTS = PARAMS = STATES = OUTPUTS = {}"


def watched(body: str, **inputs: torch.Tensor) -> tuple[NonFiniteWatch, int]:
    """A watch that has seen one call, and the line before the body."""
    text = training_text(body, TABLES).text
    watch = NonFiniteWatch(load(text), text)
    watch.device(0, {}, inputs, {"w": inputs.get("w", torch.ones(2))}, {})
    above = text.split("\n").index("def device(rank, groups, inputs, params, states):") + 1
    return watch, above


CASES: dict[str, tuple[str, list[tuple[int, str, str]]]] = {
    "fine": ("x = inputs['x']\ny = x * 2\nreturn {'y': y}", []),
    "born once, carried on": (
        "x = inputs['x']\ny = x / 0\nz = y + 1\nreturn {'z': z}",
        [(2, "y", "inf")],
    ),
    "nan of infinities": (
        "x = inputs['x']\ny = x / 0\nz = y - y\nreturn {'z': z}",
        [(2, "y", "inf"), (3, "z", "nan")],
    ),
    "several lines": (
        "x = inputs['x']\ny = torch.div(\n    x,\n    0,\n)\nz = y.sum()\nreturn {'z': z}",
        [(2, "y", "inf")],
    ),
    "a tuple": (
        "x = inputs['x']\ny, z = x + 1, x / 0\nreturn {'z': z}",
        [(2, "z", "inf")],
    ),
    "in place": (
        "x = inputs['x'].clone()\nx.div_(0)\nx += 1\nreturn {'x': x}",
        [(2, "x", "inf")],
    ),
    "in a loop": (
        "x = inputs['x']\nfor i in range(4):\n    x = x / (2 - i)\n    y = x + 1\nreturn {'y': y}",
        [(3, "x", "inf")],
    ),
    "a mask": (
        "x = inputs['x']\ny = x.masked_fill(x > 0, float('-inf'))\nreturn {'y': y}",
        [],
    ),
    "an input": ("x = inputs['bad']\ny = x + 1\nreturn {'y': y}", [(1, "x", "nan")]),
    "a parameter": ("w = params['w'] * 1\nreturn {'w': w}", []),
    "a comprehension": (
        "x = inputs['x']\nys = [x / 0 for _ in range(3)]\ny = ys[0] * 1\nreturn {'y': y}",
        [(3, "y", "inf")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_where_values_stop_being_finite(case):
    body, expected = CASES[case]
    given = {"x": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}
    watch, above = watched(body, **given, w=torch.tensor([1.0, float("inf")]))
    found = [(f.line - above, f.name, f.value) for f in watch.findings]
    assert found == expected
    assert all(
        f.given == ("inputs" in body.split("\n")[f.line - above - 1]) for f in watch.findings
    )


def test_the_counter_of_a_loop_is_kept():
    watch, _ = watched(CASES["in a loop"][0], x=torch.ones(2))
    assert [finding.loops["i"] for finding in watch.findings] == [2]


def test_what_happens_in_good_steps_is_not_the_first():
    body = "x = inputs['x']\nz = x / 0\ny = x / x\nreturn {'y': y}"
    watch, above = watched(body, x=torch.ones(2))
    watch.went_well()
    assert watch.first() is None
    watch.device(0, {}, {"x": torch.zeros(2)}, {}, {})
    first: Any = watch.first()
    assert (first.line - above, first.name, first.value) == (3, "y", "nan")


def test_every_line_of_a_statement_stands_for_it():
    text = training_text(CASES["several lines"][0], TABLES).text
    found = statements_of(text)
    lines = [line for line, statement in found.items() if statement.writes == ("y",)]
    assert len(lines) == 4
    assert len({found[line].line for line in lines}) == 1
