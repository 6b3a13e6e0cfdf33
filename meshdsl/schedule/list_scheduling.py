"""Tables by list scheduling: a device that is free does the most urgent pass that can begin.

The order of a row is that in which its device would do the passes if they took the times that are
given. It is a table from then on: it runs in that order however long passes take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from heapq import heappop, heappush
from typing import Any

from meshdsl.records import dataclass
from meshdsl.schedule.table import Action
from meshdsl.schedule.times import Exact, Times

Urgency = Callable[[Action, Exact], Any]
"""A key of a pass and of the time since which it can begin: the least is the most urgent one."""


def backward_first(action: Action, since: Exact) -> tuple[Any, ...]:
    """Backward passes before forward passes, those of later stages first."""
    return action.kind == "F", -action.stage, action.micro


def as_they_arrive(action: Action, since: Exact) -> tuple[Any, ...]:
    """Backward passes before forward passes; of either, what has arrived first."""
    return action.kind == "F", since, action.micro


def in_order(
    ways: Sequence[Sequence[int]], times: Times, most: int, urgency: Urgency, group: int = 1
) -> list[list[Action]]:
    """The rows of a list schedule of forward passes F and whole backward passes B.

    ways:  for each group of micro-batches, the device of each stage.
    most:  the most groups that have entered on a device and are not through.
    group: how many micro-batches go forward one directly after the other.
    """
    run = _Execution(ways, times, most, urgency, group)
    return run.rows()


@dataclass(frozen=True)
class _Execution:
    """Devices, what they wait for, and the times at which any of them may begin something."""

    ways: Sequence[Sequence[int]]
    times: Times
    most: int
    urgency: Urgency
    group: int
    entering: dict[int, deque[int]] = field(default_factory=dict)
    flying: dict[int, int] = field(default_factory=dict)
    free: dict[int, Exact] = field(default_factory=dict)
    waiting: dict[int, list[tuple[Action, Exact]]] = field(default_factory=dict)
    wakes: list[tuple[Exact, int]] = field(default_factory=list)
    lines: dict[tuple[int, int, bool], Exact] = field(default_factory=dict)
    done: dict[int, list[Action]] = field(default_factory=dict)

    def rows(self) -> list[list[Action]]:
        """Execute until nothing is left to do; the rows in the order of the devices."""
        devices = sorted({device for way in self.ways for device in way})
        for device in devices:
            self.entering[device], self.waiting[device], self.done[device] = deque(), [], []
            self.flying[device] = 0
            self.free[device] = 0
            heappush(self.wakes, (0, device))
        for number, way in enumerate(self.ways):
            self.entering[way[0]].append(number)
        while self.wakes:
            now, device = heappop(self.wakes)
            if self.free[device] <= now:
                self._begin(device, now)
        return [self.done[device] for device in devices]

    def _begin(self, device: int, now: Exact) -> None:
        """Do the most urgent of what can begin now, if anything can."""
        ready = [each for each in self.waiting[device] if each[1] <= now]
        if self.entering[device] and self.flying[device] < self.most:
            ready.append((Action("F", self.entering[device][0] * self.group, 0), 0))
        if not ready:
            return
        chosen = min(ready, key=lambda each: self.urgency(*each))
        action = chosen[0]
        if action.kind == "F" and action.stage == 0:
            self.entering[device].popleft()
            self.flying[device] += 1
        else:
            self.waiting[device].remove(chosen)
        count = self.group if action.kind == "F" else 1
        for micro in range(action.micro, action.micro + count):
            now = self._do(device, action._replace(micro=micro), now)
        self.free[device] = now
        heappush(self.wakes, (now, device))

    def _do(self, device: int, action: Action, now: Exact) -> Exact:
        """Do one pass, and hand on what it yields; when it ends."""
        self.done[device].append(action)
        duration, leaves = self.times.of(action)
        kind, micro, stage = action
        way, is_last = self.ways[micro // self.group], (micro + 1) % self.group == 0
        if kind == "F" and stage + 1 == len(way):
            self._await(device, Action("B", micro, stage), now + duration)
        elif kind == "F":
            arrival = self._sent(action, way[stage + 1], stage, now + leaves)
            if is_last:
                # A group goes on when the last of its micro-batches is there.
                follower = Action("F", micro + 1 - self.group, stage + 1)
                self._await(way[stage + 1], follower, arrival)
        elif stage > 0:
            arrival = self._sent(action, way[stage - 1], stage - 1, now + leaves)
            self._await(way[stage - 1], Action("B", micro, stage - 1), arrival)
        else:
            self.flying[device] -= is_last
        return now + duration

    def _sent(self, action: Action, target: int, between: int, at: Exact) -> Exact:
        """When a message arrives: a line between devices carries one at a time."""
        source = self.ways[action.micro // self.group][action.stage]
        if source == target:
            return at
        line = source, target, action.kind == "F"
        self.lines[line] = max(at, self.lines.get(line, 0)) + self.times.message(between)
        return self.lines[line]

    def _await(self, device: int, action: Action, since: Exact) -> None:
        """Let a pass begin at a time or later."""
        self.waiting[device].append((action, since))
        heappush(self.wakes, (since, device))
