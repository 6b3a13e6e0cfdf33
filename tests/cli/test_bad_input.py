"""Bad input that no text file can hold, or that takes more than one file or command."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.codes import CODES

from .command import Cli, Done

PROGRAM = """\
dim batch = 5, io = 3
program p(x[batch, io], ids[batch]: i32) {
  param w[io]
  y = einsum(x, w -> [batch])
  return y, ids
}
"""
GOOD = {"x": np.ones((5, 3), np.float32), "ids": np.zeros(5, np.int32)}


def _write(text: str | bytes, name: str = "f.mdsl") -> str:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def _codes(done: Done) -> list[str]:
    words = (line.split(":")[0] for line in done.err.split("\n"))
    return [word for word in words if word.endswith("]") and "[MD" in word]


# --- bytes -----------------------------------------------------------------------------------

FINE = "dim a = 4\nprogram p(x[a]) { return x }\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + FINE.encode(),
        FINE.replace("\n", "\r\n").encode(),
        FINE.replace("\n", "\r").encode(),
        FINE.rstrip("\n").encode(),
        "# größer, 漢字, \N{PILE OF POO}\n".encode() + FINE.encode(),
    ],
    ids=["bom", "crlf", "cr", "no newline", "comment"],
)
def test_files_that_are_fine(data: bytes, cli: Cli) -> None:
    assert cli("check", _write(data)).code == 0


BYTES = {
    b"dim a = 1\ndim b\0 = 2": ("error[MD0012]", "f.mdsl:2:6", "holds a NUL byte"),
    b"dim a = 1\ndim \xff = 2": ("error[MD0011]", "f.mdsl:2:5", "byte 0xff at offset 14"),
    b"\xef\xbb\xbfdim a\r\n\xe4\xb8": ("error[MD0011]", "f.mdsl:2:1", "byte 0xe4 at offset 10"),
    b"\xff\xfed\0i\0m\0": ("error[MD0011]", "f.mdsl:1:1", "byte 0xff at offset 0"),
    b"dim a = \x1b[31m4\r\n": ("error[MD0002]", "f.mdsl:1:9", "U+001B means nothing"),
}


@pytest.mark.parametrize("data", BYTES, ids=range(len(BYTES)))
def test_bad_bytes(data: bytes, cli: Cli) -> None:
    code, place, words = BYTES[data]
    done = cli("check", _write(data))
    assert done.code == 1
    assert _codes(done)[0] == code
    assert place in done.err
    assert words in done.err
    assert "help: " in done.err
    assert not {char for char in done.err if char < " "} - {"\n"}


LARGE = {
    "parentheses": ("dim a = " + "(" * 10_000 + "1" + ")" * 10_000, "MD0008"),
    "open parentheses": ("dim a = " + "(" * 10_000, "MD0008"),
    "digits": ("dim a = " + "7" * 5_000, "MD0007"),
    "power": ("dim a = 10^13", "MD0106"),
    "tower": ("dim a = 9^9^9^9^9", "MD0106"),
    "factors": ("dim a = 2" + " * 2" * 150, "MD0106"),
    "elements": ("dim a = 2^31 - 1, b = a, c = a\nprogram p(x[a, b, c]) { return x }", "MD0255"),
    "constant": ("dim a = 4\nprogram p(x[a]) { return x + 9^9^9^9 }", "MD0261"),
    "one long line": ("dim a = 4; " * 10_000, "MD0002"),
    "a long name": ("dim a = " + "b" * 100_000, "MD0101"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_things_are_refused_at_once(kind: str, cli: Cli) -> None:
    text, code = LARGE[kind]
    cli("check", _write("dim warm = 1"))  # whatever is imported only once
    tracemalloc.start()
    started = time.monotonic()
    done = cli("check", _write(text))
    seconds, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.code == 1
    assert _codes(done)[0] == f"error[{code}]"
    assert seconds < 5  # a second, without the tracing
    assert peak < 200 * 2**20
    assert max(map(len, done.err.split("\n"))) < 250_000


# --- names and texts that could become code --------------------------------------------------

NAMES = """\
dim class = 4, None = 2, torch = 3, __import__ = 2
mesh def_ = { lambda: 2, None: 1 }
layout import { class -> lambda }
def eval(x[class]) -> [class] {
  param self[class]
  return x * self + 1
}
program exec(class[class], None[None], torch[torch], __import__[__import__]) {
  dist = eval(class)
  device = relu(torch)
  rank = None + 1
  groups = sum(dist)
  inputs = device * rank
  return class, dist, device, rank, groups, inputs, __import__
}
"""


def test_names_of_python_are_only_names(cli: Cli) -> None:
    done = cli("run", _write(NAMES), "--verify", "--mesh", "lambda:2,None:1")
    assert done.code == 0, done.err
    done = cli("compile", _write(NAMES))
    assert done.code == 0
    compile(done.out, "prog.py", "exec")


def _code_of(text: str) -> str:
    """The syntax tree of a text, whatever its strings say (comments are not in it)."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize(
    "name",
    [
        'a"""\nimport os; os.abort()\n"""',
        "a'''\nraise SystemExit\n#",
        "a\\",
        'a"); import os  # ',
        "a\r\nimport os",
        "a {x} %s \N{RIGHT-TO-LEFT OVERRIDE}",
    ],
    ids=range(6),
)
def test_a_file_name_never_becomes_code(name: str, cli: Cli) -> None:
    text = NAMES.replace("return class,", 'y = gelu(torch, approximate="tanh")\n  return class,')
    plain, odd = cli("compile", _write(text)), cli("compile", _write(text, f"{name}.mdsl"))
    assert odd.code == 0, odd.err
    assert _code_of(odd.out) == _code_of(plain.out)
    wrong = cli("check", _write("dim a = ;", f"{name}.mdsl"))
    assert wrong.code == 1
    assert len(wrong.err.split("\n")) == len(cli("check", _write("dim a = ;")).err.split("\n"))


