"""A pipeline schedule as a table: a row of actions for each device, and its text.

`F3` is the forward pass of micro-batch 3 on the stage with the number of the device, `F3@5` that on
stage 5, `B` a backward pass. `I` and `W` are its two halves: the gradient of the stage's input, for
which the stage before waits, and those of its parameters, for which nobody does (Qi et al. 2023).
`U3` updates the stage's parameters with the gradients up to micro-batch 3; where a table has no
updates, there is one at its end. Sends and receives are derived, not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from meshdsl.diagnostics import Span, fail
from meshdsl.records import dataclass

Kind = Literal["F", "B", "I", "W", "U"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Weights = Literal["latest", "stashed", "buffered", "corrected"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
"""Which version of the parameters passes read where a table updates them on the way.

- `latest`: the one that there is.
- `stashed`: a backward pass reads the version that its forward pass read, which is kept for it.
- `buffered`: all passes of a batch, the micro-batches of one update, read the version that was
  new when the batch before began.
- `corrected`: a forward pass reads the latest one, its backward pass an estimate of that.
"""

ANNEAL = 10_000
"""After how many updates the steps of `corrected` are whole, where nothing else is said."""

MOST_PARTS = 1 << 18
"""The most pairs of a stage and a micro-batch; 64 stages and 512 micro-batches are 32,768."""

_ACTION = re.compile(r"([FBIWU])(\d{1,9})(?:@(\d{1,9}))?", re.ASCII)


class Action(NamedTuple):
    """What a device does for one micro-batch on one stage."""

    kind: Kind
    micro: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}@{self.stage}"

    def text(self, device: int) -> str:
        """The action in the row of a device, whose own number goes without saying."""
        return f"{self.kind}{self.micro}" if self.stage == device else str(self)


Row = tuple[Action, ...]


@dataclass(frozen=True)
class ScheduleTable:
    """A row of actions for each device, for `micro` micro-batches through `stages` stages.

    A device may have several stages (chunks, V shapes), and a stage may be on several devices
    (replicas), each for other micro-batches. `verify` says whether a table can be executed.
    """

    stages: int
    micro: int
    rows: tuple[Row, ...]
    weights: Weights = "latest"
    name: str = ""

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.rows)

    @cached_property
    def updates(self) -> bool:
        """Whether parameters are updated on the way: the schedule is asynchronous."""
        return any(action.kind == "U" for row in self.rows for action in row)

    @cached_property
    def halves(self) -> bool:
        """Whether a backward pass is done in halves."""
        return any(action.kind == "I" for row in self.rows for action in row)

    @property
    def forward(self) -> ScheduleTable:
        """The forward passes alone, in their order."""
        rows = tuple(tuple(a for a in row if a.kind == "F") for row in self.rows)
        return replace(self, rows=rows, weights="latest")

    @cached_property
    def is_forward(self) -> bool:
        """Whether there are forward passes alone."""
        return all(action.kind == "F" for row in self.rows for action in row)

    @property
    def text(self) -> str:
        """A line for each device, which `parsed` reads: `F0 F1 B0 …`."""
        return "\n".join(row_text(device, row) for device, row in enumerate(self.rows))


def row_text(device: int, row: Iterable[Action]) -> str:
    """The row of a device: `F0 F1@4 B0 …`."""
    return " ".join(action.text(device) for action in row)


def parse_action(text: str, device: int, span: Span | None = None) -> Action:
    """The action that a text means in the row of a device. Raises MD0520."""
    match = _ACTION.fullmatch(text)
    if match is None:
        help = "write F, B, I, W or U, the micro-batch, and `@` and the stage: `F3`, `B0@5`"
        if all(map(_ACTION.fullmatch, text.split())):
            help = "a cell has one action: separate them by commas"
        fail("MD0520", f"`{text}` is no action of a schedule", span, help=help)
    kind, micro, stage = match.groups()
    return Action(
        next(k for k in KINDS if k == kind), int(micro), device if stage is None else int(stage)
    )


def parsed(text: str, weights: Weights = "latest") -> ScheduleTable:
    """The table of a text with a line for each device. Raises MD0520."""
    lines = text.strip().splitlines()
    return of_rows(
        [
            tuple(parse_action(word, device) for word in line.split())
            for device, line in enumerate(lines)
        ],
        weights,
    )


def of_rows(rows: Sequence[Row], weights: Weights = "latest", name: str = "") -> ScheduleTable:
    """The schedule with these rows, of as many stages and micro-batches as stand in them."""
    actions = [action for row in rows for action in row]
    stages = 1 + max((action.stage for action in actions), default=-1)
    micro = 1 + max((action.micro for action in actions), default=-1)
    return ScheduleTable(stages, micro, tuple(rows), weights, name)
