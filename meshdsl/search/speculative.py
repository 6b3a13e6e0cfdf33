"""A second process, where there is a core for it: it answers questions that are needed later.

It is forked, so that it has all that is there, and answers one question after another, with what
this process would find. Where there is none, or it is gone, this one finds it itself.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import IO, Generic, NoReturn, TypeVar

from meshdsl.diagnostics import DiagnosticError

Q = TypeVar("Q")
A = TypeVar("A")

IDLE = 10
"""Seconds after which it ends where it is asked nothing: results may be kept for long."""

AHEAD = 8
"""Questions that are asked before they are needed: their answers wait in a pipe, which is small."""


class Second(Generic[Q, A]):
    """A second process that answers by `answer`, forked at the first question.

    Questions and answers are pickled. Where `answer` raises a diagnostic, it has none.
    """

    def __init__(self, answer: Callable[[Q], A]) -> None:
        self.answer = answer
        self.pipes: tuple[IO[bytes], IO[bytes]] | None = None
        self.end: Callable[[], object] = lambda: None
        self.is_gone = not _has_room()
        self.asked: set[Hashable] = set()
        self.known: dict[Hashable, A | None] = {}
        self.dropped: set[Hashable] = set()

    def ask(self, key: Hashable, question: Q) -> None:
        """Let it find an answer, if it is there and not too much is waiting."""
        if self.is_gone or key in self.asked or len(self.asked) > AHEAD:
            return
        try:
            self.pipes = self.pipes or self._begun()
            pickle.dump((key, question), self.pipes[0])
            self.pipes[0].flush()
        except OSError:
            self.is_gone = True
            return
        self.asked.add(key)

    def take(self, key: Hashable) -> A | None:
        """The answer to what has been asked by a key, if it has one."""
        if key not in self.asked:
            return None
        self.asked.discard(key)
        while key not in self.known and not self.is_gone:
            assert self.pipes is not None
            try:
                which, answer = pickle.load(self.pipes[1])
            except (OSError, EOFError, pickle.UnpicklingError):
                self.is_gone = True
                break
            if which in self.dropped:
                self.dropped.discard(which)
            else:
                self.known[which] = answer
        return self.known.pop(key, None)

    def drop(self, key: Hashable) -> None:
        """Do without the answer to what has been asked by a key."""
        if key in self.asked:
            self.asked.discard(key)
            if self.known.pop(key, self) is self:
                self.dropped.add(key)

    def close(self) -> None:
        """Let it end; the next question begins another one."""
        self.end()
        self.pipes = None
        self.asked.clear()
        self.known.clear()
        self.dropped.clear()

    def _begun(self) -> tuple[IO[bytes], IO[bytes]]:
        theirs, questions = os.pipe()
        answers, ours = os.pipe()
        with warnings.catch_warnings():
            # From Python 3.12 on it warns of any thread; those of numpy's library stand a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            os.close(theirs)
            os.close(ours)
            pipes = open(questions, "wb"), open(answers, "rb")
            self.end = weakref.finalize(self, _end, process, pipes)
            return pipes
        os.close(questions)
        os.close(answers)
        self._serve(theirs, ours)

    def _serve(self, questions: int, answers: int) -> NoReturn:
        """Answer until there is nobody who asks."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(BaseException):  # the first process comes to it, too, and tells of it
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(
                3
            ):  # whoever reads what the first process prints does not wait for us
                os.dup2(nowhere, descriptor)
            with open(questions, "rb") as read, open(answers, "wb") as written:
                while True:
                    signal.alarm(IDLE)  # ends the process, if it comes to that
                    key, question = pickle.load(read)
                    signal.alarm(0)
                    pickle.dump((key, self._answer(question)), written)
                    written.flush()
        os._exit(0)

    def _answer(self, question: Q) -> A | None:
        try:
            return self.answer(question)
        except DiagnosticError:
            return None


def _end(process: int, pipes: tuple[IO[bytes], IO[bytes]]) -> None:
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()
    with suppress(OSError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _has_room() -> bool:
    """Whether the process may be forked, and there is another core.

    No thread but timers may run: what it holds would be held in the fork for ever.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return False
    others = (t for t in threading.enumerate() if t is not threading.current_thread())
    return all(isinstance(thread, threading.Timer) for thread in others)
