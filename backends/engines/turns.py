"""Which devices of the local engine run: all that are awake, or one at a time, in turns.

Threads pass Python's lock on at each call of torch. Where calls are short, that takes longer than
they do, and a thread that runs alone until it has to wait is faster than two at once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from meshdsl.device.ir import Compute

if TYPE_CHECKING:
    from meshdsl.backends.torch.emitter import ProgramText

SHORT = 1_500_000
"""The work of a call that takes about as long as threads need to pass the lock on: 15 µs."""
CACHED = 2
"""The operations that a processor computes while it moves a byte between its caches."""


def has_short_calls(text: ProgramText) -> bool:
    """Whether the operators of a program take less work, on average, than passing the lock on.

    Counted from the device program, so every run decides alike. A text that is not of a
    compilation has no operators to count.
    """
    works = [work(node) for node in text.nodes.values() if isinstance(node, Compute)]
    return bool(works) and sum(works) < SHORT * len(works)


def work(node: Compute) -> int:
    """The work of an operator on one device in FLOP: computing, or moving its operands."""
    return max(node.flops, CACHED * sum(var.local.bytes for var in (*node.ins, *node.outs)))


class Gates:
    """Lets device threads sleep and wakes them. All devices that are awake run."""

    def __init__(self, devices: int) -> None:
        self._gates = [threading.Lock() for _ in range(devices)]
        for gate in self._gates:
            gate.acquire()

    def begin(self, rank: int) -> None:
        """Start a device, called by its thread."""

    def sleep(self, rank: int) -> None:
        """Sleep until `wake`, which may have been called already."""
        self._gates[rank].acquire()

    def wake(self, rank: int) -> None:
        """Wake a device that sleeps, or is about to."""
        self._gates[rank].release()

    def end(self) -> None:
        """End the device that calls."""

    def open(self) -> None:
        """Let all devices run from now on that are not asleep."""


class Turns(Gates):
    """One device runs until it sleeps or ends; then the one that has waited longest."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._running = self._opened = False

    def begin(self, rank: int) -> None:
        """Start a device, called by its thread: it waits for its turn."""
        self.wake(rank)
        super().sleep(rank)

    def sleep(self, rank: int) -> None:
        """Pass the turn on, and sleep until this device is woken and it is its turn again."""
        self.end()
        super().sleep(rank)

    def wake(self, rank: int) -> None:
        """Give a device its turn at once if none runs, else behind those that wait for theirs."""
        with self._lock:
            if self._running and not self._opened:
                self._waiting.append(rank)
                return
            self._running = True
        super().wake(rank)

    def end(self) -> None:
        """Pass the turn on."""
        with self._lock:
            if self._opened:
                return
            self._running = bool(self._waiting)
            following = self._waiting.popleft() if self._waiting else None
        if following is not None:
            super().wake(following)

    def open(self) -> None:
        """Give all devices their turn at once, now and from now on."""
        with self._lock:
            self._opened = True
            waiting, self._waiting = list(self._waiting), deque()
        for rank in waiting:
            super().wake(rank)
