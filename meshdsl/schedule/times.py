"""How long a schedule takes: every action as early as its row and its messages let it be.

Times are exact fractions of any unit. A backward pass B takes as long as I and W, and the gradient
of its input leaves after I, while the stage before waits for it; with `early` off it leaves after
W, as in torch's and Megatron's 1F1B. A message occupies its line for `send`, and no device.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from functools import cached_property

from meshdsl.diagnostics import Edit, Fix, Source, Span, closest, fail, spelled_right
from meshdsl.records import dataclass
from meshdsl.schedule.table import Action
from meshdsl.schedule.verification import Verified

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
    """How long parts take, on all stages or on each; `send` from each to the next and back.

    Where micro-batches are unlike, `unlike` has for each action what `of` is.
    """

    forward: Each = (Fraction(1),)
    inputs: Each = (Fraction(1),)
    weights: Each = (Fraction(1),)
    update: Each = (Fraction(0),)
    send: Each = (Fraction(0),)
    early: bool = True
    unlike: Mapping[Action, tuple[Exact, Exact]] | None = None

    def of(self, action: Action) -> tuple[Exact, Exact]:
        """How long an action takes, and after how long its result can be sent."""
        if self.unlike is not None:
            return self.unlike[action]
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
    times: dict[str, Each] = {name: (Fraction(value),) for name, value in PARTS.items()}
    usual, more = "F=1,I=1,W=1,send=0", "; `:` separates the times of stages"
    for name, values, span in entries(text, "--times", PARTS, usual, more):
        each = tuple(parse_time(value, span) for value in values.split(":"))
        wanted = stages - (name == "send")
        if len(each) not in (1, wanted):
            help = f"write one for all, or {wanted} separated by `:`"
            fail("MD0530", f"there are {len(each)} times in `{span.text.strip()}`", span, help=help)
        times[name] = each
    return Times(times["F"], times["I"], times["W"], times["U"], times["send"], early)


def entries(
    text: str, option: str, known: Collection[str], usual: str, more: str = ""
) -> Iterator[tuple[str, str, Span]]:
    """The names and values of `F=1,I=1`; a name is one of the `known`. Raises MD0530.

    `usual` is how they are written, `more` what else a name that is there twice may mean.
    """
    source = Source(option, text)
    at, named = 0, set[str]()
    for entry in text.split(","):
        span = Span(source, at, at + len(entry))
        at += len(entry) + 1
        name, equals, values = entry.partition("=")
        name = name.strip()
        if not equals or name not in known:
            near = closest(name, list(known))
            help = f"write `{near}`" if near and equals else f"write {usual}"
            at_name = Span(source, span.start, span.start + len(name))
            fixes = spelled_right(at_name, name, list(known)) if near and equals else ()
            message = f"`{entry.strip()}` is no time of a part"
            fail("MD0530", message, span, help=help, fixes=fixes)
        if name in named:
            edit = Edit(Span(source, span.start - 1, span.end), "")
            fix = Fix(f"leave out `{entry.strip()}`", (edit,), safe=False)
            help = f"{fix.title}{more}"
            fail("MD0530", f"the time of `{name}` is given twice", span, help=help, fixes=(fix,))
        named.add(name)
        yield name, values, span


def parse_time(text: str, span: Span) -> Fraction:
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
    """A schedule in time: when the actions of each device begin and end, in their order."""

    verified: Verified
    times: Times
    starts: tuple[tuple[Exact, ...], ...]
    ends: tuple[tuple[Exact, ...], ...]

    @cached_property
    def rows(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots of each device."""
        return tuple(map(self.row, range(len(self.ends))))

    def row(self, device: int) -> tuple[Slot, ...]:
        """The slots of a device."""
        actions = self.verified.schedule.rows[device]
        return tuple(map(Slot, actions, self.starts[device], self.ends[device]))

    @cached_property
    def makespan(self) -> Fraction:
        """From the beginning of the first action to the end of the last one."""
        return Fraction(max(ends[-1] for ends in self.ends))

    @cached_property
    def busy(self) -> tuple[Fraction, ...]:
        """How long each device works."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(Fraction(sum(ends) - sum(starts)) for starts, ends in pairs)

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """How long each device does not, of the whole."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def waiting(self) -> tuple[Fraction, ...]:
        """How long each device does not between its first action and its last one.

        It is what is left of `idle` where no device waits for all others at the end of a step.
        """
        pairs = zip(self.starts, self.ends, strict=True)
        windows = (ends[-1] - starts[0] for starts, ends in pairs)
        return tuple(window - busy for window, busy in zip(windows, self.busy, strict=True))

    @cached_property
    def bubble(self) -> Fraction:
        """The share of all devices' time that is idle."""
        whole = self.makespan * len(self.ends)
        return sum(self.idle, Fraction(0)) / whole if whole else Fraction(0)


def timed(found: Verified, times: Times | None = None) -> TimedSchedule:
    """The schedule in time, each action as early as possible: when its device is free.

    And when what it reads is there, which is sent at once or through a line of one message at a
    time.
    """
    chosen = times or Times()
    if chosen.unlike is None:
        kinds = [chosen.of(Action(kind, 0, stage)) for kind, stage in found.flow.kinds]
        durations = [kinds[kind] for _, kind, *_ in found.flow.steps]
    else:
        durations = [chosen.of(found.action(place)) for place in found.order]
    free: list[Exact] = [0] * len(found.schedule.rows)
    lines: list[Exact] = [0] * found.flow.lines
    arrived: list[Exact] = [0] * found.flow.messages
    starts: list[list[Exact]] = [[] for _ in free]
    ends: list[list[Exact]] = [[] for _ in free]
    steps = zip(found.flow.steps, durations, strict=True)
    for (device, _, read, sent, line, between), (duration, leaves) in steps:
        start = free[device] if read is None else max(free[device], arrived[read])
        starts[device].append(start)
        free[device] = start + duration
        ends[device].append(free[device])
        if sent is None:
            continue
        arrived[sent] = start + leaves
        if line is not None:
            lines[line] = max(arrived[sent], lines[line]) + chosen.message(between)
            arrived[sent] = lines[line]
    return TimedSchedule(found, chosen, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
