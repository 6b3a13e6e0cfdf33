"""Programs that were once compiled wrongly: each runs, or is refused with the code it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs.harness import Case, refusal, run_case
from tests.project import matching

SEEDS = matching("tests/seeds/*.mdsl")


def said(text: str, key: str) -> str | None:
    """The value of `key` in a seed's first lines, or None."""
    found = re.search(rf"^# {key}: (.*)$", text, re.MULTILINE)
    return found[1] if found else None


@pytest.mark.parametrize("path", SEEDS, ids=lambda p: p.stem)
def test_seed(path: Path) -> None:
    text = path.read_text()
    mesh, layout, reduce = (said(text, key) for key in ("mesh", "layout", "reduce"))
    assert mesh is not None
    assert layout is not None
    assert reduce is not None
    case = Case(text, mesh, layout, reduce)
    wanted = said(text, "refused")
    assert refusal(case) == wanted
    if wanted is None:
        run_case(case)
