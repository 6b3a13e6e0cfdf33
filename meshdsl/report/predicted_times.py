"""Predicted times in a report: of each line and in all, and what bounds them.

`times` gives the facts as JSON; what is shown is made of them. In all they are those of the
simulated timeline, in which sending may be hidden behind computing; of a line they are sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceProgram, on_device, walk
from meshdsl.report.document import Item, Piece, duration

if TYPE_CHECKING:
    from meshdsl.report.schema import LineTime, TimeFacts

BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory traffic",
    "launch": "starting kernels",
    "network": "sending",
}
"""What bounds a time, in words; in the order they are shown."""


def times(program: DeviceProgram, timing: Timing) -> TimeFacts:
    """Predicted seconds of one device: of the step, computing, sending, and waiting for that.

    `exposed` and `sending` are by mesh axes, `by_bound` by what bounds operators and collectives,
    and `lines` have the sums of each line.
    """
    from meshdsl.report.simulation import of_stage
    from meshdsl.simulate.engine import simulate

    timeline = simulate(program, timing)
    body = program.body if timeline.stage is None else on_device(program, timeline.stage)
    lines: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, trips in walk(body):
        time = timing.node(node)
        if time.seconds:
            lines[node.span.file, node.span.line][time.bound] += time.seconds * trips
    by_bound = {bound: sum(at.get(bound, 0.0) for at in lines.values()) for bound in BOUNDS}
    return {
        "cluster": timing.cluster.name,
        "device_memory": timing.cluster.device.memory,
        "seconds": timeline.seconds,
        "compute": timeline.compute,
        **of_stage(timeline),
        "waiting": sum(timeline.exposed.values()),
        "exposed": timeline.exposed,
        "sending": timeline.sending,
        "by_bound": {bound: seconds for bound, seconds in by_bound.items() if seconds},
        "lines": [_line(*place, at) for place, at in sorted(lines.items())],
    }


def _line(file: str, line: int, by_bound: dict[str, float]) -> LineTime:
    """Seconds of computing and of sending on a line, and what bounds the most of them."""
    sending = by_bound.get("network", 0.0)
    return {
        "file": file,
        "line": line,
        "compute": sum(s for bound, s in by_bound.items() if bound != "network"),
        "communication": sending,
        "bound": max(BOUNDS, key=lambda bound: by_bound.get(bound, 0.0)),
    }


# --- for people ------------------------------------------------------------------------------


def timed_sentence(time: TimeFacts) -> str:
    """The text `Predicted on h100: 81.2 µs, 45% of it waiting for what is sent`."""
    reasons = (("waiting for communication", time["waiting"]), ("idle", time.get("idle", 0.0)))
    parts = [f"{100 * s / time['seconds']:.0f}% of it {reason}" for reason, s in reasons if s]
    return f"{', '.join((head_of(time), *parts))}."


def head_of(time: TimeFacts) -> str:
    """The text `Predicted on h100: 81.2 µs`; of a pipeline it names the stage."""
    of = f" (a device of stage {time['stage']})" if "stage" in time else ""
    return f"Predicted on {time['cluster']}{of}: {duration(time['seconds'])}"


def timed_item(entry: LineTime, indent: int) -> Item:
    """The time of a line: `takes 7 µs computing, 5.3 µs sending; mostly memory traffic`."""
    seconds = ((entry["compute"], "computing"), (entry["communication"], "sending"))
    parts = [f"{duration(taken)} {word}" for taken, word in seconds if taken]
    text = f"{', '.join(parts)}; mostly {BOUNDS[entry['bound']]}"
    return Item((Piece("takes ", "muted"),), (Piece(text),), indent=indent)


def timed_in_all(time: TimeFacts) -> Iterator[Item]:
    """The time of the step; that of its operators and collectives by bound; waiting by axis."""
    parts = f"{duration(time['compute'])} computing, {duration(time['waiting'])} waiting"
    if "idle" in time:
        parts += f", {duration(time['idle'])} idle"
    yield Item((Piece(f"{head_of(time)}: ", "strong"),), (Piece(parts),))
    rows = [("by bound", BOUNDS[bound], seconds) for bound, seconds in time["by_bound"].items()]
    rows += [("sending", axes, seconds) for axes, seconds in time["sending"].items()]
    rows += [("waiting", axes, seconds) for axes, seconds in time["exposed"].items()]
    width = max((len(name) for _, name, _ in rows), default=0)
    before = ""
    for what, name, seconds in rows:
        label = "" if what == before else what
        before = what
        head = (Piece(f"  {label:9}", "muted"), Piece(f"{name:{width}}  ", "name"))
        yield Item(head, (Piece(duration(seconds)),))
