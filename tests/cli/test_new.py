"""`meshdsl new`: what it makes runs at once, and it never spoils what is there."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshdsl.project import project

from .command import Cli

NAME = "spiral"
ELSEWHERE = {"play": "it serves a page until Ctrl-C: tests/play/test_server.py"}
"""Commands of the README that other tests carry out."""


@pytest.fixture
def made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line in a new project."""
    assert cli("new", NAME).code == 0
    monkeypatch.chdir(NAME)
    return cli


def commands(text: str) -> list[list[str]]:
    """The commands in the blocks of a page, in words."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_every_command_of_its_readme_runs(made: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    tried = []
    for program, *words in commands(Path("README.md").read_text(encoding="utf-8")):
        tried.append(words[0])
        if program == "python":
            runpy.run_path(words[0], run_name="__main__")
        elif words[0] not in ELSEWHERE:
            done = made(*words)
            assert (done.code, done.err) == (0, "")
    assert tried == ["check", "explain", "data.py", "train", "play"]


def test_what_it_prints_is_what_there_is_to_do(cli: Cli) -> None:
    done = cli("new", NAME)
    listed = re.findall(r"^  (\S+)  +\S", done.out.partition("try:")[0], re.MULTILINE)
    assert sorted(listed) == sorted(os.listdir(NAME))
    text = Path(NAME, "README.md").read_text(encoding="utf-8")
    for line in done.out.partition("try:\n")[2].splitlines()[1:]:
        assert all(shlex.split(part) in commands(text) for part in line.split("&&"))


def test_it_learns(made: Cli) -> None:
    runpy.run_path("data.py", run_name="__main__")
    words = ("train", f"{NAME}.mdsl", "--data", f"{NAME}.npz", "--steps", "150")
    done = made(*words, "--layout", "tensor_parallel", "--eval-every", "150")
    (accuracy,) = re.findall(r"^held out: .*accuracy ([\d.]+)", done.out, re.MULTILINE)
    assert float(accuracy) >= 0.95


def test_its_own_test_passes_and_can_fail(made: Cli) -> None:
    spec = importlib.util.spec_from_file_location("made", f"test_{NAME}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    file = Path(f"{NAME}.mdsl")
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("{ batch ->", "{ classes ->"), encoding="utf-8")
    with pytest.raises(Exception, match="MD0401"):
        tests[0]()


def test_its_files_have_the_form_of_the_house(made: Cli) -> None:
    assert made("fmt", "--check", f"{NAME}.mdsl").code == 0
    for check in (["check", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *check, "--isolated", "--no-cache", "."]
        subprocess.run([*ruff, "--line-length", "100"], check=True)


@pytest.mark.parametrize("name", ["batch", "data", "loss", "label", "tanh", "data_parallel", "_"])
def test_a_name_may_be_used_within(cli: Cli, name: str) -> None:
    assert cli("new", name).code == 0
    assert cli("check", f"{name}/{name}.mdsl").code == 0


REFUSED = {
    "my-model": "my_model",
    "3d": "n_3d",
    "layout": "my_layout",
    "a b": "a_b",
    "..": None,
    "+": None,
    "a\x1b[31mb": "a_31mb",
    "x" * 300: None,
}
"""Names that a project cannot have, and the one that is proposed."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_none_is_refused(cli: Cli, name: str) -> None:
    done = cli("new", name)
    assert (done.code, done.codes) == (2, ["error[MD0620]"])
    assert "\x1b" not in done.err
    proposed = re.findall(r"write `(\w+)`", done.err)
    assert proposed == ([REFUSED[name]] if REFUSED[name] else [])
    assert os.listdir() == []
    if proposed:
        assert cli("new", proposed[0]).code == 0


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_what_is_there_stays(cli: Cli, there: str) -> None:
    makers = {
        "file": lambda: Path(NAME).write_text("mine"),
        "folder": lambda: Path(NAME).mkdir(),
        "link": lambda: Path(NAME).symlink_to("nowhere"),
    }
    makers[there]()
    done = cli("new", NAME)
    assert (done.code, done.codes) == (2, ["error[MD0621]"])
    assert os.listdir() == [NAME]


def test_a_path_is_made_where_its_folder_is(cli: Cli) -> None:
    assert cli("new", f"work/{NAME}").codes == ["error[MD0502]"]
    Path("work").mkdir()
    assert cli("new", f"work/{NAME}/").code == 0
    assert os.listdir("work") == [NAME]
    assert cli("check", f"work/{NAME}/{NAME}.mdsl").code == 0


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_is_interrupted_leaves_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    written: list[int] = []

    def stopping(handle: int) -> None:
        written.append(handle)
        if len(written) == 3:
            raise raised

    monkeypatch.setattr(os, "fsync", stopping)
    if isinstance(raised, KeyboardInterrupt):
        assert cli("new", NAME).code == 130
    else:
        assert cli("new", NAME).codes == ["error[MD0501]"]
    assert len(written) == 3
    assert os.listdir() == []


def test_all_templates_are_used_up() -> None:
    assert not [file.name for file in project(NAME) if "{{" in file.name + file.text]
