"""Every file of tests/errors gives exactly the diagnostics written in it.

A file says on `#!` lines what must come of it, and on `#|` lines at its end everything printed:

    #! args: check FILE --strict      the command (without the line: check FILE)
    #! exit: 1                        its exit code
    #! error[MD0301] 9:12             each diagnostic with its place (`-`: without one), in order

`MESHDSL_BLESS=1 pytest tests/cli/test_errors.py` writes the `#|` lines anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from meshdsl.cli import common
from meshdsl.cli.corrected import of_command
from meshdsl.diagnostics import Diagnostic
from tests.project import matching

from .command import Cli
from .tried import Outcome, after, check_fix, heard

FOLDER = Path(__file__).resolve().parent.parent / "errors"
FILES = matching("tests/errors/*.mdsl")
HEAD = re.compile(r"(?:error|warning|note)\[MD\d{4}\]")
PLACE = re.compile(r" *--> .*?:(\d+:\d+)")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bad_input(path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text(encoding="utf-8")
    shutil.copy(path, path.name)
    told: list[Diagnostic] = []
    with monkeypatch.context() as patch:
        show = common.show

        def heard_too(diagnostics: Iterable[Diagnostic]) -> None:
            told.extend(every := [*diagnostics])
            show(every)

        patch.setattr(common, "show", heard_too)
        done = cli(*_arguments(path, text))
    shown = [line.rstrip() for line in (done.out + done.err).strip("\n").split("\n")]
    if os.environ.get("MESHDSL_BLESS"):
        text = _blessed(text, shown)
        path.write_text(text, encoding="utf-8")
    assert shown == _after("#|", text)
    assert done.code == int(_settings(text)["exit"])
    assert _diagnostics(shown) == _expected(text)
    assert sum(line.startswith("help: ") for line in shown) == len(_expected(text))
    if _arguments(path, text)[0] == "check" and "[MD0604]" not in text:
        _check_json(path, text, cli)
    _check_fixes(path, _arguments(path, text), Outcome(done.code, tuple(told)), cli, monkeypatch)


def _check_fixes(
    path: Path, words: list[str], first: Outcome, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fix of the command mends it; `check` tries those of its file in test_fix.py."""
    for diagnostic in first.diagnostics:
        for fix in diagnostic.fixes:
            if of_command(fix) is not None or words[0] != "check":
                shutil.copy(path, path.name)
                fixed = after(words, fix, Path())
                assert fixed is not None
                check_fix(lambda w: heard(cli, w, monkeypatch), fixed, first, diagnostic)


def _check_json(path: Path, text: str, cli: Cli) -> None:
    """The same diagnostics as JSON, where the command is one that can be read."""
    shutil.copy(path, path.name)
    done = cli(*_arguments(path, text), "--json")
    found = json.loads(done.out)
    assert set(found) == {"version", "diagnostics"}
    assert done.code == int(_settings(text)["exit"])
    assert not done.err
    assert [f"{d['severity']}[{d['code']}] {_place(d)}" for d in found["diagnostics"]] == (
        _expected(text)
    )


# --- what a file says ------------------------------------------------------------------------


def _after(sign: str, text: str) -> list[str]:
    return [line[2:].removeprefix(" ") for line in text.split("\n") if line.startswith(sign)]


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition(": ") for line in _after("#!", text))
    return {key: value for key, colon, value in pairs if colon}


def _expected(text: str) -> list[str]:
    return [line for line in _after("#!", text) if HEAD.match(line)]


def _arguments(path: Path, text: str) -> list[str]:
    words = shlex.split(_settings(text).get("args", "check FILE"))
    return [path.name if word == "FILE" else word for word in words]


def _blessed(text: str, shown: list[str]) -> str:
    kept = [line for line in text.rstrip("\n").split("\n") if not line.startswith("#|")]
    return "\n".join([*kept, *(f"#| {line}".rstrip() for line in shown)]) + "\n"


# --- what was printed ------------------------------------------------------------------------


def _diagnostics(shown: list[str]) -> list[str]:
    found: list[list[str]] = []
    for line in shown:
        if head := HEAD.match(line):
            found.append([head[0], "-"])
        elif (place := PLACE.fullmatch(line)) and found[-1][1] == "-":
            found[-1][1] = place[1]
    return [" ".join(parts) for parts in found]


def _place(diagnostic: dict[str, Any]) -> str:
    if diagnostic["span"] is None:
        return "-"
    start = diagnostic["span"]["start"]
    return f"{start['line']}:{start['column']}"
