"""The emitted program by itself: real processes, an empty folder, no meshdsl to import."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.run import Given, verify
from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Options, compile_source
from meshdsl.syntax.parse import read_source
from tests.waiting import ended, started

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def megatron():
    """The Megatron MLP for four devices, compiled."""
    source = read_source(EXAMPLES / "mlp.mdsl")
    options = Options(layout="megatron", set_dims={"batch": 8, "io": 32})
    return compile_source(source, options, Diagnostics())


@pytest.fixture
def alone(tmp_path, megatron):
    """An empty folder with the program, and an environment in which importing meshdsl fails."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "meshdsl.py").write_text("raise ImportError('the program must not need meshdsl')")
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "prog.py").write_text(megatron.text)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    return folder, environment | {"PYTHONPATH": str(blocked), "OMP_NUM_THREADS": "1"}


def check_outputs(folder, megatron):
    """The outputs that the processes wrote are the reference's."""
    with np.load(folder / "out.npz") as archive:
        outputs = {name: archive[name] for name in archive.files}
    assert all(item.ok for item in verify(megatron, Given(seed=7), outputs))


def test_two_agents_of_two_processes_meet_over_c10d(alone, megatron):
    """How a user leaves one machine: one torchrun per machine, joined by a rendezvous."""
    folder, environment = alone
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "meshdsl", "--local-addr",
        "127.0.0.1", "prog.py", "--seed", "7", "--out", "out.npz",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(command, command, cwd=folder, env=environment, **pipes) as agents:
        logs = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], logs
    assert "loss" in "".join(logs)
    check_outputs(folder, megatron)


def test_it_imports_only_the_standard_library_numpy_and_torch(megatron):
    tree = ast.parse(megatron.text)
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported} - {"numpy", "torch"}
    assert roots <= set(sys.stdlib_module_names)
