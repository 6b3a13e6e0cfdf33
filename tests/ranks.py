"""Processes of a test, forked from one that has imported torch: an import takes seconds."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from meshdsl.backends.engines import stack_sampler
from meshdsl.backends.runtime.array_files import write_npz
from tests.garbage import look_seldom
from tests.project import ROOT

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


@dataclass
class Leader:
    """Ranks that were forked, by the process that watches them: it leads a group of its own.

    It stands for a `subprocess.Popen` where a kernel of a notebook is started, too.
    """

    pid: int
    _said: IO[bytes]
    _code: int | None = None
    stdin: None = None
    stdout: None = None
    stderr: None = None

    def poll(self) -> int | None:
        """The exit code, once all ranks are gone."""
        if self._code is None and select.select([self._said], [], [], 0)[0]:
            self.wait()
        return self._code

    def wait(self) -> int:
        """The exit code, when all ranks are gone."""
        if self._code is None:
            self._code = int(self._said.readline())
        return self._code


class Forks:
    """Ranks of one test after the other, forked from one process that imports torch once.

    It also imports `modules`.
    """

    def __init__(self, *modules: str) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", *modules],
            cwd=ROOT,
            start_new_session=True,
            **pipes,
        )

    def close(self) -> None:
        """End the process that ranks are forked from."""
        with self._server:
            self._server.kill()

    @contextmanager
    def ranks(
        self, world: int, arguments: Sequence[str], folder: Path, log: Path, **environment: str
    ) -> Iterator[Leader]:
        """`python ARGUMENTS…` in a folder on so many processes, which print into `log`.

        With a world of 0 it is one process, and no rank of anything.
        """
        asked, said = self._server.stdin, self._server.stdout
        assert asked is not None
        assert said is not None
        job = {"world": world, "arguments": arguments, "folder": str(folder), "log": str(log)}
        job["environment"] = {**os.environ, **environment}
        asked.write(f"{json.dumps(job)}\n".encode())
        leader = Leader(int(said.readline()), said)
        try:
            yield leader
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()

    def run_script(self, path: str, *arguments: object, log: Path) -> str:
        """What `python PATH ARGUMENTS…` prints, from the root of the project; it has to succeed."""
        with self.ranks(0, [path, *map(str, arguments)], ROOT, log) as leader:
            code, printed = leader.wait(), log.read_text(encoding="utf-8")
        assert code == 0, printed
        return printed

    @contextmanager
    def launched(
        self, folder: Path, devices: int, arguments: list[str], **environment: str
    ) -> Iterator[Leader]:
        """Stands for `launched` of the torchrun engine where its launcher is not what is tested."""
        command = [stack_sampler.__file__, str(folder), *arguments]
        log = folder / "log"
        with self.ranks(devices, command, Path.cwd(), log, **environment) as leader:
            yield leader

    def run_gloo(
        self, text: str, inputs: Mapping[str, np.ndarray], folder: Path, world: int
    ) -> dict[str, np.ndarray]:
        """The outputs of an emitted text on so many processes, which talk over gloo."""
        (folder / "prog.py").write_text(text, encoding="utf-8")
        write_npz(str(folder / "in.npz"), dict(inputs))
        command = ["prog.py", "--inputs", "in.npz", "--out", "out.npz"]
        log = folder / "log"
        with self.ranks(world, command, folder, log) as leader:
            assert leader.wait() == 0, log.read_text(encoding="utf-8")
        with np.load(folder / "out.npz") as arrays:
            return dict(arrays)


def serve() -> None:
    """Fork what is asked for by lines of stdin, in turn; tell who leads it, and its exit code."""
    for line in sys.stdin:
        leader = forked(partial(lead, **json.loads(line)))
        os.setpgid(leader, leader)
        print(leader, flush=True)
        _, status = os.waitpid(leader, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def lead(
    world: int, arguments: list[str], folder: str, log: str, environment: dict[str, str]
) -> NoReturn:
    """Run the ranks or the script that `Forks.ranks` asks for, and exit with 0 if all did."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for output in (1, 2):
        os.dup2(said, output)
    sys.argv = [*arguments]
    if not world:
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in {**own, **meeting}.items()})
        runpy.run_path(arguments[0], run_name="__main__")

    run_ranks(world, work)


if __name__ == "__main__":
    for module in ("meshdsl.backends.worker", *sys.argv[1:]):  # once for all
        importlib.import_module(module)
    look_seldom()
    gc.freeze()  # what is there now is shared with the forks, which need not go through it
    serve()
