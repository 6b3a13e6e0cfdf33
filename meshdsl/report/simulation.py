"""`simulate`: a step in time as JSON and as a document, and beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from meshdsl.device.ir import Compute
from meshdsl.diagnostics import Source
from meshdsl.report.document import (
    Block,
    Document,
    Grid,
    Piece,
    counted,
    duration,
    human,
    line,
    mesh_text,
    scaled,
)
from meshdsl.report.schema import LineSeconds, SimulationFacts, StageFacts
from meshdsl.simulate.against import AgainstFacts, RatioFacts
from meshdsl.simulate.timeline import COMPUTE, PER_SECOND, Event, Timeline

VERSION = 1
TOP = 8
"""The lines that are shown."""

TEXT_WIDTH = 44
"""Columns of a source line beside its figures."""


def simulation(timeline: Timeline) -> SimulationFacts:
    """The facts of a simulated step. Seconds and bytes are of one device: all are alike.

    Of a pipeline those of a stage are.
    """
    program, cluster = timeline.program, timeline.timing.cluster
    placed = program.placed
    bytes_, at = timeline.peak
    return {
        "version": VERSION,
        "program": placed.named.name,
        "file": placed.named.span.file,
        "mesh": dict(program.mesh.declared),
        "devices": program.mesh.devices,
        "layout": placed.layout,
        "cluster": cluster.name,
        "seconds": timeline.seconds,
        "compute": timeline.compute,
        "exposed": timeline.exposed,
        **of_stage(timeline),
        "sending": timeline.sending,
        "mfu": timeline.mfu,
        "hfu": timeline.hfu,
        "model_flops": sum(timeline.model_flops.values()),
        "peak": {"bytes": bytes_, "seconds": at, "limit": cluster.device.memory},
        "lines": sorted(_lines(timeline), key=lambda entry: -entry["seconds"]),
    }


def of_stage(timeline: Timeline) -> StageFacts:
    """The stage that is simulated, its idle time, that of all stages, and their passes.

    Of these it has the seconds of each stage, `send` those of a message from stage to stage.
    """
    if timeline.stage is None:
        return {}
    assert timeline.passes is not None
    times = timeline.passes.times
    each = {"F": times.forward, "I": times.inputs, "W": times.weights, "send": times.send}
    if any(times.update):
        each["U"] = times.update
    seconds = {name: [float(t) / PER_SECOND for t in ticks] for name, ticks in each.items()}
    return {
        "stage": timeline.stage,
        "ends_last": timeline.ends_last,
        "idle": timeline.idle,
        "bubble": timeline.bubble,
        "passes": seconds,
    }


def _lines(timeline: Timeline) -> Iterator[LineSeconds]:
    """What each source line takes of the compute stream."""
    by_line: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in timeline.events:
        if COMPUTE in event.streams:
            by_line[event.node.span.file, event.node.span.line].append(event)
    for (file, number), events in by_line.items():
        waiting = sum(e.total for e in events if e.kind != "run")
        total = sum(e.total for e in events)
        bounds: dict[str, int] = defaultdict(int)
        for event in events:
            bounds[event.bound] += event.total
        flops = sum(e.node.flops * e.trips for e in events if isinstance(e.node, Compute))
        yield {
            "file": file,
            "line": number,
            "seconds": total / PER_SECOND,
            "waiting": waiting / PER_SECOND,
            "flops": flops,
            "bound": max(bounds, key=lambda bound: bounds[bound]),
        }


# --- for people ------------------------------------------------------------------------------


def simulated(facts: SimulationFacts, sources: Mapping[str, Source], top: int = TOP) -> Document:
    """The step, where its time goes, its memory, and the slowest lines."""
    return (line(sentence(facts), "strong"), *_figures(facts), _slowest(facts, sources, top))


def sentence(facts: SimulationFacts) -> str:
    """`lm under layout zero3 on mesh data:4 (4 devices of h100): a step takes 2.01 ms.`."""
    axes = mesh_text(facts["mesh"])
    devices = f"{counted(facts['devices'], 'device')} of {facts['cluster']}"
    where = f"mesh {axes} ({devices})" if axes else devices
    took = duration(facts["seconds"])
    what = "a step takes" if facts.get("ends_last", True) else f"stage {facts['stage']} ends after"
    return f"{facts['program']} under layout {facts['layout']} on {where}: {what} {took}."


def _figures(facts: SimulationFacts) -> Iterator[Block]:
    seconds = facts["seconds"]
    rows: list[tuple[str | Piece, ...]] = [
        ("compute", duration(facts["compute"]), share(facts["compute"], seconds), "")
    ]
    if "idle" in facts:
        where = f"a device of stage {facts['stage']} waits for other stages"
        rows.append(("idle", duration(facts["idle"]), share(facts["idle"], seconds), where))
    for axes, sent in facts["sending"].items():
        bare = facts["exposed"].get(axes, 0.0)
        hidden = f"of {duration(sent)} of collectives"
        cells = (f"exposed, {axes}", duration(bare), share(bare, seconds))
        rows.append((*(Piece(cell, "sent" if bare else "") for cell in cells), hidden))
    yield Grid("Where the time goes", ("", "time", "share", ""), tuple(rows))
    if facts.get("ends_last", True):
        yield from _utilisation(facts)
    peak = facts["peak"]
    fits = "" if peak["bytes"] <= peak["limit"] else ": IT DOES NOT FIT"
    limit = human(int(peak["limit"]))
    at = f"{human(peak['bytes'])} of {limit}, at {duration(peak['seconds'])}"
    yield line(f"Peak memory per device: {at}{fits}.")


def _utilisation(facts: SimulationFacts) -> Iterator[Block]:
    """How much of the devices' peak a whole step uses."""
    needed = scaled(facts["model_flops"])
    yield line(f"Model FLOPs utilisation {100 * facts['mfu']:.3g} %: a step needs {needed}.")
    if f"{facts['hfu']:.3g}" != f"{facts['mfu']:.3g}":
        more = "recomputation and replicated work counted"
        yield line(f"Hardware FLOPs utilisation {100 * facts['hfu']:.3g} %: {more}.")


