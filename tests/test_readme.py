"""The README is true: every block of it is executed, in a copy of what it speaks of.

The blocks of a section (`## …`) run one after the other in a folder of their own, with the commands
of this checkout in its `.venv/bin`. What kind of block it is says what is done with it (`RUNNERS`).

What a command prints must be what is shown, on a screen of 80 columns. A line `…` stands for any
lines. What `MAY_DIFFER` of `tests/documents.py` lists is not compared. Commands in `ONLY_PLANNED`
are not carried out.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.cli.app import NAMES, app
from tests.documents import check_shown, printed, sessions
from tests.project import ROOT, matching
from tests.waiting import ended, started

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md")
PICTURE = ROOT / "docs/images/overview.svg"

ONLY_PLANNED = {
    "make test": "it would run this test",
    "make docs": "tests/site builds it",
    "make lab": "it installs JupyterLab and waits for a browser",
}
ON_BOTH_MACHINES = "# on both machines"
"""The commands after this line run twice at once, as on two machines, with HOST here."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_INSTALL = re.compile(r"^pip install '?meshdsl(?:\[(\w+)\])?'?$", re.MULTILINE)
_NAMES = re.compile(r"`meshdsl (\w+)([^`]*)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the word behind the fence, and its content."""

    kind: str
    text: str


def _read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _blocks(text: str) -> list[Block]:
    return [Block(kind, body) for kind, body in _BLOCK.findall(text)]


def _sections() -> dict[str, list[Block]]:
    """The blocks of every section that has some, by its heading."""
    parts = re.split(r"^## (.*)$", _read("README.md"), flags=re.MULTILINE)
    assert not _blocks(parts[0]), "a block before the first heading is in no section"
    found = {head: _blocks(body) for head, body in zip(parts[1::2], parts[2::2], strict=True)}
    return {head: blocks for head, blocks in found.items() if blocks}


SECTIONS = _sections()

# --- a folder to run in --------------------------------------------------------------------------

COPIED = ("README.md", "examples", "docs", "Makefile", "pyproject.toml", "constraints.txt")
INSTALLED = {
    "python": "",
    "meshdsl": "-c 'from meshdsl.cli import main; main()'",
    "torchrun": "-m torch.distributed.run",
}
"""The commands of `.venv/bin`, each as what Python is called with."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The state after `make run`: a copy, with a `.venv` that runs this checkout."""
    for name in COPIED:
        here = ROOT / name
        copy = shutil.copytree if here.is_dir() else shutil.copy
        copy(here, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in INSTALLED.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    (programs.parent / "installed").touch()
    return tmp_path


def _environment(clone: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "MAKEFLAGS")}
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{kept['PATH']}"
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def _printed(clone: Path, *commands: str, **environment: str) -> str:
    """The output of commands that run at once; each has to succeed."""
    shells = [["bash", "-ec", command] for command in commands]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(
        *shells, cwd=clone, env=_environment(clone) | environment, stdin=subprocess.DEVNULL, **pipes
    ) as processes:
        logs = ended(processes)
    assert not any(process.returncode for process in processes), logs
    return "".join(logs)


# --- kinds of blocks -----------------------------------------------------------------------------


def _run_session(text: str, clone: Path) -> None:
    """Each `$ command`, and below it what it prints."""
    for command, shown in sessions(text):
        check_shown(command, shown, printed(command))


def _run_script(text: str, clone: Path) -> None:
    """A script of bash, which has to end well."""
    here, _, both = text.partition(ON_BOTH_MACHINES)
    here = _INSTALL.sub(_is_offered, here)
    for command in ONLY_PLANNED:
        here = here.replace(command, command.replace("make", "make --dry-run"))
    _printed(clone, here)
    if both:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{probe.getsockname()[1]} --local-addr 127.0.0.1"
        there = both.partition("\n")[2].replace("HOST:29500", place)
        nothing = clone / "nothing"  # on other machines there is no meshdsl
        nothing.mkdir()
        (nothing / "meshdsl.py").write_text("raise ImportError('the program must not need it')")
        assert "loss" in _printed(clone, there, there, PYTHONPATH=str(nothing))


def _is_offered(line: re.Match[str]) -> str:
    """No installation, which `tests/test_house.py` tries: the package offers the extra."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    named = project["optional-dependencies"][line[1]] if line[1] else project["dependencies"]
    assert (line[1] == "torch") == any(each.startswith("torch") for each in named)
    return ""


def _run_python(text: str, clone: Path) -> None:
    """A Python file."""
    (clone / "block.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(clone / "block.py"), run_name="__main__")


def _check_program(text: str, clone: Path) -> None:
    """A file that `check` finds fine, or lines that are in an example."""
    if "program " in text:
        (clone / "block.mdsl").write_text(text, encoding="utf-8")
        _printed(clone, "meshdsl check block.mdsl")
    else:
        assert any(text in _read(str(p)) for p in matching("examples/*.mdsl"))


RUNNERS: dict[str, Callable[[str, Path], None]] = {
    "shellsession": _run_session,
    "sh": _run_script,
    "python": _run_python,
    "mdsl": _check_program,
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("section", SECTIONS)
def test_every_block_of_the_section_runs(
    section: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for block in SECTIONS[section]:
        assert block.kind in RUNNERS, f"nobody knows how to run ```{block.kind}"
        RUNNERS[block.kind](block.text, clone)


def test_what_is_shown_can_be_wrong() -> None:
    check_shown("c", "a\n…\nd 3.5 s\n", "a   \nb\nc\nd 1.25 s\n")
    check_shown("c", "…\nd\n", "d\n")
    for shown in ("a\n…\nc\n", "b\n…\n", "a\nd 3.5 s\n", "a\n…\n…\nd 3.5 tokens\n"):
        with pytest.raises(AssertionError, match="shown"):
            check_shown("c", shown, "a\nb\nd 1.25 s\n")


# --- what is said in other ways ------------------------------------------------------------------


def test_both_programs_are_the_example(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    blocks = [
        b for b in _blocks(_read("README.md")) if "program mlp" in b.text or "def mlp" in b.text
    ]
    assert [b.kind for b in blocks] == ["mdsl", "python"]
    example = md.load(ROOT / "examples/mlp.mdsl").to_mdsl()
    (clone / "block.mdsl").write_text(blocks[0].text, encoding="utf-8")
    (clone / "block.py").write_text(blocks[1].text.partition("\nplan")[0], encoding="utf-8")
    assert md.load("block.mdsl").to_mdsl() == example
    assert runpy.run_path("block.py")["mlp"].to_mdsl() == example


def test_the_table_has_every_command_and_options_they_take() -> None:
    rows = [_NAMES.findall(line) for line in _read("README.md").split("\n") if line[:3] == "| `"]
    said = {match[0] for row in rows for match in row}
    assert said == set(NAMES)
    for line in _read("README.md").split("\n"):
        for name, _ in _NAMES.findall(line) if line[:3] == "| `" else ():
            help = CliRunner().invoke(app, [name, "--help"]).output
            missing = [o for o in re.findall(r"`[^`]*?(--\w+)", line) if o not in help]
            assert not missing, f"meshdsl {name}: {missing}"


def test_the_picture_quotes_the_example_and_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    texts = re.findall(r'<text class="code"[^>]*>(.*?)</text>', PICTURE.read_text(encoding="utf-8"))
    mlp = md.load("examples/mlp.mdsl")
    known = _read("examples/mlp.mdsl") + str(mlp.compile("square", "hybrid").code)
    spaced = " ".join(known.split())
    quoted = [" ".join(t.replace("&gt;", ">").split()) for t in texts]
    assert len(quoted) == 7
    assert [t for t in quoted if t not in spaced] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    prose = re.sub(r"`[^`]*`", "", _read(page))
    broken = [link for link in _LINK.findall(prose) if not (folder / link).exists()]
    assert not broken


def test_the_index_names_every_page() -> None:
    named = set(_LINK.findall(_read("docs/README.md")))
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in matching("docs/**/*.md")}
    assert pages - {"README.md"} <= named
