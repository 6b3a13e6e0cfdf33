"""The output of `explain` and `compare` in the documentation is what they print.

A block that begins with `$ meshdsl explain …` or `compare` is run from the project's folder on a
screen of 80 columns; `MESHDSL_UPDATE_GOLDEN=1` writes the output anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import printed
from tests.project import ROOT
from tests.report.golden import AGAIN, UPDATE

PAGES = ["docs/explain.md", "docs/compare.md"]
BLOCK = re.compile(
    r"(```(?:console|text)?\n\$ meshdsl ((?:explain|compare) [^\n]*)\n).*?```", re.DOTALL
)


def _renewed(page: str) -> str:
    """The page with the output that its commands have now."""
    return BLOCK.sub(lambda m: f"{m[1]}{printed(f'meshdsl {m[2]}')}```", page)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_is_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    path = Path(name)
    page = path.read_text(encoding="utf-8")
    renewed = _renewed(page)
    if UPDATE and page != renewed:
        path.write_text(renewed, encoding="utf-8", newline="\n")
        return
    assert page == renewed, AGAIN


@pytest.mark.parametrize("name", ["docs/explain.md", "docs/compare.md"])
def test_the_page_shows_some(name: str) -> None:
    assert len(BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))) >= 2
