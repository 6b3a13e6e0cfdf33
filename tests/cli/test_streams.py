"""Closed, full and abandoned streams, odd widths, and libraries that are not there."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.project import ROOT

from .command import Cli, write
from .test_output import PROGRAM
from .test_regular_files import LEARN

SHELL = {
    "closed errors": ("check f.mdsl 2>&-", 0, "fine", ""),
    "closed output": ("check f.mdsl >&-", 0, "", ""),
    "all closed": ("check f.mdsl <&- >&- 2>&-", 0, "", ""),
    "a mistake and closed errors": ("check none.mdsl 2>&-", 2, "", ""),
    "full output": (
        "explain f.mdsl >/dev/full",
        3,
        "",
        "error[MD0798]: cannot write to the standard",
    ),
    "full output of JSON": ("check f.mdsl --json >/dev/full", 3, "", "output: no space left"),
    "full errors": ("check none.mdsl 2>/dev/full", 2, "", ""),
    "both full": ("explain f.mdsl >/dev/full 2>/dev/full", 3, "", ""),
    "nobody reads": ("explain f.mdsl | true; exit ${PIPESTATUS[0]}", 0, "", ""),
}


def _shell(command: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m meshdsl {command}"
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    return subprocess.run(
        ["bash", "-c", line], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("case", SHELL)
def test_streams_that_take_nothing(case: str, cli: Cli) -> None:
    write(PROGRAM)
    command, code, out, err = SHELL[case]
    done = _shell(command)
    assert done.returncode == code, done.stderr
    assert out in done.stdout
    assert err in done.stderr
    assert "Traceback" not in done.stderr
    assert "MD0799" not in done.stderr


@pytest.mark.parametrize("columns", ["0", "-1", "", "x", "1", "9" * 30])
def test_any_width_shows_something(columns: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    write(PROGRAM)
    with monkeypatch.context() as patch:  # what reports the test asks for the width, too
        patch.setenv("COLUMNS", columns)
        done = cli("explain", "f.mdsl")
        patch.setenv("COLUMNS", columns)
        missing = cli("check", "none.mdsl")
    assert done.code == 0
    assert "under" in done.out
    assert "no file" in " ".join(missing.err.split())


HIDDEN = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN = sys.argv.pop(1)
sys.meta_path.insert(0, Missing())
sys.argv[0] = "meshdsl"
from meshdsl.cli import main
main()
"""


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("torch", "run f.mdsl"),
        ("torch", "train f.mdsl --data d.npz --steps 1"),
        ("numpy", "run f.mdsl"),
    ],
)
def test_a_library_that_is_missing_is_named(library: str, command: str, cli: Cli) -> None:
    write(LEARN)
    np.savez("d.npz", x=np.ones((8, 2), np.float32))
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, library, *command.split()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert f"error[MD0797]: this command needs {library}" in done.stderr
    wanted = {"torch": "'meshdsl[torch]'"}.get(library, library)
    assert f"python -m pip install {wanted}" in done.stderr


WITHOUT_TORCH = """
from typer.testing import CliRunner
from meshdsl.cli.app import app
for command in COMMANDS:
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, (command, done.output)
"""


def test_what_runs_no_program_needs_no_torch() -> None:
    """What the README says needs no torch; `play` is tried by `tests/play/test_server.py`."""
    write(LEARN)
    commands = (
        "new spiral",
        "check f.mdsl",
        "explain f.mdsl",
        "compile f.mdsl -o p.py",
        "compare f.mdsl --no-run",
        "simulate f.mdsl --cluster h100",
        "advise f.mdsl --cluster h100",
        "search f.mdsl --mesh d:2 --cluster h100",
        "schedule gpipe --stages 2 --micro 2",
        "rows softmax",
    )
    hidden = HIDDEN.partition('sys.argv[0] = "meshdsl"')[0]
    program = f"{hidden}COMMANDS = {commands!r}{WITHOUT_TORCH}"
    done = subprocess.run(
        [sys.executable, "-c", program, "torch"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
