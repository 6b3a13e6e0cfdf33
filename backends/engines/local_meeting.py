"""Meetings of devices that are threads: who has come to a collective, and what it computes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    """What one device brings to a meeting; `out` is where it wants the result.

    `target` is the position of the member that a permute sends to.
    """

    rank: int
    kind: str
    op: str
    tensor: torch.Tensor
    out: torch.Tensor
    line: int
    target: int | None = None


class Meeting:
    """One collective of a group: its members' calls, what is wrong with them, whether it is over.

    `cancelled`: it cannot take place any more. `holder` is who came last, and computes for all.
    """

    def __init__(self, axes: tuple[str, ...], ranks: list[int]) -> None:
        self.axes, self.ranks = axes, ranks
        self.calls: list[Call | None] = [None] * len(ranks)
        self.problem = ""
        self.holder: int | None = None
        self.over = self.cancelled = False

    @property
    def absent(self) -> list[int]:
        """The members that have not come yet."""
        return [r for r, call in zip(self.ranks, self.calls, strict=True) if call is None]


class Group:
    """One process group: the meetings that some members have not come to, the oldest first."""

    def __init__(self, axes: tuple[str, ...], ranks: list[int]) -> None:
        self.axes, self.ranks = axes, ranks
        self.open: deque[Meeting] = deque()

    def enter(self, position: int, call: Call) -> Meeting:
        """Put a call down in the first meeting without one of this member."""
        for meeting in self.open:
            if meeting.calls[position] is None:
                break
        else:
            meeting = Meeting(self.axes, self.ranks)
            self.open.append(meeting)
        meeting.calls[position] = call
        if not meeting.absent:
            self.open.remove(meeting)
        return meeting


def perform(calls: list[Call]) -> None:
    """Compute one collective for all members, whose calls come in rank order."""
    {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "permute": _permute,
    }[calls[0].kind](calls)


def _all_reduce(calls: list[Call]) -> None:
    total = _reduce(calls[0].op, [call.tensor for call in calls], calls[0].out)
    for call in calls[1:]:
        call.out.copy_(total)


def _all_gather(calls: list[Call]) -> None:
    for call in calls:
        for block, source in zip(call.out.chunk(len(calls)), calls, strict=True):
            block.copy_(source.tensor)


def _reduce_scatter(calls: list[Call]) -> None:
    blocks = [call.tensor.chunk(len(calls)) for call in calls]
    for index, call in enumerate(calls):
        _reduce(call.op, [block[index] for block in blocks], call.out)


def _all_to_all(calls: list[Call]) -> None:
    blocks = [call.tensor.chunk(len(calls)) for call in calls]
    for index, call in enumerate(calls):
        for target, source in zip(call.out.chunk(len(calls)), blocks, strict=True):
            target.copy_(source[index])


def _permute(calls: list[Call]) -> None:
    for call in calls:
        assert call.target is not None
        calls[call.target].out.copy_(call.tensor)


def _reduce(op: str, parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The parts reduced in order, into `out`, which may be the first of them."""
    import torch

    functions = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul"}
    combine = getattr(torch, functions[op])
    if len(parts) == 1:
        return out.copy_(parts[0])
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    return out
