"""A thread that does the work of a server, so that its event loop is always free to answer.

Threads, not processes: beside one that searches for plans, the analysis of a text takes longer, but
answers come soon enough all the same (second table of `benchmarks/editor.py`), and nothing has to
be started, sent or killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

Stale = Callable[[], bool]
"""Whether nobody waits for the result any more."""

Job = Callable[[Stale], Any]


class DaemonThread:
    """One daemon thread; of the jobs with one key that wait for it, the latest is done.

    It does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._waiting: dict[str, tuple[Job, asyncio.Future[Any]]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def do(self, key: str, job: Job) -> asyncio.Future[Any]:
        """The future result of a job; a job of the same key that has not begun is cancelled.

        Cancelling the future makes the job stale, in the middle too.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            before = self._waiting.pop(key, None)
            self._waiting[key] = (job, future)
            self._changed.notify()
        if before is not None:
            before[1].cancel()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                job, future = self._waiting.pop(next(iter(self._waiting)))
            if future.cancelled():
                continue
            result: Any = None
            failed: Exception | None = None
            try:
                result = job(future.cancelled)
            except Exception as error:
                failed = error
            try:
                future.get_loop().call_soon_threadsafe(_finish, future, result, failed)
            except RuntimeError:  # the loop is closed: the server is ending
                return


def _finish(future: asyncio.Future[Any], result: Any, failed: Exception | None) -> None:
    if future.done():
        return
    if failed is None:
        future.set_result(result)
    else:
        future.set_exception(failed)
