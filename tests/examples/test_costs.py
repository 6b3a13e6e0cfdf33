"""The page of what models cost: its rows are those of `benchmarks.costs`, and counted again.

One of them, or with `MESHDSL_CASES` all: each for the layout that it names.
"""

from __future__ import annotations

import os
import re

import pytest

from benchmarks.costs import ROWS
from tests.project import ROOT

PAGE = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^\| `(\w+-\d+)` \| (.*) \|$", PAGE, re.MULTILINE))
KNOWN = {row.name: row for row in ROWS}
FITTING = [name for name, text in SHOWN.items() if "no layout fits" not in text]


def test_the_page_has_rows_that_there_are() -> None:
    assert SHOWN.keys() <= KNOWN.keys()


@pytest.mark.parametrize("name", FITTING if "MESHDSL_CASES" in os.environ else FITTING[:1])
def test_the_page_has_the_figures_of_the_simulation(name: str) -> None:
    batch, *figures, plan = SHOWN[name].split(" | ")
    layout, _, reduce = plan.rpartition(", ")
    assert KNOWN[name].figures(layout.strip("`"), reduce) == figures
    assert KNOWN[name].batch == int(batch.replace(",", ""))
