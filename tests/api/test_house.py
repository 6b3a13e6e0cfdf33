"""The embedded language as a package: a light import, types for a consumer, doctests that run."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import meshdsl as md
from tests.project import ROOT, matching

MODULES = [path.stem for path in matching("meshdsl/api/*.py")]


def test_the_import_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import meshdsl; "
        "print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "numpy", "highspy", "lark", "rich", "typer", "opt_einsum"}
    assert not heavy & set(done.stdout.split())


def test_tracing_compiling_and_explaining_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; found = runpy.run_path(sys.argv[1]); "
        "plan = found['mlp'].compile(found['square'], found['hybrid']); plan.explain(); plan.code; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "examples" / "mlp.py")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
    )


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"meshdsl.api.{module}"))
    assert not found.failed


def test_the_page_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "page.py").write_text(block[1])
    runpy.run_path(str(tmp_path / "page.py"))
    assert "2 collectives" in capsys.readouterr().out


def test_some_doctests_run() -> None:
    modules = [importlib.import_module(f"meshdsl.api.{m}") for m in MODULES]
    assert sum(doctest.testmod(m).attempted for m in modules) >= 8


def test_every_public_name_is_there_and_documented() -> None:
    for name in md.__all__:
        assert name in dir(md)
        found = getattr(md, name)
        if callable(found):
            assert found.__doc__, name
