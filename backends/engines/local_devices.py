"""The devices of one local run: a thread each, watched while they run, and their results."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from meshdsl.backends.engines.failures import (
    CollectiveError,
    Failure,
    RunError,
    as_error,
    earliest,
    first_failure,
    loops_of,
    place_of,
    position_of,
    program_order,
)
from meshdsl.backends.engines.local_dist import LocalDist, Released
from meshdsl.backends.engines.stack_sampler import fingerprint, outside, place_in, stand
from meshdsl.backends.engines.watchdog import Doing, Watchdog
from meshdsl.diagnostics import DiagnosticError

EVERY = 0.05
"""Seconds between two looks at the devices."""

GRACE = 5.0
"""Seconds that a device which may still fail earlier in program order than another did may stay at
one statement; one that advances is waited for."""

ENDING = 0.5
"""Seconds that stopped devices get for the statement they are in."""


class LocalRunError(RunError):
    """A run of the local engine that failed."""


class Worker:
    """A thread that runs one task after another. It ends when nothing refers to it any more."""

    def __init__(self, name: str) -> None:
        tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.tasks = tasks
        self.thread = threading.Thread(target=_work, args=(tasks,), daemon=True, name=name)
        self.thread.start()
        self.end = weakref.finalize(self, tasks.put, None)


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    with contextlib.suppress(Released):  # it may arrive when the task has just ended
        while (task := tasks.get()) is not None:
            task()
            del task


def _alone() -> None:
    """Compute on one thread in a process that was forked: it has none of the pools of torch."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_alone)


