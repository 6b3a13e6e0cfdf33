"""The table of docs/published.md is what the command prints, and every row is within 15 %."""

from __future__ import annotations

import os

import pytest

from benchmarks.published import HEAD, ROWS, TOLERANCE, line
from tests.project import ROOT

PAGE = ROOT / "docs" / "published.md"
WRITES = "MESHDSL_UPDATE_GOLDEN" in os.environ
ALL = WRITES or "MESHDSL_CASES" in os.environ
CHEAP = ("llama-8b-h100-8", "llama-405b-h100-128", "gpt-1.7b-32", "gpt-39.1b-512")
"""A compiled step on one node, one in two dimensions, one without flash attention, a pipeline."""


def shown() -> dict[str, str]:
    """The lines of the table on the page, by row."""
    table = PAGE.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0]
    return {text.split("`")[1]: text for text in table.strip().splitlines()}


def test_the_page_has_every_row_and_each_is_near() -> None:
    assert list(shown()) == list(ROWS)
    for name, text in shown().items():
        off = text.split("|")[4].strip().removesuffix("%")
        assert abs(float(off)) <= 100 * TOLERANCE, name


@pytest.mark.parametrize("name", ROWS if ALL else CHEAP)
def test_the_page_shows_what_is_predicted_now(name: str) -> None:
    """With `MESHDSL_UPDATE_GOLDEN` the page is written anew, all rows of it."""
    now, before = line(ROWS[name]), shown()[name]
    if WRITES:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(before, now), encoding="utf-8")
        return
    assert now == before
