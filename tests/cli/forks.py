"""Processes of a test, forked from this one, which has imported all that commands need."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshdsl.cli import main
from tests.ranks import forked


class Fork:
    """A child process that does `work`, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.returncode: int | None = None
        self._outputs = [Path(f"{name}.of.fork") for name in ("out", "err")]
        self.pid = forked(lambda: self._redirected(work))

    def send_signal(self, how: signal.Signals) -> None:
        os.kill(self.pid, how)

    def communicate(self) -> tuple[str, str]:
        """What it printed on its two outputs, once it has ended."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        out, err = (output.read_text(encoding="utf-8") for output in self._outputs)
        return out, err

    def _redirected(self, work: Callable[[], object]) -> None:
        for number, output in enumerate(self._outputs, 1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))
        for name in ("stdout", "stderr"):  # as of a process that nobody has redirected
            setattr(sys, f"__{name}__", getattr(sys, name))
        try:
            work()
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)  # as at the end of any process


@contextmanager
def at_work(*arguments: object) -> Iterator[Fork]:
    """A command that runs beside the test, in its folder, and is gone at the end."""
    fork = Fork(lambda: command(*arguments))
    try:
        yield fork
    finally:
        if fork.returncode is None:  # else its number may be another process's by now
            fork.send_signal(signal.SIGKILL)
            os.waitpid(fork.pid, 0)


def command(*arguments: object) -> None:
    """`meshdsl ARGUMENTS…`, which ends the process."""
    sys.argv = ["meshdsl", *map(str, arguments)]
    main()


def printed(work: Callable[[], object]) -> tuple[str, str]:
    """What `work` printed in a process of its own, which has to end well."""
    fork = Fork(work)
    out, err = fork.communicate()
    assert fork.returncode == 0, err
    return out, err
