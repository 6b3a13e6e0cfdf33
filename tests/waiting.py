"""Waiting for what happens elsewhere, without a clock: the limit of every test ends what hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from meshdsl.backends.engines.watchdog import is_gone

T = TypeVar("T")


def until(look: Callable[[], T | Literal[False]]) -> T:
    """Look again and again until something is found, and return it."""
    while not (found := look()):
        time.sleep(0.02)
    return found


def until_gone(pids: Iterable[int]) -> None:
    """Wait until none of the processes is left."""
    left = list(pids)
    until(lambda: all(map(is_gone, left)))


@contextmanager
def devices_end() -> Iterator[None]:
    """Wait at the end until no thread of a device is left that began here.

    Others may be there: an engine that lasts keeps its threads for tests of other files.
    """
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("device "):
            thread.join()


def release(pipe: Path) -> None:
    """Release a reader that waits on a named pipe; without one, do nothing."""
    with contextlib.suppress(OSError):
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@contextmanager
def started(*commands: Sequence[str], **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes in sessions of their own, all gone at the end with whatever they have started.

    `options` are those of `subprocess.Popen`; output is text.
    """
    processes = [
        subprocess.Popen(command, text=True, start_new_session=True, **options)
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            kill_all(process)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, and the others in its group; close what it was read by.

    One that has ended may have left others behind.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """The outputs of processes, once all have ended; hanging ones are killed by their starter."""
    return [process.communicate()[0] for process in processes]
