"""Bad input that no text file can contain, or that takes more than one file or command."""

from __future__ import annotations

import ast
import json
import os
import runpy
import sys
import tracemalloc

import numpy as np
import pytest

from tests.work import counted

from .command import Cli, write
from .forks import Fork

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
    assert cli("check", write(data)).code == 0


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
    done = cli("check", write(data))
    assert done.code == 1
    assert done.codes[0] == code
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
    "one long line": ("dim a = 4; " * 3_000, "MD0002"),
    "a long name": ("dim a = " + "b" * 100_000, "MD0017"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_things_are_refused_at_once(kind: str, cli: Cli) -> None:
    text, code = LARGE[kind]
    cli("check", write("dim warm = 1"))  # whatever is imported only once
    tracemalloc.start()
    with counted() as work:
        done = cli("check", write(text))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.code == 1
    assert done.codes[0] == f"error[{code}]"
    assert work.calls < 500_000 + 50 * len(text)
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
    done = cli("run", write(NAMES), "--verify", "--mesh", "lambda:2,None:1")
    assert done.code == 0, done.err
    done = cli("compile", write(NAMES))
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
    plain, odd = cli("compile", write(text)), cli("compile", write(text, f"{name}.mdsl"))
    assert odd.code == 0, odd.err
    assert _code_of(odd.out) == _code_of(plain.out)
    wrong = cli("check", write("dim a = ;", f"{name}.mdsl"))
    assert wrong.code == 1
    assert len(wrong.err.split("\n")) == len(cli("check", write("dim a = ;")).err.split("\n"))


def test_a_string_never_becomes_code(cli: Cli) -> None:
    string = r'"\"\"\"\nimport os; os.abort()\n\"\"\""'
    text = f"dim a = 4\nprogram p(x[a]) {{ return gelu(x, approximate={string}) }}\n"
    done = cli("compile", write(text))
    assert (done.code, done.out, done.codes) == (1, "", ["error[MD0213]"])


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
    assert cli("compile", write(TWO_BY_FOUR), "-o", "prog.py").code == 0
    fork = Fork(_one_of_six)
    _, err = fork.communicate()
    assert fork.returncode == 2
    assert "this program is for 8 devices, { data: 2, tp: 4 }, but 6 started" in err
    assert "run: torchrun --nproc-per-node 8 prog.py --seed 3" in err
    assert "Traceback" not in err


def _one_of_six() -> None:
    for name in os.environ.keys() & {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}:
        del os.environ[name]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "6"}
    sys.argv = ["prog.py", "--seed", "3"]
    runpy.run_path("prog.py", run_name="__main__")


def test_a_mesh_of_a_billion_devices_is_explained(cli: Cli) -> None:
    path = write("dim a = 4\nmesh huge = { x: 10^9 }\nprogram p(x[a]) { return relu(x) }\n")
    cli("explain", path, "--json")  # whatever is imported only once
    with counted() as work:
        report = json.loads(cli("explain", path, "--json").out)
        for engine, code in (("local", "MD0704"), ("torchrun", "MD0703")):
            done = cli("run", path, "--engine", engine)
            assert (done.code, done.codes) == (2, [f"error[{code}]"])
    assert report["mesh"] == {"x": 10**9}
    assert report["totals"]["wire_bytes"] == 0
    assert work.calls < 5_000_000


def test_an_index_out_of_range_is_a_failure_of_the_run(cli: Cli) -> None:
    path = write(
        "dim vocab = 4, seq = 2\n"
        "program p(ids[seq]: i32) {\n  param t[vocab]\n  return t[vocab = ids]\n}\n"
    )
    np.savez("in.npz", ids=np.array([1, 9], np.int32))
    for engine in ("local", "reference"):
        done = cli("run", path, "--inputs", "in.npz", "--engine", engine)
        assert (done.code, done.codes) == (3, ["error[MD0801]"])
        assert "index 9 at [seq=1] is out of range for dim `vocab` of size 4" in done.err
        assert "f.mdsl:4:3" in done.err


def test_an_integer_divided_by_zero_is_a_failure_of_the_run(cli: Cli) -> None:
    path = write("dim seq = 2\nprogram p(ids[seq]: i32) {\n  return 8 // ids\n}\n")
    np.savez("in.npz", ids=np.array([1, 0], np.int32))
    for engine in ("local", "reference"):
        done = cli("run", path, "--inputs", "in.npz", "--engine", engine)
        assert (done.code, done.codes) == (3, ["error[MD0802]"])
        assert "f.mdsl:3: an integer is divided by zero" in done.err
