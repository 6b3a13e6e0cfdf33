"""Processes of a test, forked from one that has imported torch: an import takes seconds."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

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
