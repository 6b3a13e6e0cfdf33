"""Completion in the shell: what follows a word, from the file on the line; never a complaint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import ROOT

from .command import Cli, Done, write

MLP, LM = (f"{ROOT}/examples/{name}.mdsl" for name in ("mlp", "lm"))
MLP_LAYOUTS = ["hybrid", "data_parallel", "megatron"]


@pytest.fixture
def complete(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> object:
    """What bash is given for the last of the words; those behind `|` follow the cursor."""

    def run(line: str) -> Done:
        before, _, after = line.partition("|")
        words = ["meshdsl", *before.split(" ")]
        monkeypatch.setenv("_MESHDSL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join([*words, *after.split()]))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return cli()

    return run


COMPLETED = {
    "comp": ["compile", "compare"],
    f"explain {MLP} --print": ["--print-after"],
    f"explain {MLP} --print-after p": ["placed"],
    f"explain {MLP} --layout ": MLP_LAYOUTS,
    f"explain --layout h| {MLP}": ["hybrid"],
    f"explain {LM} --layout z": ["zero1", "zero2", "zero3"],
    f"run {LM} --mesh ": ["four", "square", "stages"],
    f"run {MLP} --program ": ["mlp"],
    f"explain {MLP} --schedule zb": ["zb_h1", "zb_h2", "zb_v"],
    f"check {MLP} --set ": ["batch=", "io=", "hidden="],
    f"explain {MLP} --tensor t": ["target"],
    f"explain {MLP} --reduce ": ["immediate", "mesh-tf", "deferred", "optimal"],
    f"compare {LM} --layouts zero1,zero": ["zero1,zero1", "zero1,zero2", "zero1,zero3"],
    f"compare {MLP} --reduce optimal,d": ["optimal,deferred"],
    f"render {MLP} --as s": ["sbp", "scaling-book"],
    f"compile {MLP} --dtype b": ["bf16"],
    f"compile {ROOT}/examples/sbp/uvw.mdsl --layout f": ["first"],
    f"run {ROOT}/examples/models/gpt2.mdsl --as ": ["hf"],
    "explain MD060": ["MD0601", "MD0602", "MD0603", "MD0604", "MD0605", "MD0606", "MD0607"],
    "rows eins": ["einsum"],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_what_follows(line: str, complete: Cli) -> None:
    done = complete(line)
    assert (done.out.split(), done.err, done.code) == (COMPLETED[line], "", 0)


def test_of_a_broken_file_what_can_be_read(complete: Cli) -> None:
    write("layout good { a -> b }\nlayout bad { (((\nmesh m = { x: 2 }")
    assert complete("run f.mdsl --layout g").out.split() == ["good"]
    assert complete("run f.mdsl --mesh ").out.split() == ["m"]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"dim a\0", b"", b"(" * 20_000], ids=repr)
def test_of_what_is_no_program_nothing(text: bytes, complete: Cli) -> None:
    done = complete(f"run {write(text)} --layout ")
    assert (done.out.strip(), done.err, done.code) == ("", "", 0)


def test_of_no_file_nothing(complete: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder.mdsl").mkdir()
    for file in ("none.mdsl", "folder.mdsl", f"{'n' * 300}.mdsl", "-", ""):
        line = f"run {file} --layout "
        done = complete(line)
        assert (done.out.strip(), done.err, done.code) == ("", "", 0), line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(
    shell: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = cli("--show-completion")
    assert shown.code == 0
    assert f"complete_{shell}" in shown.out
    assert cli("--install-completion").code == 0
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_MESHDSL_COMPLETE" in path.read_text() for path in found)
