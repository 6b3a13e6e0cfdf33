"""Processes of a test, forked from one that has imported torch: an import takes seconds."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from meshdsl.backends.runtime.files import write_npz
from tests.project import ROOT
from tests.waiting import ended, started

Ended = tuple[int, str, str]
"""The exit code of a process, and what it printed on its two outputs."""


def forked(work: Callable[[], object]) -> int:
    """A child process that does `work` and then ends, with 1 where that raised; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(world: int, work: Callable[[int], object], patient: bool = False) -> NoReturn:
    """Do `work(rank)` in so many processes, and exit with 0 if all did.

    The first line that is printed has their numbers, the last their exit codes. When one fails, the
    others are killed, since they would wait for it; not so if `patient`.
    """
    pids = [forked(partial(work, rank)) for rank in range(world)]
    print(*pids, flush=True)
    codes: dict[int, int] = {}
    while len(codes) < world:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in set(pids) - set(codes) if codes[pid] and not patient else ():
            os.kill(other, signal.SIGKILL)
    print(*[codes[pid] for pid in pids], flush=True)
    sys.exit(max(map(abs, codes.values())))


def run_script(
    path: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Ended:
    """`python PATH ARGUMENTS…` in the folder of the script, as a fork of this process."""
    outputs = folder / "out", folder / "err"

    def work() -> None:
        for number, output in enumerate(outputs, 1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(path.parent)
        os.environ.update(environment)
        sys.argv = [path.name, *arguments]
        runpy.run_path(path.name, run_name="__main__")

    _, status = os.waitpid(forked(work), 0)
    out, err = (output.read_text(encoding="utf-8") for output in outputs)
    return os.waitstatus_to_exitcode(status), out, err


def run_gloo(
    text: str, inputs: Mapping[str, np.ndarray], folder: Path, world: int
) -> dict[str, np.ndarray]:
    """The outputs of an emitted text on so many processes, which talk over gloo."""
    return run_each({"one": text}, inputs, folder, world)["one"]


def run_each(
    texts: Mapping[str, str], inputs: Mapping[str, np.ndarray], folder: Path, world: int
) -> dict[str, dict[str, np.ndarray]]:
    """The outputs of several texts, one after the other on so many processes."""
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "prog.py").write_text(text, encoding="utf-8")
        write_npz(str(folder / name / "in.npz"), dict(inputs))
    folders = [str(folder / name) for name in texts]
    command = [sys.executable, "-m", "tests.ranks", str(world), *folders]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as ranks:
        (log,) = ended(ranks)
    assert ranks[0].returncode == 0, log
    found = {}
    for name in texts:
        with np.load(folder / name / "out.npz") as arrays:
            found[name] = dict(arrays)
    return found


def _of_world(rank: int, world: int, port: int) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**own, **meeting}.items()})
    sys.argv = ["prog.py", "--inputs", "in.npz", "--out", "out.npz"]
    runpy.run_path("prog.py", run_name="__main__")


if __name__ == "__main__":
    import torch.distributed  # noqa: F401  # once for all

    devices = int(sys.argv[1])
    for folder in sys.argv[2:]:
        os.chdir(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = partial(run_ranks, devices, partial(_of_world, world=devices, port=port))
        _, status = os.waitpid(forked(ranks), 0)
        if status:
            sys.exit(1)
