"""Values on their way between the stages of a pipeline.

A line has a process group of its own, so its messages are a queue for each pair of devices, in
which nothing else overtakes, in the order of the sender's row. Nothing waits but a receiver for its
own message. (Blocking sends on both sides hang, on gloo even of 16 bytes; two directions in one
group of nccl block each other.)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


def actions(row: str) -> Iterator[tuple[str, int]]:
    """The actions of a row: `F0 F1 B0` as (F, 0), (F, 1), (B, 0)."""
    for text in row.split():
        yield text[0], int(text[1:])


class Line:
    """One kind of value on its way from stage to stage, forwards (`F`) or backwards (`B`).

    It comes in the order in which the stage before has its passes in the `schedule`, and may be
    read in another one: what comes early is kept. `room` values are asked for ahead.
    """

    def __init__(
        self,
        group: Any,
        schedule: Sequence[str],
        kind: str,
        stage: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        room: int = 2,
    ) -> None:
        self.group, self.shape, self.dtype = group, shape, dtype
        step, stages = 1 if kind == "F" else -1, range(len(schedule))
        self.source, self.target = stage - step, stage + step
        row = schedule[self.source] if self.source in stages else ""
        made = ("F",) if kind == "F" else ("B", "I")
        self.order = deque(micro for action, micro in actions(row) if action in made)
        self.coming: deque[tuple[int, Any, torch.Tensor]] = deque()
        self.early: dict[int, torch.Tensor] = {}
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()
        for _ in range(room):
            self.ask()

    def ask(self) -> None:
        """Ask for the next value, in memory of its own: the receiver keeps it."""
        if self.order:
            value = torch.empty(self.shape, dtype=self.dtype)
            work = dist.irecv(value, group=self.group, group_src=self.source)
            self.coming.append((self.order.popleft(), work, value))

    def receive(self, micro: int) -> torch.Tensor:
        """The value of a micro-batch, once it has come."""
        while micro not in self.early:
            number, work, self.early[number] = self.coming.popleft()
            self.ask()
            work.wait()
        return self.early.pop(micro)

    def send(self, value: torch.Tensor) -> None:
        """Begin to send a value, which stays as it is until it has arrived."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()
        value = value.contiguous()
        work = dist.isend(value, group=self.group, group_dst=self.target)
        self.sent.append((work, value))

    def close(self) -> None:
        """Wait until all that was sent has arrived; nothing is left that has come."""
        assert not self.coming, "values are to come that nobody has read"
        assert not self.early, "values have come that nobody has read"
        while self.sent:
            self.sent.popleft()[0].wait()
