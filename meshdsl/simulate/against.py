"""A measured trace beside the simulated one of the same program: what makes a profile honest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn, TypedDict

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.device.ir import DeviceProgram
from meshdsl.diagnostics import fail
from meshdsl.disk_cache import checked, parsed
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.records import dataclass
from meshdsl.report.document import mesh_text
from meshdsl.simulate.timeline import Timeline
from meshdsl.simulate.trace import COMPUTE_THREAD, TraceFile

MEASURE = "`meshdsl run FILE --engine torchrun --trace OUT.json` writes one"
STATEMENT = "X"
"""The kind of event that has a time and a length: a statement at work."""


@dataclass(frozen=True, slots=True)
class TracedStatement:
    """What occurs in both traces: an operator, or the waiting for a collective, of a line."""

    op: str
    file: str
    line: int
    phase: str


class RatioFacts(TypedDict):
    """Seconds of a group of statements; `ratio` is None for what was to take no time."""

    name: str
    simulated: float
    measured: float
    ratio: float | None


class AgainstFacts(TypedDict):
    """Simulated beside measured: the step, kinds of operators, lines."""

    step: RatioFacts
    kinds: list[RatioFacts]
    lines: list[RatioFacts]


class TraceComparisonFacts(AgainstFacts):
    """The same, with the version of the format."""

    version: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """The seconds of a group of statements, as simulated and as measured."""

    name: str
    simulated: float
    measured: float

    @property
    def ratio(self) -> float:
        """How many times as long it took as was said; infinite for what was to take no time."""
        return self.measured / self.simulated if self.simulated else math.inf


WITHOUT = leave_out("--against", safe=False)


def read_trace(path: Path) -> TraceFile:
    """A trace that this package wrote. Raises MD0631 for any other file."""
    try:
        text = read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        fail(
            "MD0631",
            f"the trace {path} cannot be read: {why}",
            help=f"{WITHOUT.title}, or {MEASURE}",
            fixes=(WITHOUT,),
        )
    try:
        trace: TraceFile = parsed(text)
    except (ValueError, RecursionError):
        _refuse(path, "it is no JSON")
    _check(path, trace)
    return trace


def _check(path: Path, found: Any) -> None:
    """Refuse JSON that is no trace of ours: what is used of one is of the types it is used as."""
    from meshdsl.simulate.trace_schema import AnyEvent, Slice, Trace, TraceMaker

    try:
        maker = checked(found, TraceMaker).otherData.made_by
    except ValueError:
        maker = ""
    if "meshdsl" not in maker:
        _refuse(path, "it is not of meshdsl")
    try:
        checked(found, Trace)
    except ValueError as error:
        _refuse(path, f"{error}")
    for number, event in enumerate(found["traceEvents"]):
        try:
            if checked(event, AnyEvent).ph == STATEMENT:
                checked(event, Slice)
        except ValueError as error:
            _refuse(path, f"event {number}: {error}")


def _refuse(path: Path, why: str) -> NoReturn:
    fail(
        "MD0631",
        f"{path} is no trace that can be compared with: {why}",
        help=f"{WITHOUT.title}, or {MEASURE}",
        fixes=(WITHOUT,),
    )


def refuse_other(path: Path, trace: TraceFile, program: DeviceProgram) -> None:
    """Raise MD0632 for a trace of another program, mesh or layout."""
    head, placed = trace["otherData"], program.placed
    own = {
        "program": placed.named.name,
        "mesh": dict(program.mesh.declared),
        "layout": placed.layout,
    }
    for key, value in own.items():
        if head.get(key) != value:
            message = f"{path} is of {key} {_said(head.get(key))}, this is {_said(value)}"
            theirs = head.get(key)
            asked = str(theirs) if isinstance(theirs, str) else ""
            if isinstance(theirs, Mapping):
                asked = mesh_text(theirs)
            fixes = [give(f"--{key}", asked, safe=False)] if asked else []
            refuse("MD0632", message, fixes, "measure anew")


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return mesh_text(value) or "of one device"
    return f"`{value}`"


def of_devices(trace: TraceFile, timeline: Timeline) -> TraceFile:
    """What a trace says of the devices that a timeline is of: of a pipeline those of its stage."""
    pipe, mesh = timeline.program.placed.pipe, timeline.program.mesh
    if timeline.stage is None or pipe is None:
        return trace
    ranks = {n for n in range(mesh.devices) if mesh.coordinates(n)[pipe.axis] == timeline.stage}
    return {**trace, "traceEvents": [e for e in trace["traceEvents"] if e.get("pid") in ranks]}


def seconds_of(trace: TraceFile) -> dict[TracedStatement, float]:
    """The seconds of each statement of the compute stream of a trace, all trips together.

    Of several devices it is the mean; of a collective the least, that of the device that all the
    others waited for.
    """
    found: dict[TracedStatement, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    waits: set[TracedStatement] = set()
    for event in trace["traceEvents"]:
        if event["ph"] != STATEMENT or event.get("tid") != COMPUTE_THREAD:
            continue
        if "op" not in event["args"]:
            continue
        args = event["args"]
        file = Path(str(args.get("file"))).name
        key = TracedStatement(args["op"], file, args["line"], str(args.get("phase")))
        found[key][event["pid"]] += event["dur"] * args.get("trips", 1) / 1e6
        if event.get("cat") in ("wait", "idle"):
            waits.add(key)
    return {
        key: min(each.values()) if key in waits else mean(each.values())
        for key, each in found.items()
    }


def ratios(
    simulated: TraceFile, measured: TraceFile, group: Callable[[TracedStatement], str]
) -> tuple[Ratio, ...]:
    """The ratios of groups of statements, the longest first."""
    sides = [seconds_of(trace) for trace in (simulated, measured)]
    names = dict.fromkeys(group(key) for side in sides for key in side)
    totals = [
        {n: math.fsum(s for key, s in side.items() if group(key) == n) for n in names}
        for side in sides
    ]
    found = (Ratio(name, *(total[name] for total in totals)) for name in names)
    return tuple(sorted(found, key=lambda r: (-r.measured, -r.simulated, r.name)))


def against(simulated: TraceFile, measured: TraceFile) -> AgainstFacts:
    """The comparison as data: the step, the kinds of operators, the lines."""
    step = Ratio("step", *(t["otherData"]["seconds"] for t in (simulated, measured)))
    return {
        "step": _as_json(step),
        "kinds": [_as_json(r) for r in ratios(simulated, measured, lambda key: key.op)],
        "lines": [
            _as_json(r) for r in ratios(simulated, measured, lambda key: f"{key.file}:{key.line}")
        ],
    }


def _as_json(each: Ratio) -> RatioFacts:
    return {
        "name": each.name,
        "simulated": each.simulated,
        "measured": each.measured,
        "ratio": each.ratio if each.simulated else None,
    }