def test_a_string_never_becomes_code(cli: Cli) -> None:
    string = r'"\"\"\"\nimport os; os.abort()\n\"\"\""'
    text = f"dim a = 4\nprogram p(x[a]) {{ return gelu(x, approximate={string}) }}\n"
    done = cli("compile", _write(text))
    assert (done.code, done.out, _codes(done)) == (1, "", ["error[MD0213]"])


# --- starting and running --------------------------------------------------------------------

TWO_BY_FOUR = """\
dim batch = 4, io = 8
mesh pod = { data: 2, tp: 4 }
layout l { batch -> data, io -> tp }
program p(x[batch, io]) {
  y = sum[io](x)
  return y
}
"""


def test_six_processes_for_eight_devices(cli: Cli) -> None:
    assert cli("compile", _write(TWO_BY_FOUR), "-o", "prog.py").code == 0
    ours = ("MASTER", "TORCHELASTIC")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "prog.py", "--seed", "3"],
        env={**environment, "RANK": "0", "WORLD_SIZE": "6"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "this program is for 8 devices (data 2 x tp 4), but 6 started" in done.stderr
    assert "run: torchrun --nproc-per-node 8 prog.py --seed 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mesh_of_a_billion_devices_is_explained(cli: Cli) -> None:
    path = _write("dim a = 4\nmesh huge = { x: 10^9 }\nprogram p(x[a]) { return relu(x) }\n")
    started = time.monotonic()
    report = json.loads(cli("explain", path, "--json").out)
    assert report["mesh"] == {"x": 10**9}
    assert report["totals"]["wire_bytes"] == 0
    for engine, code in (("local", "MD0704"), ("torchrun", "MD0703")):
        done = cli("run", path, "--engine", engine)
        assert (done.code, _codes(done)) == (2, [f"error[{code}]"])
    assert time.monotonic() - started < 10


def test_an_index_out_of_range_is_a_failure_of_the_run(cli: Cli) -> None:
    path = _write(
        "dim vocab = 4, seq = 2\n"
        "program p(ids[seq]: i32) {\n  param t[vocab]\n  return t[vocab = ids]\n}\n"
    )
    np.savez("in.npz", ids=np.array([1, 9], np.int32))
    for engine in ("local", "reference"):
        done = cli("run", path, "--inputs", "in.npz", "--engine", engine)
        assert (done.code, _codes(done)) == (3, ["error[MD0801]"])
        assert "index 9 at [seq=1] is out of range for dim `vocab` of size 4" in done.err
        assert "f.mdsl:4:3" in done.err


# --- files of arrays -------------------------------------------------------------------------

ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "size 1": ({"x": np.ones((1, 3), np.float32)}, "dim batch is 1, not 5"),
    "too few dims": ({"x": np.ones(5, np.float32)}, "has 1 dims, not 2"),
    "truth values": ({"x": np.ones((5, 3), bool)}, "is bool, not float; convert it first"),
    "floats as indices": ({"ids": np.zeros(5)}, "is float, not int; convert it first"),
    "another name": ({"z": np.zeros(5)}, "the program has no such name"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_that_do_not_fit(kind: str, cli: Cli) -> None:
    changed, words = ARRAYS[kind]
    np.savez("in.npz", **{**GOOD, **changed})
    done = cli("run", _write(PROGRAM), "--inputs", "in.npz", "--out", "out.npz")
    assert (done.code, _codes(done)) == (2, ["error[MD0504]"])
    assert words in done.err
    assert "\n  name  expected" in done.err
    assert "help: give every array under its name" in done.err
    assert not Path("out.npz").exists()


def test_missing_arrays_of_both_files(cli: Cli) -> None:
    np.savez("in.npz", x=GOOD["x"])
    np.savez("params.npz", v=np.ones(3))
    done = cli("run", _write(PROGRAM), "--inputs", "in.npz", "--params", "params.npz")
    assert (done.code, _codes(done)) == (2, ["error[MD0504]"] * 2)
    assert done.err.count("missing") == 4


class _Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def _pickled(path: str) -> None:
    objects = np.array([_Boom()], dtype=object)
    if path.endswith(".npz"):
        np.savez(path, **{**GOOD, "x": objects})
    elif path.endswith(".npy"):
        np.save(path, objects)
    else:
        Path(path).write_bytes(pickle.dumps({"x": _Boom()}))


@pytest.mark.parametrize("path", ["in.npz", "in.npy", "in.pkl", "in.pt", "in"])
def test_pickles_are_refused(path: str, cli: Cli) -> None:
    _pickled(path)
    done = cli("run", _write(PROGRAM), "--inputs", path, "--engine", "reference")
    assert (done.code, _codes(done)) == (2, ["error[MD0505]"])
    assert "unpickling can run code hidden in a file, so it is refused" in done.err
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("name", ["in.npz", "in.safetensors", "in.csv"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04rubbish", b"\xff" * 64, b"{}"])
def test_damaged_files_are_refused(name: str, data: bytes, cli: Cli) -> None:
    Path(name).write_bytes(data)
    done = cli("run", _write(PROGRAM), "--inputs", name, "--engine", "reference")
    assert (done.code, _codes(done)) == (2, ["error[MD0505]"])
    assert "help: " in done.err


def test_a_file_cut_short_is_refused(cli: Cli) -> None:
    np.savez("whole.npz", **GOOD)
    whole = Path("whole.npz").read_bytes()
    for length in range(0, len(whole), 97):
        Path("in.npz").write_bytes(whole[:length])
        done = cli("run", _write(PROGRAM), "--inputs", "in.npz", "--engine", "reference")
        assert (done.code, _codes(done)) == (2, ["error[MD0505]"]), length


# --- outputs ---------------------------------------------------------------------------------


def test_outputs_go_where_there_is_a_folder(cli: Cli) -> None:
    path = _write(PROGRAM)
    before = set(Path().iterdir())
    for command in (["run", path, "--out"], ["compile", path, "-o"]):
        for target in ("../../nowhere/x.npz", "nowhere/x.npz", "f.mdsl/x.npz"):
            done = cli(*command, target)
            assert (done.code, _codes(done)) == (2, ["error[MD0502]"]), target
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("command", ["run --out x.npz", "compile -o x.npz"])
def test_files_are_not_overwritten_unasked(command: str, cli: Cli) -> None:
    path, (name, *rest) = _write(PROGRAM), command.split()
    Path("x.npz").write_text("mine")
    done = cli(name, path, *rest)
    assert (done.code, _codes(done)) == (2, ["error[MD0503]"])
    assert "help: --force overwrites it" in done.err
    assert Path("x.npz").read_text() == "mine"
    assert cli(name, path, *rest, "--force").code == 0
    assert Path("x.npz").read_bytes() != b"mine"


# --- the command line ------------------------------------------------------------------------

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
    "search good.mdsl": 2,
    "explain MD9999": 2,
}


@pytest.mark.parametrize("command", EXIT_CODES)
def test_exit_codes(command: str, cli: Cli) -> None:
    _write("dim a = 4\n\nprogram p(x[a]) {\n  return x\n}\n", "good.mdsl")
    _write("dim   a=4\nprogram p(x[a]) {\n  return x\n}\n", "untidy.mdsl")
    _write("dim a = ;\n", "wrong.mdsl")
    _write("dim a = 4\nlayout l { b -> x }\nprogram p(x[a]) { return x }\n", "warned.mdsl")
    done = cli(*command.split())
    assert done.code == EXIT_CODES[command], done.err
    assert (done.code != 0) >= bool(_codes(done)) or "warned" in command
    assert "Traceback" not in done.out + done.err


INDIVISIBLE = """\
dim a = 5
mesh m = { x: 2 }
layout l { a -> x }
program p(x[a]) { return x }
"""


def test_every_file_of_a_command_is_checked(cli: Cli) -> None:
    many = "".join(f"  y{i} = t{i}\n" for i in range(30))
    _write(f"dim a = 4\nprogram p(x[a]) {{\n{many}  return x\n}}\n", "many.mdsl")
    _write("dim a = 4\nprogram p(x[a]) { return y }\n", "one.mdsl")
    _write(INDIVISIBLE, "div.mdsl")
    done = cli("check", "many.mdsl", "one.mdsl", "div.mdsl", "none.mdsl")
    wanted = ["error[MD0102]"] * 21 + ["error[MD0301]", "error[MD0010]", "note[MD0016]"]
    assert sorted(_codes(done)) == sorted(wanted)
    assert "10 more errors of this file are not shown" in done.err
    found = json.loads(cli("check", "many.mdsl", "one.mdsl", "--json").out)
    assert len(found["diagnostics"]) == 22


def test_json_of_a_diagnostic(cli: Cli) -> None:
    _write(INDIVISIBLE)
    done = cli("check", "f.mdsl", "--json")
    assert (done.code, done.err) == (1, "")
    assert json.loads(done.out) == {
        "version": 1,
        "diagnostics": [
            {
                "code": "MD0301",
                "severity": "error",
                "message": "dim `a` of size 5 does not divide over mesh axis `x` of size 2",
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
                        "message": "`x` is of size 2",
                        "file": "f.mdsl",
                        "span": {
                            "start": {"line": 2, "column": 12},
                            "end": {"line": 2, "column": 13},
                        },
                    },
                ],
                "help": "the nearest sizes that divide: `--set a=4` or `--set a=6`",
            }
        ],
    }


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(code: str, cli: Cli) -> None:
    done = cli("explain", code)
    assert (done.code, done.err) == (0, "")
    assert done.out == CODES[code].explanation
