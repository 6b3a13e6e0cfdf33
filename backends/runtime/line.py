"""Values on their way between the stages of a pipeline.

A line has a process group for each pair of devices that it connects and each direction. So the
messages of a pair arrive in the order of the sender's row, and only a receiver waits, for its own
message. (Blocking sends on both sides hang, on gloo even of 16 bytes. In a single nccl group a send
waits for the receives that the device has posted before.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import Groups, as_numbers


def actions(row: str, device: int) -> Iterator[tuple[str, int, int]]:
    """The actions of a row: kind, micro-batch and stage, without `@` that of the device.

    `F0 F1@4 B0` on device 1 are (F, 0, 1), (F, 1, 4), (B, 0, 1).
    """
    for text in row.split():
        micro, _, stage = text[1:].partition("@")
        yield text[0], int(micro), int(stage or device)


def stages_of(row: str, device: int) -> list[int]:
    """The stages of a device, as their iterations lie in what it stores."""
    return sorted({stage for _, _, stage in actions(row, device)})


def exchange(
    x: torch.Tensor, row: str, device: int, group: Any, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The block of the device whose stage this one's row has too, which gets this one's.

    `shape` is that of the result where it may be another than that of `x`.
    """
    (other,) = {stage for _, _, stage in actions(row, device)} - {device}
    sent = as_numbers(x.contiguous())
    received = sent.new_empty(x.shape if shape is None else shape)
    arrives, leaves = ([0] * dist.get_world_size(group) for _ in range(2))
    arrives[other], leaves[other] = received.numel(), sent.numel()
    dist.all_to_all_single(received.view(-1), sent.view(-1), arrives, leaves, group=group)
    return received.view(x.dtype)


def pairs_of(groups: Groups, name: str) -> Any:
    """The process groups of a line. The first use replaces the ranks along its axis by them."""
    if isinstance(groups[name], list):
        groups[name] = PairGroups(groups[name])
    return groups[name]


class PairGroups:
    """A process group for each pair of devices along an axis, and each direction.

    `every` has the ranks along the axis, for each place on the other axes. In a single nccl group
    messages run one after the other (torch 2.8): a receive would delay every send after it.
    """

    def __init__(self, every: list[list[int]]) -> None:
        self.every = every
        self.made: dict[tuple[int, int], Any] = {}

    def connect(self, source: int, target: int) -> None:
        """Make the groups of a pair, given by places along the axis; all processes take part."""
        if (source, target) in self.made:
            return
        self.made[source, target] = None
        for ranks in self.every:
            members = [ranks[source], ranks[target]]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                self.made[source, target] = group

    def pair(self, source: int, target: int) -> tuple[Any, int, int]:
        """The group for messages from one to the other, and the ranks of both in it."""
        first = int(source > target)  # torch sorts the members of a group
        return self.made[source, target], first, 1 - first


At = tuple[int, int]
"""A micro-batch and a stage."""


class Line:
    """One kind of value on its way from stage to stage, forwards (`F`) or backwards (`B`).

    It comes in the order in which the device of the stage before has its passes in the `schedule`,
    and may be read in another one: what comes early is kept. A list of shapes has that of each
    micro-batch. Of each device `room` values are asked for ahead. What goes `back`, against the
    order of the devices, has other groups. A value of one stage that goes on to one other has
    these for its `ends`.
    """

    def __init__(
        self,
        group: Any,
        schedule: Sequence[str],
        kind: str,
        device: int,
        shape: tuple[int, ...] | list[tuple[int, ...]],
        dtype: torch.dtype,
        back: Any = None,
        room: int = 2,
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.group, self.back, self.shape, self.dtype = group, back, shape, dtype
        self.device, self.step = device, 1 if kind == "F" else -1
        if ends is not None:
            self.step = ends[1] - ends[0]
        kinds = ("F",) if kind == "F" else ("B", "I")
        rows = [[*actions(row, number)] for number, row in enumerate(schedule)]
        senders = [[(m, stage) for action, m, stage in row if action in kinds] for row in rows]
        self.home = {part: number for number, row in enumerate(senders) for part in row}
        if ends is not None:
            senders = [[part for part in row if part[1] == ends[0]] for row in senders]
        # From each device what it makes for this one, in that order.
        after = [[(micro, stage + self.step) for micro, stage in row] for row in senders]
        self.order = [deque(p for p in row if self.home.get(p) == device) for row in after]
        ways = {(n, self.home[p]) for n, row in enumerate(after) for p in row if p in self.home}
        for way in sorted((source, target) for source, target in ways if source != target):
            self.groups(*way).connect(*way)
        self.coming: list[deque[tuple[At, Any, torch.Tensor]]] = [deque() for _ in senders]
        self.early: dict[At, torch.Tensor] = {}
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()
        for source in range(len(senders)):
            for _ in range(room if source != device else 0):
                self.ask(source)

    def groups(self, source: int, target: int) -> Any:
        """The process groups for the direction of messages from one device to another."""
        forward = self.back is None or (target > source) == (self.step > 0)
        return self.group if forward else self.back

    def ask(self, source: int) -> None:
        """Ask a device for the next value, in memory of its own: the receiver keeps it."""
        if self.order[source]:
            part = self.order[source].popleft()
            shape = self.shape[part[0]] if isinstance(self.shape, list) else self.shape
            value = torch.empty(shape, dtype=self.dtype)
            group, sender, _ = self.groups(source, self.device).pair(source, self.device)
            work = dist.irecv(value, group=group, group_src=sender)
            self.coming[source].append((part, work, value))

    def receive(self, micro: int, stage: int) -> torch.Tensor:
        """What a stage goes on with of a micro-batch, once it has come."""
        source = self.home[micro, stage - self.step]
        while (micro, stage) not in self.early:
            part, work, self.early[part] = self.coming[source].popleft()
            self.ask(source)
            work.wait()
        return self.early.pop((micro, stage))

    def send(self, value: torch.Tensor, micro: int, stage: int) -> None:
        """Begin to send what a stage has made, which stays as it is until it has arrived.

        A stage on the same device gets a copy.
        """
        target = self.home[part := (micro, stage + self.step)]
        if target == self.device:
            self.early[part] = value.clone()
            return
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()
        value = value.contiguous()
        group, _, receiver = self.groups(self.device, target).pair(self.device, target)
        work = dist.isend(value, group=group, group_dst=receiver)
        self.sent.append((work, value))

    def close(self) -> None:
        """Wait until all that was sent has arrived; nothing is left that has come."""
        assert not any(self.coming), "values are to come that nobody has read"
        assert not self.early, "values have come that nobody has read"
        while self.sent:
            self.sent.popleft()[0].wait()
