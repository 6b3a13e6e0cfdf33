"""`-` is the standard input: diagnostics call it `<stdin>`, and `fmt` prints. And `fmt --diff`."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .command import Cli, Done, write

ROUGH = "dim a=4,  b = 3 # \tx\nprogram p( x[a] ) {return x}"
FINE = "dim a = 4, b = 3  # \tx\nprogram p(x[a]) { return x }\n"
Piped = Callable[..., Done]


@pytest.fixture
def piped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Piped:
    """Runs a command with a text on its standard input."""

    def run(text: str | bytes, *arguments: str) -> Done:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return cli(*arguments)

    return run


def test_check_names_it(piped: Piped) -> None:
    assert piped(FINE, "check", "-").out == "<stdin>: fine (1 program, no expectations)\n"
    done = piped("program p(x[a]) { return x }", "check", "-")
    assert (done.code, done.codes) == (1, ["error[MD0101]"])
    assert " --> <stdin>:1:13" in done.err
    (told,) = json.loads(piped("dim a = (", "check", "-", "--json").out)["diagnostics"]
    assert told["file"] == "<stdin>"


READING = ("explain", "compile --bare", "render --as jax", "compare --no-run")


@pytest.mark.parametrize("command", READING)
def test_commands_of_a_program_read_it(command: str, piped: Piped) -> None:
    done = piped(ROUGH, *command.split(), "-")
    assert done.code == 0, done.err
    assert "p" in done.out


def test_fmt_prints(piped: Piped) -> None:
    assert piped(ROUGH, "fmt", "-") == Done(0, FINE, "")
    assert piped(FINE, "fmt", "-") == Done(0, FINE, "")
    assert piped(ROUGH, "fmt", "-", "--check") == Done(1, "would change <stdin>\n", "")
    assert piped(FINE, "fmt", "-", "--check") == Done(0, "", "")
    broken = piped("dim a = (", "fmt", "-")
    assert (broken.code, broken.out, broken.codes) == (1, "", ["error[MD0003]"])


@pytest.mark.parametrize("data", [b"\xff", b"dim a = \0"])
def test_bytes_that_are_no_text(data: bytes, piped: Piped) -> None:
    done = piped(data, "check", "-")
    assert done.code == 1
    assert "`<stdin>`" in done.err


def test_a_closed_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    done = cli("check", "-")
    assert (done.code, done.codes) == (2, ["error[MD0010]"])


# --- fmt --diff ------------------------------------------------------------------------------


def test_a_difference_is_a_patch(cli: Cli, piped: Piped, tmp_path: Path) -> None:
    done = cli("fmt", "--diff", write(ROUGH))
    assert done.code == 1
    assert done.out.startswith("--- f.mdsl\n+++ f.mdsl\n@@ -1,2 +1,2 @@\n-dim a=4,  b = 3 # \tx\n")
    assert Path("f.mdsl").read_text() == ROUGH, "nothing is written"
    (tmp_path / "p").write_text(done.out)
    subprocess.run(["patch", "f.mdsl", "p"], check=True, stdout=subprocess.DEVNULL)
    assert Path("f.mdsl").read_text() == FINE
    assert cli("fmt", "--diff", "f.mdsl") == Done(0, "", "")
    assert piped(ROUGH, "fmt", "--diff", "-").out == done.out.replace("f.mdsl", "<stdin>")


def test_a_difference_of_line_ends(cli: Cli) -> None:
    done = cli("fmt", "--diff", write(FINE.replace("\n", "\r\n")))
    assert done.code == 1
    assert done.out == "f.mdsl: only ends of lines, or the mark at its beginning\n"


def test_a_difference_in_colour(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    write(ROUGH.replace("x\n", "\x1b[31m\u2028x\n"))
    monkeypatch.setattr("meshdsl.cli.common._on_terminal", lambda: True)
    done = cli("fmt", "--diff", "f.mdsl")
    assert "\x1b[32m+program p(x[a]) { return x }" in done.out
    assert "\\x1b[31m\\u2028x" in done.out
