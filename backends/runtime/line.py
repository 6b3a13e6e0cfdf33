"""Values on their way between the stages of a pipeline.

A line has a process group of its own, so its messages are a queue for each pair of devices, in
which nothing else overtakes: who verified the order of the passes has verified that of the
messages. Nothing waits but a receiver for its own message. (Blocking sends on both sides hang, on
gloo even of 16 bytes; two directions in one group of nccl block each other.)
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def actions(row: str) -> Iterator[tuple[str, int]]:
    """The actions of a row: `F0 F1 B0` as (F, 0), (F, 1), (B, 0)."""
    for text in row.split():
        yield text[0], int(text[1:])


class Line:
    """One kind of value between the stages of a pipeline.

    It comes from the stage `source` and goes to the stage `target`, numbers in the `group` or None;
    `count` values of a `shape` and `dtype` come, `room` of them are asked for ahead.
    """

    def __init__(
        self,
        group: Any,
        source: int | None,
        target: int | None,
        count: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        room: int = 2,
    ) -> None:
        self.group, self.source, self.target = group, source, target
        self.left, self.shape, self.dtype = 0 if source is None else count, shape, dtype
        self.coming: deque[tuple[Any, torch.Tensor]] = deque()
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()
        for _ in range(room):
            self.ask()

    def ask(self) -> None:
        """Ask for the next value, in memory of its own: the receiver keeps it."""
        if self.left:
            self.left -= 1
            value = torch.empty(self.shape, dtype=self.dtype)
            work = dist.irecv(value, group=self.group, group_src=self.source)
            self.coming.append((work, value))

    def receive(self) -> torch.Tensor:
        """The next value, once it has come."""
        work, value = self.coming.popleft()
        self.ask()
        work.wait()
        return value

    def send(self, value: torch.Tensor) -> None:
        """Begin to send a value, which stays as it is until it has arrived."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()[0].wait()
        value = value.contiguous()
        work = dist.isend(value, group=self.group, group_dst=self.target)
        self.sent.append((work, value))

    def close(self) -> None:
        """Wait until all that was sent has arrived; nothing is left that has come."""
        assert not self.coming, "values have come that nobody has read"
        while self.sent:
            self.sent.popleft()[0].wait()
