"""Exit codes, several files in one command, `--json`, and `explain` of every code."""

from __future__ import annotations

import json
import os

import pytest

from meshdsl.codes import CODES

from .command import Cli, write

EXIT_CODES = {
    "check good.mdsl": 0,
    "explain good.mdsl": 0,
    "explain MD0301": 0,
    "explain md0301": 0,
    "fmt --check good.mdsl": 0,
    "fmt --check untidy.mdsl": 1,
    "fmt --check wrong.mdsl": 1,
    "check wrong.mdsl": 1,
    "check good.mdsl wrong.mdsl": 1,
    "compile wrong.mdsl": 1,
    "run wrong.mdsl": 1,
    "check warned.mdsl": 0,
    "check warned.mdsl --strict": 1,
    "explain warned.mdsl --strict": 1,
    "compile warned.mdsl --strict": 1,
    "check good.mdsl --mesh nothing": 2,
    "check good.mdsl missing.mdsl": 2,
    "check wrong.mdsl missing.mdsl": 2,
    "check": 2,
    "check good.mdsl --nothing": 2,
    "nothing": 2,
    "search good.mdsl": 0,
    "explain MD9999": 2,
}


@pytest.mark.parametrize("command", EXIT_CODES)
def test_exit_codes(command: str, cli: Cli) -> None:
    write("dim a = 4\n\nprogram p(x[a]) {\n  return x\n}\n", "good.mdsl")
    write("dim   a=4\nprogram p(x[a]) {\n  return x\n}\n", "untidy.mdsl")
    write("dim a = ;\n", "wrong.mdsl")
    write("dim a = 4\nlayout l { b -> x }\nprogram p(x[a]) { return x }\n", "warned.mdsl")
    done = cli(*command.split())
    assert done.code == EXIT_CODES[command], done.err
    assert (done.code != 0) >= bool(done.codes) or "warned" in command
    assert "Traceback" not in done.out + done.err


def test_compile_bare_writes_no_runtime(cli: Cli) -> None:
    path = write("dim a = 4\n\nprogram p(x[a]) {\n  return x\n}\n", "good.mdsl")
    done = cli("compile", path, "--bare")
    assert done.code == 0
    assert "def device(" in done.out
    assert "import" not in done.out
    assert "torchrun" not in cli("compile", path, "--bare", "-o", "bare.txt").out


INDIVISIBLE = """\
dim a = 5
mesh m = { x: 100000 }
layout l { a -> x }
program p(x[a]) { return x }
"""


def test_every_file_of_a_command_is_checked(cli: Cli) -> None:
    many = "".join(f"  y{i} = t{i}\n" for i in range(30))
    write(f"dim a = 4\nprogram p(x[a]) {{\n{many}  return x\n}}\n", "many.mdsl")
    write("dim a = 4\nprogram p(x[a]) { return y }\n", "one.mdsl")
    write(INDIVISIBLE, "div.mdsl")
    done = cli("check", "many.mdsl", "one.mdsl", "div.mdsl", "none.mdsl")
    wanted = ["error[MD0102]"] * 21 + ["error[MD0310]", "error[MD0010]", "note[MD0016]"]
    assert sorted(done.codes) == sorted(wanted)
    assert "10 more errors of this file are not shown" in done.err
    found = json.loads(cli("check", "many.mdsl", "one.mdsl", "--json").out)
    assert len(found["diagnostics"]) == 22


def test_json_of_a_diagnostic(cli: Cli) -> None:
    write(INDIVISIBLE)
    done = cli("check", "f.mdsl", "--json")
    assert (done.code, done.err) == (1, "")
    assert json.loads(done.out) == {
        "version": 1,
        "diagnostics": [
            {
                "code": "MD0310",
                "severity": "error",
                "message": "dim `a` of size 5 does not divide over mesh axis `x` of size 100000, "
                "and on more than 65,536 devices it has to",
                "file": "f.mdsl",
                "span": {"start": {"line": 3, "column": 12}, "end": {"line": 3, "column": 18}},
                "related": [
                    {
                        "message": "`a` is of size 5",
                        "file": "f.mdsl",
                        "span": {
                            "start": {"line": 1, "column": 5},
                            "end": {"line": 1, "column": 6},
                        },
                    },
                    {
                        "message": "`x` is of size 100000",
                        "file": "f.mdsl",
                        "span": {
                            "start": {"line": 2, "column": 12},
                            "end": {"line": 2, "column": 13},
                        },
                    },
                ],
                "help": "declare `dim a = 100000`; or `--set a=100000` for one run",
                "fixes": [_size(100000)],
            }
        ],
    }


def _size(size: int) -> dict[str, object]:
    """The fix that gives the dim another size."""
    span = {"start": {"line": 1, "column": 9}, "end": {"line": 1, "column": 10}}
    edit = {"file": "f.mdsl", **span, "text": str(size)}
    return {"title": f"declare `dim a = {size}`", "safe": False, "edits": [edit], "options": []}


def test_codes_are_explained(cli: Cli) -> None:
    """Every twentieth, as all go one way; with `MESHDSL_CASES` all of them."""
    for code in [*CODES][:: 1 if "MESHDSL_CASES" in os.environ else 20]:
        done = cli("explain", code)
        assert (done.code, done.err) == (0, "")
        record, lines = CODES[code], done.out.splitlines()
        assert lines[0] == f"{code}: {record.title}"
        assert max(map(len, lines)) <= int(os.environ["COLUMNS"]) or record.wrong
        for text in (record.meaning, record.way_out):
            assert " ".join(text.split()) in " ".join(done.out.split())
        assert all(f"    {each}".rstrip() in lines for each in record.wrong.split("\n"))
