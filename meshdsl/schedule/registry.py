"""The schedules that are known by name.

A schedule is a function from the numbers of devices and micro-batches, and options of its own, to a
table. Its docstring begins with what it is, and its source says where it comes from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from importlib import import_module

from meshdsl.diagnostics import Span, advice, all_closest, closest, did_you_mean, fail
from meshdsl.option_edits import give, leave_out, refuse, replace_argument
from meshdsl.records import dataclass
from meshdsl.schedule.laws import Law
from meshdsl.schedule.table import MOST_PARTS, Action, Kind, Row, ScheduleTable, Weights, of_rows
from meshdsl.schedule.times import Times

Rows = Iterable[Iterable[tuple[Kind, int, int]]]
"""For each device its actions: kind, micro-batch, stage."""

Maker = Callable[..., Rows]

HOMES = ("one_stage", "chunks", "updates")
"""The files with the schedules, in the order in which they are listed."""

TIMES = "times"
"""The parameter of a schedule whose rows depend on how long passes take."""

_RECORDS: dict[str, Record] = {}


@dataclass(frozen=True)
class Record:
    """One schedule: its name, the function that makes its rows, the paper or system it is from.

    weights:      the version of the parameters that a pass reads.
    asynchronous: stages update their parameters while micro-batches are in flight.
    idle:         laws of the share of a step in which a device is idle.
    in_flight:    how many micro-batches are in flight at most on device s, over all of its stages.
    also:         what others call it.
    """

    name: str
    make: Maker
    source: str
    weights: Weights = "latest"
    asynchronous: bool = False
    idle: tuple[Law, ...] = ()
    in_flight: Law | None = None
    also: tuple[str, ...] = ()

    @cached_property
    def meaning(self) -> str:
        """The first paragraph of the docstring, in one line."""
        text = inspect.cleandoc(self.make.__doc__ or "")
        return " ".join(text.split("\n\n")[0].split())

    @cached_property
    def options(self) -> Mapping[str, int]:
        """The options beside devices and micro-batches, with their defaults."""
        return {p.name: p.default for p in self._more if p.name != TIMES}

    @cached_property
    def by_times(self) -> bool:
        """Whether the order of its rows depends on how long passes take."""
        return any(p.name == TIMES for p in self._more)

    @cached_property
    def _more(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.make).parameters.values())[2:]


def schedule(
    source: str,
    weights: Weights = "latest",
    asynchronous: bool = False,
    idle: Law | tuple[Law, ...] = (),
    in_flight: Law | None = None,
    also: tuple[str, ...] = (),
) -> Callable[[Maker], Maker]:
    """Registers a schedule under the name of its function, with the facts of its `Record`."""

    def register(make: Maker) -> Maker:
        name = make.__name__
        assert name not in _RECORDS, f"schedule {name} is registered twice"
        laws = (idle,) if isinstance(idle, Law) else idle
        _RECORDS[name] = Record(name, make, source, weights, asynchronous, laws, in_flight, also)
        return make

    return register


@cache
def schedules() -> Mapping[str, Record]:
    """Every schedule by its name."""
    for home in HOMES:
        import_module(f"meshdsl.schedule.{home}")
    return _RECORDS


def generate(
    name: str,
    devices: int,
    micro: int,
    options: Mapping[str, int | None] | None = None,
    span: Span | None = None,
    times: Times | None = None,
) -> ScheduleTable:
    """The table of a schedule by name; options that are None have their default.

    Of a schedule whose order depends on `times` it is the table for these.

    Raises MD0528 for a name that there is not, MD0529 for numbers that it cannot be made for.
    """
    record = lookup(name, span)
    given_options = {key: value for key, value in (options or {}).items() if value is not None}
    for key in given_options:
        if key not in record.options:
            takers = ", ".join(f"`{n}`" for n, r in schedules().items() if key in r.options)
            message = f"`{name}` has no option `{key}`"
            if span is None:
                refuse("MD0529", message, leave_out(f"--{key}"), f"use {takers}")
            fail("MD0529", message, span, help=f"leave it out, or use {takers}")
    for key, value in {"devices": devices, "micro-batches": micro, **given_options}.items():
        if value < 1:
            message = f"`{name}` is not possible with {value} {key}"
            option = {"devices": "--stages", "micro-batches": "--micro"}.get(key, f"--{key}")
            if span is None:
                refuse("MD0529", message, give(option, "1"))
            fail("MD0529", message, span, help="write a number from 1")
    stages = devices * max(given_options.get("chunks", 2), 2 * given_options.get("waves", 1))
    if stages * micro > MOST_PARTS:
        sizes = f"{devices:,} devices and {micro:,} micro-batches"
        help = f"stay below {MOST_PARTS:,} forward passes"
        fail("MD0529", f"`{name}` for {sizes} is too large", span, help=help)
    try:
        more = {TIMES: times} if record.by_times else {}
        steps = record.make(devices, micro, **given_options, **more)
        rows: list[Row] = [tuple(Action(*each) for each in row) for row in steps]
    except Unfit as error:
        fail("MD0529", f"`{name}` is not possible with {error}", span, help=error.help)
    counts = {**record.options, **given_options}
    return replace(of_rows(rows, record.weights), name=name, options=counts)


def lookup(name: str, span: Span | None = None) -> Record:
    """The record of a schedule. Raises MD0528."""
    records = schedules()
    if name not in records:
        near = called(name) or tuple(all_closest(name, list(records)))
        fixes = [replace_argument(name, word, safe=len(near) == 1) for word in near]
        if span is not None:  # the name is written in a program
            fixes = []
        names = f"there are {', '.join(records)}: `meshdsl schedule --list`"
        help = advice(fixes) if fixes else meant(name) or names
        fail("MD0528", f"there is no schedule `{name}`", span, help=help, fixes=tuple(fixes))
    return records[name]


def laws_of_idle(table: ScheduleTable) -> Iterator[tuple[Law, Fraction]]:
    """The laws of idle time that hold for a generated table, with the shares that they give."""
    record = schedules().get(table.name)
    numbers = {"D": table.devices, "N": table.micro, **table.options}
    for law in record.idle if record else ():
        share = law.of(numbers)
        if share is not None:
            yield law, share


def meant(name: str) -> str | None:
    """A `did you mean` sentence for a name that is misspelt, or that others give to schedules."""
    names = [f"`{schedule}`" for schedule in called(name)]
    if not names:
        return did_you_mean(name, list(schedules()))
    *first, last = names
    return f"did you mean {' or '.join([', '.join(first), last] if first else [last])}?"


def called(name: str) -> tuple[str, ...]:
    """The schedules that others call so, or nearly so where no own name is as near."""
    plain = name.lower().replace("-", "_")
    if plain in schedules():
        return (plain,)
    others = list(dict.fromkeys(other for record in schedules().values() for other in record.also))
    near = closest(plain, [*schedules(), *others])
    return tuple(schedule for schedule, record in schedules().items() if near in record.also)


class Unfit(Exception):
    """Numbers that a schedule cannot be made for, and the way out."""

    def __init__(self, what: str, help: str) -> None:
        super().__init__(what)
        self.help = help


def needs(fits: bool, what: str, help: str) -> None:
    """Raise Unfit where numbers do not fit."""
    if not fits:
        raise Unfit(what, help)
