"""States and parameters on disk from the command line: training, resuming, a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covering import in_turn

from .command import Cli, write

TEXT = """\
dim batch = 16, io = 8, hidden = 12
mesh two = { d: 2 }
layout data { batch -> d }
layout data_disk extends data { state: memory = disk }
layout data_host extends data { state: memory = host }
layout data_params extends data { params: memory = disk, state: memory = disk }
layout zero1 { batch -> d, state: hidden -> d }
layout zero1_disk extends zero1 { state: memory = disk }
layout zero1_host extends zero1 { state: memory = host }
program net(x[batch, io], t[batch, io]) {
  param w[io, hidden]: bf16
  param v[hidden, io]
  y = einsum(tanh(einsum(x, cast(w, f32) -> [batch, hidden])), v -> [batch, io])
  loss = mean(square(y - t))
  return loss
  minimize loss with OPT
}
"""


@pytest.fixture
def samples(cli: Cli) -> str:
    rng = np.random.default_rng(1)
    x, t = (rng.standard_normal((200, 8)).astype(np.float32) for _ in "xt")
    np.savez("d.npz", x=x, t=t)
    return write(TEXT.replace("OPT", "adamw(lr=0.02, clip=0.5)"))


def train(cli: Cli, layout: str, *options: str, code: int = 0) -> str:
    done = cli("train", "f.mdsl", "--data", "d.npz", "--mesh", "two", "--layout", layout, *options)
    assert done.code == code, done.out + done.err
    return done.out + done.err


def curve(path: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in Path(path).read_text().splitlines()]
    timed = {"seconds", "samples_per_s", "memory"}
    return [{k: v for k, v in record.items() if k not in timed} for record in every]


def stored(folder: str) -> dict[str, bytes]:
    """The files of tensors in the checkpoints of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*.safetensors")}


AT = [("data", "disk"), ("zero1", "disk"), ("data", "host"), ("data", "params")]


@pytest.mark.usefixtures("forked_ranks")
@in_turn(at=AT, engine=["torchrun", "local"])
def test_a_run_is_the_same(at: tuple[str, str], engine: str, samples: str, cli: Cli) -> None:
    """Losses, evaluation and every byte of the checkpoints, which either may go on from."""
    layout, memory = at
    how = ("--engine", engine, "--eval-every", "5", "--checkpoint-every", "5")
    train(cli, layout, "--steps", "10", "--log", "a", "--checkpoint", "kept", *how)
    train(cli, f"{layout}_{memory}", "--steps", "10", "--log", "b", "--checkpoint", "away", *how)
    assert curve("a") == curve("b")
    assert stored("kept") == stored("away") != {}
    ends = (("kept", f"{layout}_{memory}"), ("away", layout))
    for number, (folder, other) in enumerate(ends):
        out = ("--checkpoint", folder, "--resume", "--out", f"{number}.npz")
        train(cli, other, "--steps", "14", *out, "--engine", engine)
    assert stored("kept") == stored("away")
    with np.load("0.npz") as one, np.load("1.npz") as other_one:
        for name in one:
            np.testing.assert_array_equal(one[name], other_one[name])


def test_it_goes_on_under_another_layout(samples: str, cli: Cli) -> None:
    train(cli, "data_disk", "--steps", "5", "--checkpoint", "ck", "--log", "a")
    train(cli, "zero1_host", "--steps", "10", "--checkpoint", "ck", "--resume", "--log", "a")
    train(cli, "data", "--steps", "10", "--log", "b")
    for one, other in zip(curve("a"), curve("b"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_one_step_is_verified(samples: str, cli: Cli) -> None:
    done = cli("run", "f.mdsl", "--step", "--verify", "--mesh", "two", "--layout", "zero1_disk")
    assert done.code == 0, done.err
    assert "verified" in done.out
    reference = train(cli, "zero1_disk", "--steps", "2", "--engine", "reference")
    assert "trained 2 steps" in reference


def test_where_a_number_became_infinite_is_found(cli: Cli) -> None:
    huge = np.full((40, 8), 1e30, np.float32)
    np.savez("d.npz", x=huge, t=huge)
    write(TEXT.replace("OPT", "momentum(lr=1e30)"))
    said = train(cli, "data_disk", "--steps", "5", code=3)
    assert "MD0720" in said
    assert "became inf first, in step 1 at f.mdsl" in said


def test_a_folder_that_cannot_be_written(
    samples: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere at all")
    for done in (
        cli("run", "f.mdsl", "--step", "--mesh", "two", "--layout", "data_disk"),
        cli("train", "f.mdsl", "--data", "d.npz", "--steps", "2", "--layout", "data_disk"),
    ):
        assert done.code == 2
        assert "error[MD0545]: the states cannot be kept in a file in /nowhere at all" in done.err
        assert "help: name a folder with more space" in done.err


@pytest.mark.parametrize("writes", [0, 3, 30])
def test_a_full_disk(writes: int, samples: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning, or later on file systems that do not set the room aside."""
    left, pwrite = [writes], os.pwrite

    def write_some(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", write_some)
    code, name = (2, "MD0545") if writes < 10 else (3, "MD0701")
    said = train(cli, "data_disk", "--steps", "9", code=code)
    assert "No space left on device" in said
    assert name in said
    assert "Traceback" not in said
