"""How long a schedule takes: every action as early as its row and its messages let it be.

Times are exact fractions of any unit. A backward pass B takes as long as I and W, and the gradient
of its input leaves after I, while the stage before waits for it; with `early` off it leaves after
W, as in torch's and Megatron's 1F1B. A message occupies its line for `send`, and no device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property

from meshdsl.diagnostics import Source, Span, closest, fail
from meshdsl.records import dataclass
from meshdsl.schedule.table import Action
from meshdsl.schedule.verification import Key, Place, Verified

PARTS: Mapping[str, int] = {"F": 1, "I": 1, "W": 1, "U": 0, "send": 0}
"""What has a time of its own, and how long it takes if nothing is said."""

LONGEST = 12
"""Digits of a time that is given as text."""

Exact = Fraction | int
"""A time without rounding: of whole ticks, which are added up many times faster, an int."""

Each = tuple[Exact, ...]
"""One time for all stages, or one for each."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long parts take, on all stages or on each; `send` from each to the next and back."""

    forward: Each = (Fraction(1),)
    inputs: Each = (Fraction(1),)
    weights: Each = (Fraction(1),)
    update: Each = (Fraction(0),)
    send: Each = (Fraction(0),)
    early: bool = True

    def of(self, action: Action) -> tuple[Exact, Exact]:
        """How long an action takes, and after how long its result can be sent."""
        stage = action.stage
        match action.kind:
            case "F":
                duration = _at(self.forward, stage)
            case "I":
                duration = _at(self.inputs, stage)
            case "W":
                duration = _at(self.weights, stage)
            case "U":
                duration = _at(self.update, stage)
            case "B":
                inputs = _at(self.inputs, stage)
                duration = inputs + _at(self.weights, stage)
                return duration, inputs if self.early else duration
        return duration, duration

    def message(self, stage: int) -> Exact:
        """How long a message between a stage and the next one takes."""
        return _at(self.send, stage)


def _at(each: Each, stage: int) -> Exact:
    return each[0] if len(each) == 1 else each[stage]


def parse_times(text: str, stages: int, early: bool = True) -> Times:
    """The times of `F=1,I=1,W=1,send=0`, with `F=1:2:1` for three stages. Raises MD0530."""
    source = Source("--times", text)
    times: dict[str, Each] = {name: (Fraction(value),) for name, value in PARTS.items()}
    at, named = 0, set[str]()
    for entry in text.split(","):
        span = Span(source, at, at + len(entry))
        at += len(entry) + 1
        name, equals, values = entry.partition("=")
        name = name.strip()
        if not equals or name not in PARTS:
            near = closest(name, list(PARTS))
            help = f"did you mean `{near}`?" if near and equals else "write F=1,I=1,W=1,send=0"
            fail("MD0530", f"`{entry.strip()}` is no time of a part", span, help=help)
        if name in named:
            help = "write it once; `:` separates the times of stages"
            fail("MD0530", f"the time of `{name}` is given twice", span, help=help)
        named.add(name)
        each = tuple(_time(value, span) for value in values.split(":"))
        wanted = stages - (name == "send")
        if len(each) not in (1, wanted):
            help = f"write one for all, or {wanted} separated by `:`"
            fail("MD0530", f"there are {len(each)} times in `{entry.strip()}`", span, help=help)
        times[name] = each
    return Times(times["F"], times["I"], times["W"], times["U"], times["send"], early)


def _time(text: str, span: Span) -> Fraction:
    """A time that is not negative: `2`, `0.5`, `1/3`."""
    form = re.fullmatch(r"\d+(\.\d+)?|\d+/0*[1-9]\d*", text.strip(), re.ASCII)
    if form is None or len(text) > LONGEST:
        help = "write a number: 2, 0.5 or 1/3"
        fail("MD0530", f"`{text.strip()}` is no time", span, help=help)
    return Fraction(text.strip())


@dataclass(frozen=True, slots=True)
class Slot:
    """When an action begins and ends."""

    action: Action
    start: Exact
    end: Exact


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule in time: the slots of each device in the order of its row."""

    verified: Verified
    times: Times
    rows: tuple[tuple[Slot, ...], ...]

    @cached_property
    def makespan(self) -> Fraction:
        """From the beginning of the first action to the end of the last one."""
        return Fraction(max(row[-1].end for row in self.rows))

    @cached_property
    def busy(self) -> tuple[Fraction, ...]:
        """How long each device works."""
        return tuple(Fraction(sum(s.end - s.start for s in row)) for row in self.rows)

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """How long each device does not, of the whole."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def waiting(self) -> tuple[Fraction, ...]:
        """How long each device does not between its first action and its last one.

        It is what is left of `idle` where no device waits for all others at the end of a step.
        """
        windows = (row[-1].end - row[0].start for row in self.rows)
        return tuple(window - busy for window, busy in zip(windows, self.busy, strict=True))

    @cached_property
    def bubble(self) -> Fraction:
        """The share of all devices' time that is idle."""
        whole = self.makespan * len(self.rows)
        return sum(self.idle, Fraction(0)) / whole if whole else Fraction(0)


def timed(found: Verified, times: Times | None = None) -> TimedSchedule:
    """The schedule in time, each action as early as possible."""
    chosen = times or Times()
    clock = _Clock(found, chosen)
    for place in found.order:
        clock.act(place)
    return TimedSchedule(found, chosen, tuple(map(tuple, clock.rows)))


class _Clock:
    """What is known while time goes on: slots, and when messages arrive."""

    def __init__(self, found: Verified, times: Times) -> None:
        self.found, self.times = found, times
        self.rows: list[list[Slot]] = [[] for _ in found.schedule.rows]
        self.arrived: dict[tuple[int, int, bool], Exact] = {}
        self.free: dict[Key, Exact] = {}

    def act(self, place: Place) -> None:
        """Begin an action when the device is free and what it reads is there."""
        device, _ = place
        action = self.found.action(place)
        row = self.rows[device]
        start = row[-1].end if row else 0
        if action.kind in "FBI":
            there = (action.micro, action.stage, action.kind == "F")
            start = max(start, self.arrived.get(there, start))
        duration, sent = self.times.of(action)
        row.append(Slot(action, start, start + duration))
        if action.kind in "FBI":
            self._send(action, device, start + sent)

    def _send(self, action: Action, device: int, at: Exact) -> None:
        """Let a result be where it is read, at once or through a line of one message at a time."""
        forward = action.kind == "F"
        reader = (action.micro, action.stage + (1 if forward else -1))
        target = self.found.device_of.get(reader)
        if target is None:
            return
        if target != device:
            line: Key = (device, target, "F" if forward else "B")
            took = self.times.message(min(action.stage, reader[1]))
            at = self.free[line] = max(at, self.free.get(line, at)) + took
        self.arrived[(*reader, forward)] = at
