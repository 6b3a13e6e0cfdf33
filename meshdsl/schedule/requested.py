"""A request to draw a schedule: one record for the command line, notebooks and Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import NamedTuple, TypedDict

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Fix, OptionEdit, fail
from meshdsl.option_edits import give, leave_out, refuse, shown, unknown_value
from meshdsl.records import dataclass
from meshdsl.schedule.declared import table_of
from meshdsl.schedule.registry import generate, lookup, schedules
from meshdsl.schedule.slicing import (
    SliceTimes,
    Slicing,
    best_slices,
    even_slicings,
    parse_slice_times,
)
from meshdsl.schedule.table import WEIGHTS, Weights
from meshdsl.schedule.times import TimedSchedule, Times, parse_times, timed
from meshdsl.schedule.verification import Verified, verify
from meshdsl.syntax import ast

COUNTS = ("chunks", "batch", "forward", "waves", "active")
"""Options that a schedule counts by."""


class ScheduleCounts(TypedDict, total=False):
    """The options of a request that a layout's call of a schedule says itself."""

    micro: int
    chunks: int
    batch: int
    forward: int
    waves: int
    active: int


SLICING = ("unit", "slice_times")
"""Options that go with `tokens` alone."""

WITH_TOKENS = ("tokens", "stages", "micro", *SLICING)
"""All options that mean something with `tokens`."""


class OptionSpelling:
    """How a diagnostic writes an option and a call: as on the command line."""

    def option(self, name: str, value: str = "") -> str:
        """`--slice-times`, `--weights latest`."""
        return f"--{name.replace('_', '-')} {value}".rstrip()

    def call(self, schedule: str) -> str:
        """A request of a schedule that is complete."""
        return f"meshdsl schedule {schedule} --stages 4 --micro 8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """A request, its fields named as on the command line; None: the default.

    `stages` counts the devices, or stages of one each. `times` are those of `parse_times`. With
    `tokens`, a sequence of so many is cut into slices, which `slice_times` gives the time of.
    """

    stages: int | None = None
    micro: int | None = None
    chunks: int | None = None
    batch: int | None = None
    forward: int | None = None
    waves: int | None = None
    active: int | None = None
    weights: str | None = None
    times: str | None = None
    late: bool = False
    tokens: int | None = None
    unit: int | None = None
    slice_times: str | None = None
    spelling: OptionSpelling = field(default_factory=OptionSpelling)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The options that have another value than their default."""
        names = (f.name for f in fields(self) if f.name != "spelling")
        return tuple(name for name in names if getattr(self, name) not in (None, False))


SIZES = {"stages": "4", "micro": "8"}
"""Sizes that a message proposes where none is given."""

TableReader = Callable[[Weights], Verified]
"""A table written by the user; passes read the version of parameters that the argument says."""


def of_declaration(node: ast.ScheduleDecl, request: ScheduleRequest) -> TableReader:
    """The table of a declaration, which says itself what its passes read. Raises MD0532."""
    if request.weights is not None:
        help = f"leave the option out: `{node.name.text}` is declared with what its passes read"
        message = f"`{request.spelling.option('weights')}` does not go with a declared schedule"
        fail("MD0532", message, help=help)
    return lambda weights: table_of(node)


def drawn(which: str | TableReader, request: ScheduleRequest) -> TimedSchedule:
    """The schedule of a name, or a table of the user's own, in time.

    Raises MD0520 to MD0532 and MD0602.
    """
    _refuse(request, SLICING, _slicing_alone)
    verified = _verified(which, request, None)
    times = parse_times(request.times or "F=1", verified.schedule.stages, not request.late)
    if isinstance(which, str) and schedules()[which].by_times:
        verified = _verified(which, request, times)
    return timed(verified, times)


class SlicedSequence(NamedTuple):
    """The best slices of a sequence in a schedule, in time, and those of equal size beside them."""

    schedule: str
    times: SliceTimes
    best: Slicing
    even: tuple[Slicing, ...]
    drawn: TimedSchedule


