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

CONSUMER = """
from typing import Annotated

import meshdsl as md

batch, io, hidden, layers = md.dims(batch=64, io=512, hidden=2048, layers=2)
wide = md.dim("wide", like=io)
sizes: tuple[int, float] = (4 * io, io / 2)
square = md.mesh(rows=2, cols=2)
hybrid = md.layout({"batch": "rows"}, hidden="cols")


@md.function
def block(x: Annotated[md.Tensor, batch, io]) -> md.Tensor:
    w = md.param([io, hidden], init=md.normal(0.02))
    v = md.param("v", [hidden, io], init=md.zeros(), dtype=md.f32)
    h = md.relu(md.einsum(x, w, out=[batch, hidden]) * 2 + 1.0)
    return x + md.einsum(h, v, out=[batch, io]) / io**0.5


@md.program
def mlp(
    x: Annotated[md.Tensor, md.f32[batch @ "rows", io]], ids: Annotated[md.Tensor, md.i32[batch]]
) -> tuple[md.Tensor, md.Tensor]:
    y: md.Tensor = md.repeat(layers, block, x)
    n: md.Tensor = md.softmax[io](y)[io >> wide]
    z = md.where((md.iota[batch] >= 3) & ~(ids == 2), n.pick(wide, 0), 0.0)
    loss = md.mean(z**2) + md.sum[batch](z) + md.sum(md.zeros[batch, io](dtype=md.f32))
    return loss, md.name("out", block(y), [io, batch])


def use(program: md.Program) -> float:
    plan = program.compile(square, hybrid, reduce="immediate")
    loss, y = plan(x=None, ids=None)
    print(plan(None, None).y, plan.explain().json, plan.code, plan.compare("batch:rows").same)
    return plan.cost().wire_bytes


use(md.load("file.mdsl"))
text: str = mlp.to_mdsl()
"""

WRONG = """
import meshdsl as md

batch, io = md.dims(batch=4, io=2)
md.softmaxx
md.relu()
md.softmax(3)
md.dims(batch="x")
md.cast(3.0)
md.iota[3]
"""

SETTINGS = """
[mypy]
strict = true
[mypy-meshdsl.*]
ignore_errors = true
[mypy-opt_einsum.*]
ignore_missing_imports = true
"""


def checked(texts: dict[str, str], folder: Path) -> list[str]:
    """What mypy --strict says of files of a project that uses the package."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "mypy.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *texts],
        cwd=folder,
        env={"MYPYPATH": str(ROOT), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(tuple(texts))]


def test_a_consumer_is_clean_under_mypy_strict_and_mistakes_are_found(tmp_path: Path) -> None:
    lines = checked({"consumer.py": CONSUMER, "wrong.py": WRONG}, tmp_path)
    assert [line for line in lines if line.startswith("consumer.py")] == []
    assert [int(line.split(":")[1]) for line in lines if ": error:" in line] == [5, 6, 7, 8, 9, 10]


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
