"""The standard output of commands is theirs alone: no library writes to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import compile_text
from tests.project import ROOT

from .command import Cli, write

CHATTY = """
import ctypes, os, sys
from meshdsl import pipeline
from meshdsl.syntax import parse

def chatty(stage):
    def talking(*arguments):
        os.write(1, b"chatter of a descriptor\\n")
        libc.puts(b"chatter in a buffer of C")
        os.system("echo chatter of a child")
        return stage(*arguments)
    return talking

libc = ctypes.CDLL(None)
parse.read_source = chatty(parse.read_source)
for stage in ("parsed", "declare", "written", "finish_named", "place_named", "lower_placed"):
    setattr(pipeline, stage, chatty(getattr(pipeline, stage)))
sys.argv[0] = "meshdsl"
from meshdsl.cli import main
main()
"""
"""Every stage of the compiler talks to the standard output as libraries do."""

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


def _printed(code: str, *arguments: str) -> tuple[str, str]:
    """The standard output and the standard error of a process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_libraries_do_not_reach_the_standard_output(command: str, cli: Cli) -> None:
    write(PROGRAM)
    expected = cli(*command.split())
    out, err = _printed(CHATTY, *command.split())
    if command == "run f.mdsl --json":  # it also says how long it took
        assert json.loads(out)["outputs"] == json.loads(expected.out)["outputs"]
    else:
        assert out == expected.out
    for chatter in ("of a descriptor", "in a buffer of C", "of a child"):
        assert f"chatter {chatter}" in err


def test_a_library_that_talks_does_no_harm_without_a_standard_error(cli: Cli) -> None:
    write(PROGRAM)
    expected = cli("compile", "f.mdsl").out
    assert _printed(f"import os; os.close(2)\n{CHATTY}", "compile", "f.mdsl")[0] == expected


def test_emitted_programs_keep_their_output_too(tmp_path: Path) -> None:
    text = compile_text(PROGRAM).text
    talk = """
    import ctypes
    ctypes.CDLL(None).puts(b"chatter in a buffer of C")
    os.write(1, b"chatter of a descriptor")
    y = """
    path = tmp_path / "prog.py"
    path.write_text(text.replace("\n    y = ", talk))
    out, err = _printed(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert out == "y: f32[4]\n"
    assert err.count("chatter") == 2
