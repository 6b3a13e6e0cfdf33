"""The search as equations: every function that its README names for one of them exists."""

from __future__ import annotations

import importlib
import re
from functools import reduce

from tests.project import ROOT
from tests.together import together

TEXT = (ROOT / "meshdsl/search/README.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", TEXT)) - {"tests/search/test_readme.py"})
ELSEWHERE = ("placed.", "costgraph.")
"""Names that begin so are of other folders."""


def test_it_names_a_function_in_every_row_of_a_table() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and "---" not in line]
    bodies = [row for row in rows if not row.endswith("| where |")]
    assert len(bodies) > 40
    assert [row for row in bodies if not re.search(r"\| `[a-z_.]+[\w.]+` \|$", row)] == []


@together(name=NAMES)
def test_it_exists(name: str) -> None:
    path = name if name.startswith(ELSEWHERE) else f"search.{name}"
    folder, module, *attributes = path.split(".")
    found = importlib.import_module(f"meshdsl.{folder}.{module}")
    assert reduce(getattr, attributes, found) is not None
