"""Versions of a stage's parameters, where it updates them while micro-batches are in flight."""

import math
from typing import Any

import torch

from meshdsl.backends.runtime.line import actions


def versions_read(row: str, rule: str) -> dict[int, int]:
    """The version that the passes of each micro-batch read; version n is what n updates have made.

    The one that was new before its forward pass (`stashed`), or before the batch ahead of its own,
    of one update each (`buffered`).
    """
    read: dict[int, int] = {}
    batch: list[int] = []
    updates = 0
    for action, micro, _ in actions(row, 0):
        if action == "F" and rule == "stashed":
            read[micro] = updates
        if action in "BW":
            batch.append(micro)
        if action == "U":
            if rule == "buffered":
                read.update(dict.fromkeys(batch, max(0, updates - 1)))
            batch, updates = [], updates + 1
    return read


class Versions:
    """Parameters of a stage as passes in flight read them (PipeDream; PipeDream-2BW).

    An update writes to the newest version, or to a copy of it where a pass is still to read that.
    The memory of a version that nobody will read is that of the next copy.
    """

    def __init__(self, row: str, rule: str, *tensors: torch.Tensor) -> None:
        self.reads = versions_read(row, rule)
        done = [(action, micro) for action, micro, _ in actions(row, 0)]
        self.last = {self.reads[m]: at for at, (action, m) in enumerate(done) if action != "U"}
        self.updates = iter([at for at, (action, _) in enumerate(done) if action == "U"])
        self.newest, self.kept = 0, {0: tensors}
        self.room: list[tuple[torch.Tensor, ...]] = []

    def read(self, micro: int) -> tuple[torch.Tensor, ...]:
        """The version that a pass reads."""
        return self.kept[self.reads[micro]]

    def next(self) -> tuple[torch.Tensor, ...]:
        """The next version, which an update makes of the newest one in its memory."""
        now, newest = next(self.updates), self.kept[self.newest]
        for version in [v for v in self.kept if self.last.get(v, -1) < now]:
            self.room.append(self.kept.pop(version))
        if self.newest in self.kept:
            stored = self.room.pop() if self.room else tuple(map(torch.empty_like, newest))
            for new, old in zip(stored, newest, strict=True):
                new.copy_(old)
        else:
            stored = self.room.pop()  # the newest version itself, the last that was put there
        self.newest += 1
        self.kept[self.newest] = stored
        return stored


class Corrected:
    """Parameters of a stage, and what backward passes read for those of their forward pass.

    That is the newest version less an average of updates, of which e^(-2/t) is kept in each, times
    the number of updates between. Steps are divided by t^(1 - k/anneal) in update k, where t is the
    most updates between. (PipeMare, Yang et al. 2021.)
    """

    def __init__(self, row: str, anneal: int, *tensors: torch.Tensor) -> None:
        begun: dict[int, int] = {}
        self.apart: dict[int, int] = {}
        updates, batch, late = 0, [], [0]
        for action, micro, _ in actions(row, 0):
            if action == "F":
                begun[micro] = updates
            if action in "BI":
                self.apart[micro] = updates - begun[micro]
            if action in "BW":
                batch.append(micro)
            if action == "U":
                late += [updates - begun[m] for m in batch]
                batch, updates = [], updates + 1
        self.behind, self.anneal, self.tensors = max(late), anneal, tensors
        self.average = [torch.zeros_like(tensor) for tensor in tensors if self.behind]
        self.before: list[Any] = []

    def read(self, micro: int) -> tuple[torch.Tensor, ...]:
        """What a backward pass reads."""
        apart = self.apart[micro]
        if not apart:
            return self.tensors
        pairs = zip(self.tensors, self.average, strict=True)
        return tuple(tensor - apart * average for tensor, average in pairs)

    def begin(self) -> None:
        """Keep what an update writes over."""
        self.before = [tensor.clone() for tensor in self.tensors if self.behind]

    def end(self, done: int) -> None:
        """Shorten the step of an update, `done` updates behind the first, and take it in."""
        factor = max(1, self.behind) ** -(1 - min(done / self.anneal, 1))
        decay = math.exp(-2 / max(1, self.behind))
        for tensor, before, average in zip(self.tensors, self.before, self.average, strict=False):
            tensor.sub_(before).mul_(factor).add_(before)
            average.mul_(decay).add_(tensor - before, alpha=1 - decay)
        self.before = []
