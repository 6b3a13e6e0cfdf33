"""Several windows of one tensor: one exchange of their hull serves all readers under `optimal`."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

import pytest

from meshdsl.diagnostics import Source
from tests.placed.test_search import hold_to_prediction
from tests.programs.harness import Case, run_case

ROW = 3 * 4
"""Bytes of a row of `t`."""


CASES = int(os.environ.get("MESHDSL_CASES", "6"))


@dataclass(frozen=True)
class Reader:
    """An operator on `t` that reads `before` rows before each position, and `after` behind it."""

    text: str
    before: int
    after: int


def reader(rng: random.Random, number: int) -> Reader:
    """One of the operators that may read a window at every row."""
    width, half = rng.choice((2, 3, 4)), rng.choice((1, 2))
    odd, at = 2 * half + 1, rng.randrange(width)
    return rng.choice(
        (
            Reader(f"shift[seq](t, {width})", width, 0),
            Reader(f"shift[seq](t, {-width})", 0, width),
            Reader(f'max_pool[seq by {odd}](t, stride=1, pad="same")', half, half),
            Reader(f'avg_pool[seq by {odd}](t, stride=1, pad="same")', half, half),
            Reader(f'conv[seq by k{odd}](t, p{number}_{odd}, pad="same")', half, half),
            Reader(
                f"sum[k{width}](square(window[seq by {width} -> k{width}](t, before={at})))",
                at,
                width - 1 - at,
            ),
        )
    )


def case(readers: list[Reader]) -> Case:
    """A program with a result for each reader."""
    kernels = [f"param p{i}_{k}[k{k}]" for i in range(len(readers)) for k in (3, 5)]
    used = [line for line in kernels if any(line[6:10] in r.text for r in readers)]
    results = [f"y{i}" for i in range(len(readers))]
    lines = [f"{y} = {r.text}" for y, r in zip(results, readers, strict=True)]
    body = "\n  ".join([*used, "t = relu(x)", *lines, f"return {', '.join(results)}"])
    dims = "dim seq = 16, model = 3, k2 = 2, k3 = 3, k4 = 4, k5 = 5"
    text = f"{dims}\nprogram p(x[seq, model]) {{\n  {body}\n}}\n"
    return Case(text, "r:4", "{ seq -> r }", "optimal", message_bytes=0)


def drawn(number: int) -> list[Reader]:
    rng = random.Random(number)
    return [reader(rng, i) for i in range(rng.choice((2, 3)))]


@pytest.mark.parametrize("number", range(CASES))
def test_a_device_sends_what_the_widest_reach_on_each_side_needs(number: int) -> None:
    readers = drawn(number)
    found = run_case(case(readers)).report["totals"]["wire_bytes"]
    assert found == ROW * (max(r.before for r in readers) + max(r.after for r in readers))


@pytest.mark.parametrize("number", range(CASES))
def test_that_is_what_the_plan_predicts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(drawn(number))
    options = replace(made.options, message_bytes=1000, cache=False)
    hold_to_prediction(Source(made.name, made.source_text), options, monkeypatch)


APART = """
dim seq = 16, half = 8, model = 3, k = 3
program p(x[seq, model]) {
  param w[k]
  t = relu(x)
  a = conv[seq by k](t, w, pad="same")
  b = conv[seq by k -> half](t, w, stride=2, pad=1)
  c = roll[seq](t, 1)
  d = conv[seq by k](t, w, pad="same", dilation=2)
  return a, b, c, d
}
"""


def test_windows_of_other_steps_are_exchanged_apart() -> None:
    """At every second position, or around the ends: their blocks have no hull."""
    found = run_case(Case(APART, "r:4", "{ seq -> r, half -> r }", "optimal", message_bytes=0))
    sent = sorted(c["wire_bytes"] // ROW for c in found.report["collectives"])
    assert sent == [1, 1, 4]
