"""A pipe, a socket or a device where a file is expected is refused; nothing waits for its end."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from .command import Cli, write

LEARN = """\
dim batch = 4, io = 2
mesh two = { d: 2 }
layout data { batch -> d }
program learn(x[batch, io]) {
  param w[io]
  loss = mean((einsum(x, w -> [batch]) - 1.0)^2)
  return loss
  minimize loss with sgd(0.1)
}
"""


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)  # a long path does not fit


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
READ = {
    "check ODD.mdsl": "MD0010",
    "explain ODD.mdsl": "MD0010",
    "fmt ODD.mdsl": "MD0010",
    "schedule ODD.csv": "MD0010",
    "run f.mdsl --inputs ODD.npz": "MD0505",
    "run f.mdsl --params ODD.safetensors": "MD0505",
    "run f.mdsl --engine torchrun --inputs ODD.npz": "MD0505",
    "train f.mdsl --steps 1 --data ODD.npz": "MD0505",
    "train f.mdsl --steps 1 --data ODD.txt": "MD0505",
    "train f.mdsl --steps 1 --data d.npz --params ODD.npz": "MD0505",
    "train f.mdsl --steps 1 --data d.npz --eval-every 1 --eval-data ODD.npz": "MD0505",
    "train f.mdsl --steps 1 --data d.npz --checkpoint ODD.npz": "MD0502",
    "simulate f.mdsl --cluster ODD.toml": "MD0320",
    "cluster show ODD.toml": "MD0320",
    "simulate f.mdsl --cluster h100 --against ODD.json": "MD0631",
    "search --graph ODD.json": "MD0010",
}
WRITTEN = {
    "compile f.mdsl --force -o ODD.py": "MD0502",
    "schedule gpipe --stages 2 --micro 2 --force --csv ODD.csv": "MD0502",
    "run f.mdsl --force --out ODD.npz": "MD0502",
    "compare f.mdsl --force --html ODD.html": "MD0502",
    "train f.mdsl --steps 1 --data d.npz --force --out ODD.npz": "MD0502",
    "train f.mdsl --steps 1 --data d.npz --force --log ODD.jsonl": "MD0502",
    "train f.mdsl --steps 1 --data d.npz --checkpoint ck --resume --log ODD.jsonl": "MD0502",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", READ | WRITTEN)
def test_what_is_no_regular_file_is_refused(command: str, kind: str, cli: Cli) -> None:
    write(LEARN)
    np.savez("d.npz", x=np.ones((8, 2), np.float32))
    (odd,) = (Path(word) for word in command.split() if word.startswith("ODD"))
    KINDS[kind](odd)
    before = odd.lstat().st_mode
    done = cli(*command.split())
    assert (done.code, done.codes) == (2, [f"error[{(READ | WRITTEN)[command]}]"])
    assert odd.lstat().st_mode == before


def test_who_wants_no_file_is_told_how(cli: Cli) -> None:
    done = cli("compile", write(LEARN), "--force", "-o", "/dev/null")
    assert done.codes == ["error[MD0502]"]
    assert "help: name a file, or leave the option out" in done.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["latest", "step-2/manifest.json", "step-2/device-0.safetensors"])
def test_a_checkpoint_with_a_pipe_in_it_is_skipped(
    name: str, kind: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["train", write(LEARN), "--data", "d.npz", "--checkpoint", "ck"]
    np.savez("d.npz", x=np.ones((8, 2), np.float32))
    assert cli(*run, "--steps", "2", "--checkpoint-every", "1").code == 0
    odd = (Path("ck") / name).resolve()
    odd.unlink()
    with monkeypatch.context() as patch:
        patch.chdir(odd.parent)
        KINDS[kind](odd)
    done = cli(*run, "--steps", "3", "--resume")
    assert done.code == 0
    start = 2 if name == "latest" else 1
    assert f"going on after step {start}" in done.out
    assert done.codes == ["warning[MD0542]"] * (start == 1)
    shutil.rmtree("ck")
