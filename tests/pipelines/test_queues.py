"""Messages of every schedule come through where a process group has one queue on each device.

So it is on nccl: of one group, what a device sends begins when what it has asked for before has
come (torch 2.8), and both begin when all that was computed before has been.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from meshdsl.backends.runtime import line
from meshdsl.backends.runtime.line import Line, PairGroups, actions
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import row_text
from tests.schedule.test_published import tables


class Post(NamedTuple):
    """A message that a device sends or asks for: its group and its number there by direction.

    `after` is how many messages have come that are waited for before.
    """

    group: Any
    way: tuple[int, int]
    number: int
    after: int


class Device:
    """The posts of one device, in order; the `dist` of its lines."""

    def __init__(self, number: int) -> None:
        self.number, self.posts = number, list[Post]()
        self.waits, self.counts = list[Post](), Counter[tuple[Any, tuple[int, int]]]()

    def get_rank(self) -> int:
        return self.number

    def irecv(self, value: torch.Tensor, *, group: Any, group_src: int) -> Any:
        return self._post(group, (group.place(group_src), self.number), waited=True)

    def isend(self, value: torch.Tensor, *, group: Any, group_dst: int) -> Any:
        return self._post(group, (self.number, group.place(group_dst)), waited=False)

    def _post(self, group: Any, way: tuple[int, int], waited: bool) -> Any:
        number = self.counts[group, way]
        self.counts[group, way] += 1
        post = Post(group, way, number, len(self.waits))
        self.posts.append(post)
        wait = self.waits.append if waited else lambda post: None
        return SimpleNamespace(is_completed=lambda: False, wait=lambda: wait(post))


class Group(NamedTuple):
    """A process group of some devices, the `number`th that is made: on all in the same order."""

    number: int
    members: tuple[int, ...]

    def place(self, rank: int) -> int:
        return self.members[rank]


class OneGroup(NamedTuple):
    """All messages of a line in one group."""

    group: Group

    def connect(self, source: int, target: int) -> None:
        """There is one for all."""

    def pair(self, source: int, target: int) -> tuple[Group, int, int]:
        return self.group, source, target


def come_through(rows: Sequence[str], stages: int, in_pairs: bool) -> bool:
    """Whether all messages of a schedule come."""
    every = list(range(len(rows)))
    devices = [Device(number) for number in every]
    for device in devices:
        numbers = itertools.count()

        def made(ranks: list[int], numbers: Iterator[int] = numbers) -> Group:
            return Group(next(numbers), tuple(sorted(ranks)))

        groups: dict[str, Any] = {
            name: PairGroups([every]) if in_pairs else OneGroup(made(every))
            for name in ("F", "B", "F back", "B back")
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "new_group", made, raising=False)
            patch.setattr(line, "dist", device)
            run(rows, device.number, stages, groups)
    return all_come(devices)


def run(rows: Sequence[str], number: int, stages: int, groups: dict[str, Any]) -> None:
    """The messages of a device: those of each pass of its row."""
    lines = {
        kind: Line(groups[kind], rows, kind, number, (1,), torch.float32, groups[f"{kind} back"])
        for kind in "FB"
    }
    value = torch.zeros(1)
    for kind, micro, stage in actions(rows[number], number):
        way = {"F": "F", "B": "B", "I": "B"}.get(kind)
        if way is None:
            continue
        first, last = (0, stages - 1) if way == "F" else (stages - 1, 0)
        if stage != first:
            lines[way].receive(micro, stage)
        if stage != last:
            lines[way].send(value, micro, stage)


def all_come(devices: Sequence[Device]) -> bool:
    """Carry out posts until nothing more can begin; whether all have."""
    queues: dict[tuple[int, Any], deque[Post]] = {}
    for device in devices:
        for post in device.posts:
            queues.setdefault((device.number, post.group), deque()).append(post)
    come: set[tuple[Any, tuple[int, int], int]] = set()
    waited = [0] * len(devices)
    goes_on = True
    while goes_on:
        for number, device in enumerate(devices):
            while waited[number] < len(device.waits) and key(device.waits[waited[number]]) in come:
                waited[number] += 1
        begun = [key(q[0]) for (n, _), q in queues.items() if q and q[0].after <= waited[n]]
        new = {each for each, ends in Counter(begun).items() if ends == 2}
        come |= new
        for queue in queues.values():
            if queue and key(queue[0]) in new:
                queue.popleft()
        goes_on = bool(new)
    return not any(queues.values())


def key(post: Post) -> tuple[Any, tuple[int, int], int]:
    return post.group, post.way, post.number


@pytest.mark.parametrize("name", schedules())
def test_messages_come_through(name: str) -> None:
    for table in tables(name):
        rows = [row_text(number, row) for number, row in enumerate(table.rows)]
        assert come_through(rows, table.stages, in_pairs=True), (name, len(rows), table.micro)


def test_in_one_group_they_hold_each_other_up() -> None:
    """Three devices do, two do not: that is what the groups of pairs are for."""
    for devices, comes in ((2, True), (3, False)):
        table = generate("one_f_one_b", devices, 8)
        rows = [row_text(number, row) for number, row in enumerate(table.rows)]
        assert come_through(rows, table.stages, in_pairs=False) is comes
