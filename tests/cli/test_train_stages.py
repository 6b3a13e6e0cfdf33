"""A run that goes on under one schedule after the other, and without: the losses of one device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .command import Cli, write

TEXT = """
dim batch = 8, m = 4, o = m, layers = 8
mesh two = { pipe: 2 }
mesh four = { pipe: 2, data: 2 }
mesh alone = { data: 2 }
layout staged { layers -> pipe } with interleaved[batch](4)
layout vee { layers -> pipe } with zb_v[batch](2)
layout mine { layers -> pipe } with swapped[batch]
layout plain { layers -> pipe } with one_f_one_b[batch](4)
layout uneven { layers -> pipe } with gpipe[batch](4, layers="1 7")
layout ragged { layers -> pipe } with interleaved[batch](4, layers="1 3 2 2")
layout split { layers -> pipe, state: layers -> (pipe, data) } with zb_h1[batch](2, layers="5 3")
layout both { layers -> pipe } with chimera[batch](4)
layout each { layers -> pipe, batch -> data, state: layers -> (pipe, data) } with chimera[batch](2)
layout dp { batch -> data }
layout fsdp { batch -> data, params: layers -> data, state: layers -> data }
schedule swapped(stages=2, micro=2) {
  0: F0@1 B0@1 F1@1 B1@1
  1: F0@0 F1@0 B0@0 B1@0
}
program net(x[batch, m], target[batch, m]) {
  param scale[layers] = ones()
  repeat layers {
    param w[m, o]
    param b[m] = zeros()
    x = x + scale * tanh(einsum(x, w -> [batch, o])[o -> m] + b)
  }
  loss = mean((x - target)^2)
  return loss
  minimize loss with adamw(lr=0.05, clip=1.0)
}
"""
WAY = (
    "staged --mesh two", "vee --mesh two", "fsdp --mesh alone", "mine --mesh two",
    "uneven --mesh two --engine torchrun", "ragged --mesh two", "split --mesh four",
    "plain --mesh two", "each --mesh four", "both --mesh two --engine torchrun",
    "staged --mesh two",
)  # fmt: skip


def losses(path: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(path).read_text().splitlines()]


@pytest.fixture
def run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
    np.savez("d.npz", x=x, target=np.sin(x[:, ::-1]))
    return write(TEXT)


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_goes_through_all_orders_of_stages(cli: Cli, run: str) -> None:
    for number, way in enumerate(WAY, 1):
        step = f"--steps {number} --checkpoint kept --log log --resume".split()
        resume = step if number > 1 else step[:-1]
        done = cli("train", run, "--data", "d.npz", "--layout", *way.split(), *resume)
        assert done.code == 0, done.err
    options = f"--layout dp --mesh alone --steps {len(WAY)} --log alone --checkpoint alone_kept"
    assert cli("train", run, "--data", "d.npz", *options.split()).code == 0
    np.testing.assert_allclose(losses("log"), losses("alone"), rtol=1e-5)
    assert len([*Path(f"kept/step-{len(WAY)}").glob("device-*.safetensors")]) == 4