class DeviceThreads:
    """The devices of one run, each of which does `call(rank)` in a thread, and their results.

    `text` is the emitted one that they run: it gives the program order. `workers` are the
    threads of earlier runs, which last; without, there are new ones, which end with the run.
    """

    def __init__(
        self,
        count: int,
        dist: LocalDist,
        call: Callable[[int], Any],
        text: str = "",
        workers: Sequence[Worker] | None = None,
    ) -> None:
        self.dist, self.call, self.text = dist, call, text
        self.outputs: list[Any] = [{} for _ in range(count)]
        self.failures: list[Failure] = []
        self.errors: dict[int, BaseException] = {}
        self._rounds, self._begun, self._share = [0] * count, 0.0, 1
        self._left = set(range(count))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._late: Late | None = None
        self._last = workers is not None
        self._workers = workers or [Worker(f"device {rank}") for rank in range(count)]

    def mark(self, rank: int) -> None:
        """Record that a device begins anew, such as the next step of a training run."""
        self._rounds[rank] += 1
        self._begun = time.monotonic()

    def run(self) -> DeviceThreads:
        """Run all devices to their ends; no thread is left behind that can be stopped.

        When no device advances for long, a warning reports the activity of each.
        """
        import torch

        watch, threads = Watchdog(self._doing), torch.get_num_threads()
        self._share = share_of_cores(len(self._workers))
        self._begun = time.monotonic()
        try:
            for rank, worker in enumerate(self._workers):
                worker.tasks.put(partial(self._device, rank))
            while not self._over.wait(EVERY):
                watch.look()
                if self.failures and self._is_decided():
                    break
        except BaseException:
            self._give_up()
            raise
        finally:
            torch.set_num_threads(threads)  # threads to come would begin with the last one set
            for worker in () if self._last else self._workers:
                worker.end()
        if not self._over.is_set():
            self._give_up()
        return self

    def check(self) -> None:
        """Raise what refused the run, or LocalRunError for the first failure in program order."""
        for _, error in sorted(self.errors.items()):
            if isinstance(error, DiagnosticError | RunError):
                raise error
        if not self.failures:
            return
        first = first_failure(self.text, self.failures)
        code, message, details = as_error(first, self.dist.lines)
        if first.kind == CollectiveError.__name__:
            details["collective"] = first.message
        raise LocalRunError(code, message, **details) from self.errors[first.device]

    def _device(self, rank: int) -> None:
        import torch

        failed = True
        try:
            self.dist.begin(rank)
            if self.dist.closed:
                raise Released
            torch.set_num_threads(self._share)  # each thread has a number of its own
            with torch.inference_mode():
                self.outputs[rank] = self.call(rank)
            failed = False
        except Released:
            pass
        except BaseException as error:
            self._keep(rank, error)
        finally:
            self.dist.end(rank, failed)
            with self._lock:
                self._left.discard(rank)
                if not self._left:
                    self._over.set()

    def _keep(self, rank: int, error: BaseException) -> None:
        line, loops = where(error.__traceback__)
        failure = Failure(
            rank,
            type(error).__name__,
            str(error),
            line,
            loops,
            position_of(getattr(error, "position", None)),
            step=self._rounds[rank],
        )
        with self._lock:
            self.failures.append(failure)
            self.errors[rank] = error

    def _give_up(self) -> None:
        """Release the devices that wait, and stop those that compute at their next statement."""
        self.dist.close()
        with self._lock:
            left = [self._workers[rank].thread.ident or 0 for rank in self._left]
        for ident in left:
            number, error = ctypes.c_ulong(ident), ctypes.py_object(Released)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
        self._over.wait(ENDING)

    # --- where the devices are ---------------------------------------------------------------

    def _is_decided(self) -> bool:
        """Whether no running device can still fail earlier in program order than one has.

        One that is not that far yet is waited for, however slow the machine is, unless it
        stays at one statement for as long as this step of the run took so far.
        """
        if self._late is None:
            self._late = Late(self.text, max(GRACE, time.monotonic() - self._begun))
        with self._lock:
            failures, left = list(self.failures), sorted(self._left)
        places = {rank: self._place(rank) for rank in left}
        return not self._late.among(failures, places)

    def _place(self, rank: int) -> Failure:
        """The position of a device, as the failure it would have there."""
        line, loops = stand(self._frame(rank))
        return Failure(rank, "", "", line, loops, step=self._rounds[rank])

    def _frame(self, rank: int) -> FrameType | None:
        return sys._current_frames().get(self._workers[rank].thread.ident or 0)

    def _doing(self) -> dict[int, Doing]:
        """The activity of each running device."""
        with self._lock:
            left = sorted(self._left)
        return {rank: self._doing_of(rank) for rank in left}

    def _doing_of(self, rank: int) -> Doing:
        frame = self._frame(rank)
        mark = (self._rounds[rank], fingerprint(frame))
        waits = self.dist.waits(rank)
        if waits:
            return Doing(mark, f"waiting in {waits}", waits=True)
        line, _ = stand(frame)
        if line is None:
            return Doing(mark, outside(frame))
        return Doing(mark, f"at {place_of(self.dist.lines, line)}")


class Late:
    """Devices that run on after another failed: those that may still fail earlier in the program.

    `patience` is how long one of them may stay at one statement, in seconds.
    """

    def __init__(self, text: str, patience: float) -> None:
        self.loops, self.patience = loops_of(text), patience
        self._seen: dict[int, tuple[tuple[int, ...], float]] = {}

    def among(self, failures: list[Failure], places: dict[int, Failure]) -> list[int]:
        """The devices in `places` to wait for."""
        first = self._order(earliest(self.loops, failures))
        order = {rank: self._order(place) for rank, place in places.items()}
        return [rank for rank, at in order.items() if at <= first and self._moves(rank, at)]

    def _order(self, failure: Failure) -> tuple[int, ...]:
        return (failure.step, *program_order(self.loops, failure))

    def _moves(self, rank: int, at: tuple[int, ...]) -> bool:
        """Whether a device has advanced within its patience."""
        now = time.monotonic()
        furthest, since = self._seen.get(rank, ((), now))
        if not furthest or at > furthest:
            self._seen[rank] = at, now
            return True
        return now - since < self.patience


def where(trace: TracebackType | None) -> tuple[int | None, dict[str, int]]:
    """The line of `device` that an error came from, and its loop counters there."""
    return place_in(traceback.walk_tb(trace))


def share_of_cores(devices: int) -> int:
    """The number of cores for each device, of those that this thread may use."""
    import torch

    bound = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // devices))
