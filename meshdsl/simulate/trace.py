"""Traces in the Chrome format, which Perfetto and `chrome://tracing` show.

A process (`pid`) is a device, a thread (`tid`) one of its streams: compute, then the mesh axes; a
collective over several axes stands on all of them. Simulated and measured traces have one form:
`X` are statements, with their source in `args`; waiting for a collective is a statement of the
compute stream with the category `wait`. Of a trace that `simulate` wrote, `args.trips` says how
often the statement runs like this (the trace event format, Google, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NotRequired, TypedDict

from meshdsl.device.ir import Bucket, Collective, Compute, DeviceProgram
from meshdsl.simulate.timeline import PER_SECOND, Event, Folded, Timeline, streams_of
from meshdsl.version import __version__


class TraceArgs(TypedDict, total=False):
    """What a trace says of a statement: its place, its size, and the reason of a collective."""

    op: str
    file: str
    line: int
    phase: str
    flops: int
    bytes: int
    axes: list[str]
    sent: int
    why: str
    trips: int
    bound: str
    first: int
    name: str
    sort_index: int


class TraceEvent(TypedDict, total=False):
    """An event of the trace format; times are in microseconds."""

    ph: str
    id: int
    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: TraceArgs
    bp: str


class Measurement(TypedDict):
    """How long a step took, on which machine, or as what the program was run."""

    seconds: float
    cluster: NotRequired[str]
    evaluate: NotRequired[bool]
    measured: NotRequired[bool]


_Maker = TypedDict("_Maker", {"made by": str})


class TraceHead(Measurement, _Maker):
    """What a trace is of, and who made it."""

    program: str
    file: str
    mesh: dict[str, int]
    layout: str


class TraceFile(TypedDict):
    """A trace: its events, and of what program they are."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str
    otherData: TraceHead


PER_MICROSECOND = PER_SECOND // 10**6
COMPUTE_THREAD = 0
"""The thread of the compute stream; the axes have the numbers after it."""


def label(node: Compute | Collective) -> str:
    """What a reader knows a statement by: the operator or the collective, and its result."""
    if isinstance(node, Bucket):
        return f"{node.step.kind} of {len(node.moves)} tensors"
    var = node.makes[0]
    kind = node.name if isinstance(node, Compute) else node.step.kind
    return f"{kind} {var.value.name or var.hint}".rstrip()


def described(node: Compute | Collective) -> TraceArgs:
    """What a trace says of a statement: its place, its size, and the reason of a collective."""
    args: TraceArgs = {
        "op": node.name if isinstance(node, Compute) else node.step.kind,
        "file": node.span.file,
        "line": node.span.line,
        "phase": node.phase,
    }
    if isinstance(node, Compute):
        args["flops"] = node.flops
        args["bytes"] = sum(v.local.bytes for v in (*node.ins, *node.outs))
        return args
    args["axes"] = list(node.step.axes)
    args["bytes"], args["sent"] = node.payload, node.wire
    args["why"] = "; ".join(dict.fromkeys(move.why for move in node.moves))
    return args


def simulated_trace(timeline: Timeline) -> TraceFile:
    """The trace of a simulation: one process, as all devices do the same."""
    program = timeline.program
    devices = f"device 0 to {program.mesh.devices - 1}" if program.mesh.devices > 1 else "device 0"
    if timeline.stage is not None:
        devices = f"the devices of stage {timeline.stage}"
    cluster = timeline.timing.cluster.name
    about: Measurement = {"cluster": cluster, "seconds": timeline.seconds}
    events: list[TraceEvent] = [
        *named_streams(program, 0, f"{program.placed.named.name}: {devices}, all alike"),
        *_slices(timeline),
        *_flows(timeline),
        *map(_held, timeline.memory),
    ]
    return whole(program, "simulate", events, about)


def _held(at: tuple[int, int]) -> TraceEvent:
    """What is held from a time on."""
    time, size = at
    args: TraceArgs = {"bytes": size}
    return {"ph": "C", "name": "memory", "pid": 0, "ts": microseconds(time), "args": args}


def whole(
    program: DeviceProgram, maker: str, events: Iterable[TraceEvent], about: Measurement
) -> TraceFile:
    """A trace file: its events, and of what program they are."""
    placed = program.placed
    head: TraceHead = {
        "made by": f"meshdsl {__version__} {maker}",
        "program": placed.named.name,
        "file": placed.named.span.file,
        "mesh": dict(program.mesh.declared),
        "layout": placed.layout,
        **about,
    }
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": head}


def trace_text(trace: TraceFile) -> str:
    """The text of a trace file, one event a line."""
    events = ",\n".join(map(json.dumps, trace["traceEvents"]))
    others = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})
    return f'{{"traceEvents": [\n{events}\n], {others[1:]}\n'


def named_streams(program: DeviceProgram, pid: int, name: str) -> Iterator[TraceEvent]:
    """The names of a process and of its threads."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, stream in enumerate(streams_of(program)):
        at: TraceEvent = {"pid": pid, "tid": tid}
        name = f"axis {stream}" if tid else stream
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": tid}}


def threads(program: DeviceProgram, streams: Iterable[str]) -> Iterator[int]:
    """The threads of streams."""
    every = streams_of(program)
    return (every.index(stream) for stream in streams)


def slices(
    program: DeviceProgram,
    node: Compute | Collective,
    kind: str,
    streams: Iterable[str],
    at: TraceEvent,
) -> Iterator[TraceEvent]:
    """A statement on all of its streams; `at` are process, time, duration, and more `args`."""
    args: TraceArgs = {**described(node), **at.get("args", TraceArgs())}
    name = {"wait": "wait for ", "idle": "idle before "}.get(kind, "") + label(node)
    for tid in threads(program, streams):
        category = node.phase if kind == "run" else kind
        yield {"ph": "X", "name": name, "cat": category, **at, "tid": tid, "args": args}


def microseconds(ticks: int) -> float:
    """The unit of the format."""
    return ticks / PER_MICROSECOND


def _slices(timeline: Timeline) -> Iterator[TraceEvent]:
    for event in timeline.events:
        more: TraceArgs = {"trips": event.trips, "bound": event.bound}
        at: TraceEvent = {"pid": 0, **_lasting(event), "args": more}
        yield from slices(timeline.program, event.node, event.kind, event.streams, at)
    for item in timeline.folded:
        name = f"{item.trips} more iterations of {item.loop.dim.name}"
        more = {"line": item.loop.span.line, "first": item.first}
        at = {"pid": 0, "tid": COMPUTE_THREAD, **_lasting(item), "args": more}
        yield {"ph": "X", "name": name, "cat": "folded", **at}


def _lasting(item: Event | Folded) -> TraceEvent:
    return {"ts": microseconds(item.start), "dur": microseconds(item.end - item.start)}


def _flows(timeline: Timeline) -> Iterator[TraceEvent]:
    """Arrows from what lets a collective begin, and from it to what waited for it."""
    for number, ends in enumerate(timeline.flows):
        for phase, event in zip("sf", (timeline.events[i] for i in ends), strict=True):
            tid = next(threads(timeline.program, event.streams))
            at: TraceEvent = {"pid": 0, "tid": tid, "ts": microseconds(event.start)}
            yield {"ph": phase, "id": number, "name": "after", "cat": "flow", **at, "bp": "e"}
