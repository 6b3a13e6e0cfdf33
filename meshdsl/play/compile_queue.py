"""The process that compiles for the page, and the desk that asks it.

A search for the best plan may take long, and nothing stops a thread. So one process answers, and is
ended when something newer is asked: what the user typed last is what counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdsl.play.protocol import CompileJob, Failed, JobAnswer

_START = "from meshdsl.play.compile_queue import main; main()"


def main() -> None:
    """Answer questions, a line of JSON each, until the server ends and with it this input."""
    questions: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    from meshdsl.play.jobs import Jobs

    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that is printed can be taken for an answer
    jobs = Jobs()
    while True:
        replies.write(f"{json.dumps(jobs.answer(json.loads(questions.get())))}\n")
        replies.flush()


def _read(questions: SimpleQueue[str]) -> None:
    """Take questions in, and end the process at the end of them, whatever it is at."""
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)


class Desk:
    """Asks one process, started when it is needed; the latest question is the one that counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self._busy = False
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: CompileJob) -> JobAnswer | Failed | None:
        """The answer to a question; None if another one was asked meanwhile.

        `{"failed": …}` where the compiler itself failed.
        """
        with self._lock:
            self._turn += 1
            turn = self._turn
            if self._busy:
                self._end()
            if self._process is None:
                self._process = _start()
            process, self._busy = self._process, True
        line = _exchange(process, json.dumps(job))
        with self._lock:
            if turn != self._turn:
                return None
            self._busy = False
            if not line:
                self._end()
                return {"failed": f"the compiling process ended with {process.returncode}"}
        reply: JobAnswer | Failed = json.loads(line)
        return reply

    def warm(self) -> None:
        """Start the process before the first question."""
        with self._lock:
            if self._process is None:
                self._process = _start()

    def close(self) -> None:
        """End the process; a question that waits has no answer."""
        with self._lock:
            self._turn += 1
            idle = self._process if not self._busy else None
            self._end()
        if idle is not None:
            _close(idle)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None


def _start() -> subprocess.Popen[str]:
    """The process; it takes no module from the folder it is started in."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START],
        stdin=pipe,
        stdout=pipe,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C in the terminal is for the server, which ends this
    )


def _exchange(process: subprocess.Popen[str], question: str) -> str:
    """The line that answers a question; empty where the process ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    line = ""
    with contextlib.suppress(OSError):
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if not line.endswith("\n"):
        process.wait()
        _close(process)
        return ""
    return line


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(OSError):
            stream.close()
