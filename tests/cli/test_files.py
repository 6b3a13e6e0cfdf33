"""Files of arrays that do not fit or cannot be trusted, and outputs with nowhere to go."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .command import Cli, write

PROGRAM = """\
dim batch = 5, io = 3
program p(x[batch, io], ids[batch]: i32) {
  param w[io]
  y = einsum(x, w -> [batch])
  return y, ids
}
"""
GOOD: dict[str, Any] = {"x": np.ones((5, 3), np.float32), "ids": np.zeros(5, np.int32)}

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
    done = cli("run", write(PROGRAM), "--inputs", "in.npz", "--out", "out.npz")
    assert (done.code, done.codes) == (2, ["error[MD0504]"])
    assert words in done.err
    assert "\n  name  expected" in done.err
    assert "help: give every array under its name" in done.err
    assert not Path("out.npz").exists()


def test_missing_arrays_of_both_files(cli: Cli) -> None:
    np.savez("in.npz", x=GOOD["x"])
    np.savez("params.npz", v=np.ones(3))
    done = cli("run", write(PROGRAM), "--inputs", "in.npz", "--params", "params.npz")
    assert (done.code, done.codes) == (2, ["error[MD0504]"] * 2)
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
    done = cli("run", write(PROGRAM), "--inputs", path, "--engine", "reference")
    assert (done.code, done.codes) == (2, ["error[MD0505]"])
    assert "unpickling can run code hidden in a file, so it is refused" in done.err
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("name", ["in.npz", "in.safetensors", "in.csv"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04rubbish", b"\xff" * 64, b"{}"])
def test_damaged_files_are_refused(name: str, data: bytes, cli: Cli) -> None:
    Path(name).write_bytes(data)
    done = cli("run", write(PROGRAM), "--inputs", name, "--engine", "reference")
    assert (done.code, done.codes) == (2, ["error[MD0505]"])
    writes = "safetensors.numpy.save_file(" if name.endswith(".safetensors") else "numpy.savez("
    assert f"help: save arrays by {writes}" in done.err


def test_a_file_cut_short_is_refused(cli: Cli) -> None:
    np.savez("whole.npz", **GOOD)
    whole = Path("whole.npz").read_bytes()
    for length in range(0, len(whole), 97):
        Path("in.npz").write_bytes(whole[:length])
        done = cli("run", write(PROGRAM), "--inputs", "in.npz", "--engine", "reference")
        assert (done.code, done.codes) == (2, ["error[MD0505]"]), length


# --- outputs ---------------------------------------------------------------------------------


def test_outputs_go_where_there_is_a_folder(cli: Cli) -> None:
    path = write(PROGRAM)
    before = set(Path().iterdir())
    for command in (["run", path, "--out"], ["compile", path, "-o"]):
        for target in ("../../nowhere/x.npz", "nowhere/x.npz", "f.mdsl/x.npz"):
            done = cli(*command, target)
            assert (done.code, done.codes) == (2, ["error[MD0502]"]), target
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("command", ["run --out x.npz", "compile -o x.npz"])
def test_files_are_not_overwritten_unasked(command: str, cli: Cli) -> None:
    path, (name, *rest) = write(PROGRAM), command.split()
    Path("x.npz").write_text("mine")
    done = cli(name, path, *rest)
    assert (done.code, done.codes) == (2, ["error[MD0503]"])
    assert "help: add `--force`; or choose another name" in done.err
    assert Path("x.npz").read_text() == "mine"
    assert cli(name, path, *rest, "--force").code == 0
    assert Path("x.npz").read_bytes() != b"mine"


@pytest.mark.parametrize("command", ["compile -o", "render --as dtensor -o", "compare --html"])
def test_no_program_is_overwritten_by_what_is_made_of_it(command: str, cli: Cli) -> None:
    path, (name, *rest) = write(PROGRAM), command.split()
    done = cli(name, path, *rest, f"./{path}", "--force")
    assert (done.code, done.codes) == (2, ["error[MD0502]"])
    assert Path(path).read_text() == PROGRAM


def test_outputs_that_the_system_does_not_write(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshdsl.backends.runtime.user_files.os.replace", refuse)
    done = cli("run", write(PROGRAM), "--out", "x.npz")
    assert (done.code, done.codes) == (2, ["error[MD0501]"])
    assert os.listdir() == ["f.mdsl"]


def test_a_link_to_nothing_is_not_written_through_unasked(cli: Cli) -> None:
    path = write(PROGRAM)
    Path("x.py").symlink_to("elsewhere.py")
    assert cli("compile", path, "-o", "x.py").codes == ["error[MD0503]"]
    assert cli("compile", path, "-o", "x.py", "--force").code == 0
    assert Path("x.py").is_symlink()
    assert Path("elsewhere.py").exists()


WRITERS = {
    "fmt f.mdsl": "f.mdsl",
    "check --fix f.mdsl": "f.mdsl",
    "compile f.mdsl --force -o out": "out",
    "compare f.mdsl --force --html out": "out",
    "run f.mdsl --force --out out.npz": "out.npz",
    "schedule gpipe --stages 2 --micro 2 --force --csv out": "out",
    "schedule gpipe --stages 2 --micro 2 --force --torch-csv out": "out",
    "schedule gpipe --stages 2 --micro 2 --force --svg out": "out",
    "simulate f.mdsl --cluster h100 --force --trace out": "out",
}
LONG = "n" * 300
"""A name that no file can have."""

NAMERS = [
    *(c.removesuffix("out") + LONG for c in WRITERS if c.endswith(" out")),
    f"run f.mdsl --out {LONG}.npz",
    f"run f.mdsl --out {LONG}/x.npz",
    f"run f.mdsl --engine torchrun --trace {LONG}",
    *(f"train f.mdsl --data x.npz --steps 1 {o} {LONG}.npz" for o in ("--out", "--log")),
]


@pytest.mark.parametrize("command", NAMERS, ids=lambda command: command.replace(LONG, "LONG"))
def test_a_name_that_is_too_long_is_refused_before_any_work(command: str, cli: Cli) -> None:
    write(PROGRAM)
    done = cli(*command.split())
    assert (done.code, done.codes) == (2, ["error[MD0502]"]), done.err
    assert "File name too long" in done.err
    assert os.listdir() == ["f.mdsl"]


MENDED = "dim   batch = 5, io = 3\nprogram p(x[batch, io]) {\n  a = x * 2.0\n  return x\n}\n"


@pytest.mark.parametrize("command", WRITERS)
def test_on_a_full_disk_the_old_file_is_whole(
    command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write(MENDED if "f.mdsl" == WRITERS[command] else PROGRAM)
    target = Path(WRITERS[command])
    if not target.exists():
        target.write_text("old")
    before, names = target.read_bytes(), set(os.listdir())
    monkeypatch.setattr(os, "fsync", full)
    done = cli(*command.split())
    assert (done.code, done.codes[-1:]) == (2, ["error[MD0501]"]), done.err + done.out
    assert (target.read_bytes(), set(os.listdir())) == (before, names)
