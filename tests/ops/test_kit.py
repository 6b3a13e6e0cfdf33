"""Operator files import the kit, so that they begin with their operators."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import ROOT, matching

OPS = ROOT / "meshdsl" / "ops"
BESIDE = ("meshdsl.backends.runtime.", "meshdsl.diagnostics", "meshdsl.ops", "meshdsl.records")
"""The runtime, whose functions the numpy meaning shares; messages; other families; records."""


def imports(path: Path) -> set[str]:
    """The modules that a file names in `from … import`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}


SOURCES = {name for name in imports(OPS / "kit.py") if name.startswith("meshdsl.ops.")}
PARTS = SOURCES.union(*(imports(OPS / f"{name.rpartition('.')[2]}.py") for name in SOURCES))
"""What the kit is made of, and what that imports: these cannot import the kit."""
FILES = [
    path
    for path in matching("meshdsl/ops/*.py")
    if path.stem not in ("__init__", "kit") and f"meshdsl.ops.{path.stem}" not in PARTS
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_operator_file_imports_the_kit(path: Path) -> None:
    ours = {name for name in imports(path) if name.startswith("meshdsl.")}
    assert not ours & SOURCES, "the kit has these"
    assert "meshdsl.ops" in ours
    assert all(name.startswith(BESIDE) for name in ours)
