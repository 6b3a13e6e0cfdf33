"""Predicted times in a report: of each line and in all, and what bounds them.

`times` gives the facts as JSON; what is shown is made of them. Until a timeline says what of the
sending is hidden behind computing, times are sums: as if nothing were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import Compute, Program, walk
from meshdsl.report.document import Item, Piece, duration

Json = dict[str, Any]

BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory traffic",
    "launch": "starting kernels",
    "network": "sending",
}
"""What bounds a time, in words; in the order they are shown."""


def times(program: Program, timing: Timing) -> Json:
    """Predicted seconds of one device, in all and by line, by what bounds them and by mesh axis."""
    by_bound: dict[str, float] = defaultdict(float)
    by_axis: dict[str, float] = defaultdict(float)
    lines: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, trips in walk(program.body):
        time = timing.node(node)
        seconds = time.seconds * trips
        if not seconds:
            continue
        by_bound[time.bound] += seconds
        lines[node.span.file, node.span.line][time.bound] += seconds
        if not isinstance(node, Compute) and time.axes:
            by_axis["+".join(time.axes)] += seconds
    return {
        "cluster": timing.cluster.name,
        **_parts(by_bound),
        "by_bound": dict(by_bound),
        "by_axis": dict(by_axis),
        "lines": [
            {"file": file, "line": line, **_parts(found)}
            for (file, line), found in sorted(lines.items())
        ],
    }


def _parts(by_bound: dict[str, float]) -> Json:
    """Seconds in all, of computing and of sending, and what bounds the most of them."""
    sending = by_bound.get("network", 0.0)
    computing = sum(s for bound, s in by_bound.items() if bound != "network")
    return {
        "seconds": computing + sending,
        "compute": computing,
        "communication": sending,
        "bound": max(by_bound, key=lambda b: by_bound[b], default="none"),
    }


# --- for people ------------------------------------------------------------------------------


def timed_sentence(time: Json) -> str:
    """The text `Predicted on h100: 81.2 µs, 45% of it sending; most of it goes into sending`."""
    head = f"Predicted on {time['cluster']}: {duration(time['seconds'])}"
    if not time["seconds"]:
        return f"{head}."
    share = 100 * time["communication"] / time["seconds"]
    sending = f", {share:.0f}% of it sending" if time["communication"] else ""
    return f"{head}{sending}; most of it goes into {BOUNDS[time['bound']]}."


def timed_item(entry: Json, indent: int) -> Item:
    """The time of a line: `takes 12.3 µs: 7 µs computing, 5.3 µs sending (memory traffic)`."""
    parts = [
        f"{duration(entry[key])} {word}"
        for key, word in (("compute", "computing"), ("communication", "sending"))
        if entry[key]
    ]
    whole = f"{duration(entry['seconds'])}: {', '.join(parts)}" if len(parts) > 1 else parts[0]
    text = f"{whole}, most for {BOUNDS[entry['bound']]}"
    return Item((Piece("takes ", "muted"),), (Piece(text),), indent=indent)


def timed_in_all(time: Json) -> Iterator[Item]:
    """The time in all, by what bounds it, and by axis."""
    text = f"{duration(time['seconds'])} if nothing is sent while it computes"
    yield Item((Piece(f"Predicted on {time['cluster']}: ", "strong"),), (Piece(text),))
    rows = [("by bound", BOUNDS[b], time["by_bound"].get(b)) for b in BOUNDS]
    rows += [("by axis", axis, seconds) for axis, seconds in time["by_axis"].items()]
    shown = [(what, name, seconds) for what, name, seconds in rows if seconds]
    width = max((len(name) for _, name, _ in shown), default=0)
    before = ""
    for what, name, seconds in shown:
        label = "" if what == before else what
        before = what
        head = (Piece(f"  {label:9}", "muted"), Piece(f"{name:{width}}  ", "name"))
        yield Item(head, (Piece(duration(seconds)),))
