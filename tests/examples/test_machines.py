"""`examples/train.slurm` and the loop that it starts: what it passes exists, and trains."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

import meshdsl as md
from tests.examples.scripts import script
from tests.project import ROOT

SLURM = ROOT / "examples" / "train.slurm"
ASKED = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "output")
}
"""Options of sbatch, by its manual."""


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")
def test_the_script_for_slurm_starts_a_process_for_each_device(tmp_path: Path) -> None:
    assert ASKED.keys() == SBATCH
    assert ASKED["ntasks-per-node"] == "1"
    assert len(re.findall("^#SBATCH", SLURM.read_text(), re.MULTILINE)) == len(ASKED)
    stubs = {
        "srun": 'printf \'%s\\n\' "$SRUN_CPUS_PER_TASK" "$@"',
        "scontrol": "printf 'node7\\nnode8\\n'",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-10]",
        "SLURM_JOB_NUM_NODES": ASKED["nodes"],
        "SLURM_GPUS_PER_NODE": ASKED["gpus-per-node"],
        "SLURM_CPUS_PER_TASK": ASKED["cpus-per-task"],
        "SLURM_JOB_ID": "17",
    }
    called = subprocess.run(
        ["bash", SLURM, "examples/lm.mdsl", "tokens.bin"],
        env={**os.environ, **variables}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    cpus, torchrun, *words = called.stdout.splitlines()
    given = get_args_parser().parse_args(words)
    assert (cpus, torchrun) == (ASKED["cpus-per-task"], "torchrun")
    assert (given.nnodes, given.nproc_per_node) == (ASKED["nodes"], ASKED["gpus-per-node"])
    assert (given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id) == ("c10d", "node7:29500", "17")
    assert (ROOT / given.training_script).is_file()
    own = script("train_module").asked(given.training_script_args)
    mesh = {axis: int(size) for axis, size in (a.split(":") for a in own.mesh.split(","))}
    assert math.prod(mesh.values()) == int(given.nnodes) * int(given.nproc_per_node)
    assert list(mesh.values())[-1] == int(given.nproc_per_node)
    sizes = {"seq": own.seq, "batch": own.batch}
    assert md.load(ROOT / own.program, dims=sizes).compile(mesh, own.layout).mesh == mesh


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_loop_learns_and_writes_its_parameters(tmp_path: Path) -> None:
    (np.arange(4000) ** 2 % 61).astype("uint16").tofile(tmp_path / "t.bin")
    (tmp_path / "small.mdsl").write_text("dim model = 8, hidden = 8, layers = 2, heads = 2")
    sizes = [str(tmp_path / "small.mdsl"), "layers=1", "key=4"]
    losses = script("train_module").main([
        str(ROOT / "examples" / "lm.mdsl"), str(tmp_path / "t.bin"), "--mesh", "data:1,tp:1",
        "--layout", "megatron", "--batch", "4", "--seq", "8", "--set", *sizes,
        "--steps", "12", "--lr", "0.02", "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "out" / ".metadata").is_file()
