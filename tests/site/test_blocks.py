"""Every fenced block of every page is executed, or it is said here why not.

The blocks of a page run one after the other in a folder of their own, beside the examples. The word
behind the fence says what is done with one (`RUNNERS`), a second word which file it is:

- `mdsl`: a program with its dims has to be found fine by `check`, other declarations to be read.
  `mdsl NAME.mdsl` is also that file for the commands below it, `mdsl excerpt=FILE` is in that file,
  `mdsl statements` are lines of a program.
- `shellsession` and `console`: `$ command`, and what it prints on a screen of 80 columns; a line
  `…` stands for any lines. With `MESHDSL_UPDATE_GOLDEN=1` what is shown and has changed is written
  anew: look at the lines around a `…`. `sh`: commands that have to end well.
- `python` is executed, `python fragment` is compiled, `excerpt=FILE` is in that file;
  `json` and `toml` are read, and `toml NAME.toml` is that file for the commands below it;
  `text` is no code, `text NAME` that file.
- `<!-- edit: FILE: OLD => NEW -->` is what the reader is told to do to a file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshdsl.diagnostics import Source
from meshdsl.syntax.parse import parse
from tests.documents import check_shown, printed, renewed, sessions, shows
from tests.project import ROOT, matching
from tests.report.golden import UPDATE

PAGES = matching("*.md", "docs/**/*.md", "editors/**/*.md", "examples/**/*.md", "grammar/*.md")

ELSEWHERE = {
    ("README.md", ""): "tests/test_readme.py",
    ("CONTRIBUTING.md", "python"): "tests/project.py",
    ("docs/module.md", "python"): "tests/backends/test_module_processes.py",
    ("docs/notebooks.md", "python"): "tests/notebook/test_docs.py",
}
"""By page and kind of block (empty: all), the test that executes these."""

NOT_RUN = {
    r"make \w+": "what the README says of it is executed by tests/test_readme.py",
    r"python3 -m venv .venv|\. \.venv/bin/activate": "the commands are called in this process",
    r"pip install '?meshdsl(\[torch\])?'?": "tests/test_readme.py: the package offers that",
    r"(MESHDSL_\w+=\w+ )*\.venv/bin/pytest .*": "it would run tests inside of a test",
    r"torchrun .*": "tests/test_readme.py runs these lines on two process groups",
    r"python data\.py|meshdsl train spiral\.mdsl .*": "tests/cli/test_new.py runs them",
    r"meshdsl play .*": "it waits for a browser",
    r"python -m http.server .*": "it serves until it is ended",
    r"meshdsl train FILE\.mdsl .*": "FILE stands for any program",
    r"ln -s .*|code .*|npm .*": "it changes an editor that is installed",
}
"""Commands that are not carried out, as patterns, each with the reason."""

SHOWN = {
    "text": "output, trees of folders, forms of messages",
    "lua": "the settings of Neovim: there is none here",
    "elisp": "the settings of Emacs: there is none here",
}
"""Kinds of blocks that no tool of this project executes."""

_PART = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- edit: (?P<file>\S+): (?P<old>.*?) => (?P<new>.*?) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Folder:
    """Where the blocks of one page run: the folder commands are in, and the names of Python."""

    root: Path
    here: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "block"})
    renewed: dict[str, str] = field(default_factory=dict)
    """Commands with what the page shows of them, and with what they print now."""


# --- kinds of blocks -----------------------------------------------------------------------------


def _is_excerpt(text: str, word: str, folder: Folder) -> bool:
    """Whether a block is lines of a file, which the word names; the file has them."""
    kind, _, name = word.partition("=")
    if kind != "excerpt":
        return False
    path = ROOT / name if (ROOT / name).exists() else folder.root / name
    assert text in path.read_text(encoding="utf-8"), f"{name} has no such lines"
    return True


def run_mdsl(text: str, word: str, folder: Folder) -> None:
    if _is_excerpt(text, word, folder):
        return
    if word == "statements":
        text = f"program p() {{\n{text}}}\n"
    if word.endswith(".mdsl"):
        (folder.here / word).write_text(text, encoding="utf-8")
    if all(re.search(f"^{word} ", text, re.MULTILINE) for word in ("dim", "program")):
        block = folder.here / "block_of_the_page.mdsl"
        block.write_text(text, encoding="utf-8")
        assert printed(f"meshdsl check {block.name}", 1).startswith(f"{block.name}: fine")
        return
    _, errors = parse(Source("block", text))
    assert not errors


def run_session(text: str, word: str, folder: Folder) -> None:
    for command, shown in sessions(text):
        output = carry_out(command, folder)
        if UPDATE and not shows(shown, output):
            folder.renewed[f"$ {command}\n{shown}"] = f"$ {command}\n{renewed(shown, output)}"
        else:
            check_shown(command, shown, output)


def run_script(text: str, word: str, folder: Folder) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+#.*|^#.*", "", line).strip()
        if command and not any(re.fullmatch(p, command) for p in NOT_RUN):
            carry_out(command, folder)


def carry_out(command: str, folder: Folder) -> str:
    """What a command prints; `cd` moves, and only `meshdsl` is called."""
    name, *rest = shlex.split(command)
    if name == "cd":
        folder.here = folder.here / rest[0]
        os.chdir(folder.here)  # `monkeypatch.chdir` of the test leads back
        return ""
    return printed(command, 1)


def run_python(text: str, word: str, folder: Folder) -> None:
    if _is_excerpt(text, word, folder):
        return
    path = folder.here / f"block_{len(folder.names)}.py"
    path.write_text(text, encoding="utf-8")  # errors quote the lines
    code = compile(text, path, "exec")
    if word != "fragment":
        exec(code, folder.names)


def run_toml(text: str, word: str, folder: Folder) -> None:
    tomllib.loads(text)
    if word.endswith(".toml"):
        (folder.here / word).write_text(text, encoding="utf-8")


def run_text(text: str, word: str, folder: Folder) -> None:
    if word:
        (folder.here / word).write_text(text, encoding="utf-8")


def run_json(text: str, word: str, folder: Folder) -> None:
    json.loads(text)


def run_nothing(text: str, word: str, folder: Folder) -> None:
    """A kind of `SHOWN`."""


RUNNERS: dict[str, Callable[[str, str, Folder], None]] = {
    "mdsl": run_mdsl,
    "shellsession": run_session,
    "console": run_session,
    "sh": run_script,
    "python": run_python,
    "json": run_json,
    "toml": run_toml,
    **dict.fromkeys(SHOWN, run_nothing),
    "text": run_text,
}


# --- pages ---------------------------------------------------------------------------------------


def parts_of(page: Path) -> Iterator[re.Match[str]]:
    """The blocks of a page that are not executed elsewhere, and its edits."""
    name = page.relative_to(ROOT).as_posix()
    for part in _PART.finditer(page.read_text(encoding="utf-8")):
        kind = (part["info"] or "").partition(" ")[0]
        if not {(name, kind), (name, "")} & set(ELSEWHERE):
            yield part


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_blocks_of_the_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    # A copy: pages edit these files, and tests beside this one read them.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    folder = Folder(tmp_path, tmp_path)
    for part in parts_of(page):
        if part["file"]:
            edit(folder.here / part["file"], part["old"], part["new"])
            continue
        kind, _, word = part["info"].partition(" ")
        assert kind in RUNNERS, f"nobody knows how to run ```{part['info']}\n{part['text']}"
        RUNNERS[kind](part["text"], word, folder)
    for old, new in folder.renewed.items():
        edit(page, old, new)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("page", ELSEWHERE, ids=" ".join)
def test_blocks_that_run_elsewhere_do(page: tuple[str, str]) -> None:
    name = page[0].rpartition("/")[2]
    assert name in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")


def test_what_is_not_run_is_somewhere() -> None:
    texts = "".join(p.read_text(encoding="utf-8") for p in PAGES)
    assert [p for p in NOT_RUN if not re.search(p, texts)] == []
