"""The page of what models cost: its rows are those of `benchmarks.costs`, and one is counted."""

from __future__ import annotations

import re

from benchmarks.costs import ROWS
from tests.project import ROOT

COUNTED = "bert_large-8"


def test_the_page_has_the_figures_of_the_simulation() -> None:
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+-\d+)` \| (.*) \|$", page, re.MULTILINE))
    known = {row.name: row for row in ROWS}
    assert rows.keys() <= known.keys()
    batch, *figures, plan = rows[COUNTED].split(" | ")
    layout, _, reduce = plan.rpartition(", ")
    assert known[COUNTED].figures(layout.strip("`"), reduce) == figures
    assert known[COUNTED].batch == int(batch)
