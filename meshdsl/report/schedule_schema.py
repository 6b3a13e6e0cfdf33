"""The fields of `schedule` in the JSON that users read; times are exact fractions, as text."""

from __future__ import annotations

from typing import TypedDict


class ActionTimes(TypedDict):
    """How long each kind of action takes on each stage, exact fractions as text."""

    F: list[str]
    I: list[str]  # noqa: E741
    W: list[str]
    U: list[str]
    send: list[str]
    early: bool


class DeviceRow(TypedDict):
    """The row of a device: its actions, and how long it is busy, idle and waiting."""

    row: str
    stages: list[int]
    in_flight: int
    in_flight_by_stage: dict[str, int]
    busy: str
    idle: str
    waiting: str


ChannelFacts = TypedDict(
    "ChannelFacts", {"from": int, "to": int, "kind": str, "messages": int, "buffers": int}
)
"""Messages from one device to another."""


class VersionFacts(TypedDict):
    """The versions of a stage's parameters that its micro-batches read."""

    stage: int
    forward: list[int]
    backward: list[int]
    staleness: list[int]
    copies: int


class LawFacts(TypedDict):
    """A law of idle time, and its value for a table; `derived` where it is from no publication."""

    formula: str
    condition: str
    published: str | None
    derived: bool
    share: str


class ScheduleFacts(TypedDict):
    """`schedule NAME`: a table in time."""

    version: int
    schedule: str | None
    stages: int
    micro_batches: int
    weights: str | None
    times: ActionTimes
    makespan: str
    bubble: str
    laws: list[LawFacts]
    sends: int
    in_order: bool
    devices: list[DeviceRow]
    lines: list[ChannelFacts]
    versions: list[VersionFacts]


class SlicingRow(TypedDict):
    """A sequence in slices: the tokens of each, their times, and those of the whole pass."""

    slices: list[int]
    times: list[str]
    makespan: str
    bubble: str


class SlicingFacts(TypedDict):
    """`schedule terapipe --tokens N`: times as exact fractions, slices as equal as can be."""

    version: int
    schedule: str
    stages: int
    sequences: int
    slice_times: dict[str, str]
    best: SlicingRow
    even: list[SlicingRow]


class FormulaFacts(TypedDict):
    """A law of idle time: for which numbers, and for which times of passes."""

    formula: str
    where: str | None
    condition: str
    published: str | None
    derived: bool


class KnownSchedule(TypedDict):
    """A schedule that is known by name; laws as text."""

    name: str
    meaning: str
    options: dict[str, int]
    idle: list[FormulaFacts]
    in_flight: str | None
    asynchronous: bool
    source: str


class KnownSchedules(TypedDict):
    """`schedule --list`."""

    version: int
    schedules: list[KnownSchedule]
