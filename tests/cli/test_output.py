"""The standard output of commands is theirs alone: no library writes to it."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshdsl import pipeline
from meshdsl.syntax import parse
from tests.compiling import compile_text

from .command import Cli, write
from .forks import command, printed

LIBC = ctypes.CDLL(None)


def _chatty(stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage of the compiler that talks to the standard output, as libraries do."""

    def talking(*arguments: Any) -> Any:
        os.write(1, b"chatter of a descriptor\n")
        LIBC.puts(b"chatter in a buffer of C")
        os.system("echo chatter of a child")
        return stage(*arguments)

    return talking


def _chattering(words: str) -> None:
    """A command whose every stage is chatty, in a process of its own."""
    parse.read_source = _chatty(parse.read_source)
    for stage in ("parsed", "declare", "written", "finish_named", "place_named", "lower_placed"):
        setattr(pipeline, stage, _chatty(getattr(pipeline, stage)))
    command(*words.split())


PROGRAM = """\
dim batch = 4, io = 2
mesh one = { d: 1 }
program p(x[batch, io]) {
  y = sum[io](x)
  return y
}
"""
COMMANDS = (
    "compile f.mdsl",
    "explain f.mdsl --json",
    "explain f.mdsl --print-after device",
    "check f.mdsl --json",
    "render f.mdsl --as jax",
    "run f.mdsl --json",
)


@pytest.mark.parametrize("words", COMMANDS)
def test_libraries_do_not_reach_the_standard_output(words: str, cli: Cli) -> None:
    write(PROGRAM)
    expected = cli(*words.split())
    out, err = printed(lambda: _chattering(words))
    if words == "run f.mdsl --json":  # it also says how long it took
        assert json.loads(out)["outputs"] == json.loads(expected.out)["outputs"]
    else:
        assert out == expected.out
    for chatter in ("of a descriptor", "in a buffer of C", "of a child"):
        assert f"chatter {chatter}" in err


def test_a_library_that_talks_does_no_harm_without_a_standard_error(cli: Cli) -> None:
    write(PROGRAM)
    expected = cli("compile", "f.mdsl").out

    def mute() -> None:
        os.close(2)
        _chattering("compile f.mdsl")

    assert printed(mute)[0] == expected


def test_emitted_programs_keep_their_output_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = compile_text(PROGRAM).text
    talk = """
    import ctypes
    ctypes.CDLL(None).puts(b"chatter in a buffer of C")
    os.write(1, b"chatter of a descriptor")
    y = """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prog.py"])
    Path("prog.py").write_text(text.replace("\n    y = ", talk))
    out, err = printed(lambda: runpy.run_path("prog.py", run_name="__main__"))
    assert out == "y: f32[4]\n"
    assert err.count("chatter") == 2