def _slowest(facts: SimulationFacts, sources: Mapping[str, Source], top: int) -> Grid:
    rows = []
    for entry in facts["lines"][:top]:
        source = sources.get(entry["file"])
        text = source.line(entry["line"]).strip() if source else ""
        text = text if len(text) <= TEXT_WIDTH else f"{text[: TEXT_WIDTH - 1]}…"
        is_of_file = entry["file"] == facts["file"]
        place = str(entry["line"]) if is_of_file else f"{entry['file']}:{entry['line']}"
        took = duration(entry["seconds"])
        rows.append((place, took, share(entry["seconds"], facts["seconds"]), entry["bound"], text))
    title = f"The {len(rows)} slowest of {counted(len(facts['lines']), 'line')}"
    return Grid(title, ("line", "time", "share", "bound by", ""), tuple(rows))


def compared(found: AgainstFacts, top: int = TOP) -> Document:
    """Simulated beside measured: the step, kinds of operators, lines."""
    step, heads = found["step"], ("simulated", "measured", "measured / simulated")
    tables = (
        (found["kinds"], "operator", "by kind of operator"),
        (found["lines"], "line", "by line"),
    )
    grids = (
        Grid(title, (word, *heads), tuple(map(_row, ratios[:top])))
        for ratios, word, title in tables
    )
    said = f"measured {duration(step['measured'])}, simulated {duration(step['simulated'])}"
    return (line(f"The step: {said}, {_ratio(step)}."), *grids)


def _row(entry: RatioFacts) -> tuple[str, ...]:
    return (entry["name"], duration(entry["simulated"]), duration(entry["measured"]), _ratio(entry))


def _ratio(entry: RatioFacts) -> str:
    return "-" if entry["ratio"] is None else f"{entry['ratio']:.3g}x"


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{100 * part / whole if whole else 0:.1f} %"
