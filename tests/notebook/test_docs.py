"""The page on notebooks: its cells run one after the other, its pictures are there and small."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("IPython", reason="IPython is not installed (`pip install meshdsl[notebook]`)")

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notebooks.md"
MOST_BYTES = 60_000


def test_the_cells_of_the_page_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(cells) > 8
    config = Config(HistoryManager={"enabled": False})
    shell = InteractiveShell.instance(ipython_dir=str(tmp_path), config=config)
    shell.reset()
    try:
        for cell in cells:
            shell.run_cell(cell, store_history=True).raise_error()
    finally:
        InteractiveShell.clear_instance()
    assert "batch 0–31   0              1" in capsys.readouterr().out


def test_the_lines_of_the_page_are_those_there_are() -> None:
    from meshdsl.notebook.magic_lines import VERBS

    told = set(re.findall(r"`%mdsl (\w+)", PAGE.read_text("utf-8")))
    assert told == set(VERBS)


def test_pictures_are_there_and_small() -> None:
    shown = re.findall(r"\]\((images/[\w.-]+)\)", PAGE.read_text("utf-8"))
    assert len(shown) > 5
    for name in shown:
        assert 0 < (ROOT / "docs" / name).stat().st_size < MOST_BYTES


@pytest.mark.parametrize("module", ["report.html", "report.views.parts"])
def test_doctests(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = doctest.testmod(importlib.import_module(f"meshdsl.{module}"))
    assert done.attempted
    assert not done.failed
