"""CONTRIBUTING's five steps, followed to the letter: a record in a file, and no other edit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.backends.peers.renderings import RENDERINGS
from tests.project import copy_tree, guide_file

OBLIGATIONS = (
    "tests/ops",
    "tests/training/test_registry.py",
    "tests/api/test_operators.py",
    "tests/renderings/test_rows_command.py",
)
"""Tests that loop over the registry, a case for each operator."""

STUB = "test_the_stub_is_what_the_registry_says"
"""The test that writes the types anew."""

PROGRAM = """\
dim a = 8, b = 6
mesh m = { x: 2, y: 2 }
layout l { a -> x, b -> y }
program p(z[a, b]) {
  u = softsign(z)
  loss = sum(u * u)
  dz = grad(loss, z)
  return u, dz
}
"""
COMMANDS = ("check", "explain", "compile", "run --verify", "compare", "fmt --check")
KNOWS_IT = ("sbp", "scaling-book", "gshard", "dtensor", "jax")
"""Notations that write every operator, and one that the record tells how its system does it."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the operator of the guide."""
    home = copy_tree(tmp_path_factory.mktemp("checkout"))
    record = guide_file("meshdsl/ops/softsign.py")
    (home / "meshdsl/ops/softsign.py").write_text(record, encoding="utf-8")
    (home / "softsign.mdsl").write_text(PROGRAM, encoding="utf-8")
    return home


def run(home: Path, *arguments: str) -> tuple[int, str]:
    """`python ARGUMENTS` in the copy: the exit code, and what is printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


SUITE = """
import os, sys, pytest
quiet = ("-q", "-p", "no:cacheprovider")
os.environ["MESHDSL_UPDATE_GOLDEN"] = "1"
pytest.main([*quiet, sys.argv[1]])
del os.environ["MESHDSL_UPDATE_GOLDEN"]
sys.exit(pytest.main([*quiet, "-k", "softsign", *sys.argv[2:]]))
"""
"""Writes the types anew, then runs the obligations, in one process that imports torch."""


def test_every_obligation_is_met(checkout: Path) -> None:
    code, printed = run(checkout, "-c", SUITE, f"{OBLIGATIONS[2]}::{STUB}", *OBLIGATIONS)
    assert code == 0, printed
    counts = [int(count) for count in re.findall(r"(\d+) passed", printed)]
    assert counts[0] == 1
    assert counts[-1] >= 18, printed


CALLS = """
import contextlib, io, shlex, sys
from meshdsl.cli import main
for line in sys.argv[1:]:
    sys.argv = ["meshdsl", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print("ENDED", line.split()[0], end.code or 0)
"""


def test_every_command_and_rendering_knows_it(checkout: Path) -> None:
    lines = [f"{command} softsign.mdsl" for command in COMMANDS]
    lines += [f"render softsign.mdsl --as {notation}" for notation in RENDERINGS]
    code, printed = run(checkout, "-c", CALLS, *lines, "rows softsign")
    assert code == 0, printed
    ended = re.findall(r"^ENDED (\w+) (\d+)$", printed, re.MULTILINE)
    wanted = [(c.split()[0], "0") for c in COMMANDS]
    wanted += [("render", "0" if n in KNOWS_IT else "1") for n in RENDERINGS]
    assert ended == [*wanted, ("rows", "0")], printed
    assert "verified: equal" in printed
    assert "= jax.nn.soft_sign(z)" in printed
    assert printed.count("error[MD0910]: `softsign` cannot be written as oneflow yet") == 1