def sliced(which: str | TableReader, tokens: int, request: ScheduleRequest) -> SlicedSequence:
    """The best slices of a sequence of so many tokens. Raises MD0528 to MD0532."""
    others = tuple(name for name in request.chosen if name not in WITH_TOKENS)
    _refuse(request, others, _not_of_slices)
    verified = _verified(which, request, None)
    schedule = verified.schedule
    if not verified.reverses or schedule.stages > schedule.devices:
        message = f"micro-batches of `{schedule.name or which}` are no slices of a sequence: it "
        message += "does not take the backward passes of a stage from the last to the first"
        fail("MD0532", message, help="use `terapipe`")
    times = parse_slice_times(request.slice_times or "slice=1")
    unit = 1 if request.unit is None else request.unit
    about = (tokens, schedule.stages, schedule.micro, times.of, unit)
    best = best_slices(*about)
    micro = schedule.micro * len(best.sizes)
    in_time = timed(verify(generate(schedule.name, schedule.stages, micro)), best.passes)
    return SlicedSequence(schedule.name, times, best, (*even_slicings(*about),), in_time)


def _refuse(
    request: ScheduleRequest, names: tuple[str, ...], why: Callable[[str, str], str]
) -> None:
    for name in request.chosen:
        if name in names:
            message = why(request.spelling.option(name), request.spelling.option("tokens"))
            fixes = [leave_out(_option(name), safe=False)]
            if why is _slicing_alone:
                fixes.insert(0, give("--tokens", "2048", safe=False))
            else:
                fixes.append(leave_out("--tokens", safe=False))
            refuse("MD0532", message, fixes)


def _option(name: str) -> str:
    """The option of a field."""
    return f"--{name.replace('_', '-')}"


def _slicing_alone(option: str, tokens: str) -> str:
    return f"`{option}` is about slices of a sequence, whose length `{tokens}` is not given"


def _not_of_slices(option: str, tokens: str) -> str:
    return f"`{option}` means nothing beside `{tokens}`"


def _verified(which: str | TableReader, request: ScheduleRequest, times: Times | None) -> Verified:
    """The schedule of a name in the order that the times make, or the table."""
    if not isinstance(which, str):
        return _of_table(which, request)
    spelling = request.spelling
    lookup(which)
    if request.weights is not None:
        message = (
            f"`{spelling.option('weights')}` is for a table of your own: `{which}` has its own"
        )
        refuse("MD0532", message, leave_out("--weights"))
    stages, micro = request.stages, request.micro
    if stages is None or micro is None:
        absent = [name for name in ("stages", "micro") if getattr(request, name) is None]
        missing = " and ".join(f"`{spelling.option(name)}`" for name in absent)
        edits = tuple(OptionEdit(_option(name), SIZES[name]) for name in absent)
        title = f"write {' and '.join(f'`{shown(edit)}`' for edit in edits)}, for instance"
        fix = Fix(title, safe=False, options=edits)
        raise DiagnosticError(
            Diagnostic(
                "MD0532", f"the size of `{which}` is not given: {missing}", help=title, fixes=(fix,)
            )
        )
    options = {name: getattr(request, name) for name in COUNTS}
    return verify(generate(which, stages, micro, options, times=times))


def _of_table(read: TableReader, request: ScheduleRequest) -> Verified:
    """A table of the user's own, which says itself what it is of."""
    spelling = request.spelling
    for name in request.chosen:
        if name in ("stages", "micro", *COUNTS):
            message = (
                f"`{spelling.option(name)}` is for a schedule by name: a table has its own sizes"
            )
            refuse("MD0532", message, leave_out(_option(name)))
    weights = request.weights or "latest"
    rule = next((each for each in WEIGHTS if each == weights), None)
    if rule is None:
        message = f"`{spelling.option('weights', weights)}`: there is no such rule"
        raise DiagnosticError(unknown_value("MD0602", message, "--weights", weights, WEIGHTS))
    verified = read(rule)
    if request.weights is not None and not verified.schedule.updates:
        message = f"`{spelling.option('weights')}` is for a table with updates"
        refuse("MD0532", message, leave_out("--weights"), "write where stages update: `U0`")
    return verified
