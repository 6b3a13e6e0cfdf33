"""Traces have the form that Perfetto reads, and say what the timeline says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from meshdsl.backends.torch.emitter import emit
from meshdsl.device.ir import Compute, DeviceProgram, Node
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.sub_axes import whole_axis
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.measured_trace import measured_trace
from meshdsl.simulate.timeline import Timeline, streams_of, way_back
from meshdsl.simulate.trace import label, simulated_trace
from tests.report.golden import WHOLE, Case, made
from tests.simulate.flat import LAYOUTS, flat, layered

Json = Any
PHASES = {"M", "X", "C", "s", "f"}
NUMBER = (int, float)
CLOSE = 1e-6
"""Microseconds: times are whole picoseconds."""


def checked(trace: Json) -> dict[tuple[int, int], list[Json]]:
    """The slices of each thread, in order; the whole is valid, and slices do not overlap."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert trace["displayTimeUnit"] == "ms"
    found: dict[tuple[int, int], list[Json]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    flows: dict[int, list[Json]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], NUMBER)
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, NUMBER) for v in event["args"].values())
            continue
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            found[place].append(event)
        else:
            flows[event["id"]].append(event)
    assert set(found) <= named
    for slices in found.values():
        slices.sort(key=lambda e: (e["ts"], e["dur"]))
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + CLOSE, (one, other)
    _bound(flows, found)
    return found


def _bound(flows: dict[int, list[Json]], found: dict[tuple[int, int], list[Json]]) -> None:
    """Every arrow leads from the beginning of a slice to that of a later one."""
    begins = {(*place, e["ts"]) for place, slices in found.items() for e in slices}
    for ends in flows.values():
        assert [e["ph"] for e in ends] == ["s", "f"]
        assert all((e["pid"], e["tid"], e["ts"]) in begins for e in ends)
        assert ends[0]["ts"] <= ends[1]["ts"]
        assert ends[1]["bp"] == "e"


def agrees(timeline: Timeline, found: dict[tuple[int, int], list[Json]]) -> None:
    """The slices of a trace add up to the figures of the timeline."""
    own = [e for e in found[0, 0] if e["cat"] not in ("wait", "idle", "folded")]
    seconds = sum(e["dur"] * e["args"]["trips"] for e in own) / 1e6
    assert seconds == pytest.approx(timeline.compute)
    waits = [e for e in found[0, 0] if e["cat"] == "wait"]
    waited = sum(e["dur"] * e["args"]["trips"] for e in waits) / 1e6
    assert waited == pytest.approx(sum(timeline.exposed.values()))
    streams = streams_of(timeline.program)
    for axis in timeline.program.mesh.names:
        # What a stage sends to the one before has a stream of its own.
        tids = [tid for tid, s in enumerate(streams) if s in (axis, way_back(axis))]
        slices = [e for tid in tids for e in found[0, tid]]
        sent = sum(e["dur"] * e["args"]["trips"] for e in slices) / 1e6
        names = {axis, whole_axis(axis)}  # a group over all parts of an axis has its name
        groups = timeline.sending.items()
        assert sent == pytest.approx(sum(s for a, s in groups if names & {*a.split("+")}))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_traces_of_examples(case: Case) -> None:
    program = made(case).device
    timeline = simulate(program, flat(program))
    trace = simulated_trace(timeline)
    found = checked(trace)
    agrees(timeline, found)
    most = max(e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C")
    assert most == timeline.peak[0]


@pytest.mark.parametrize("unroll", [False, True], ids=["folded", "unrolled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traces_of_loops(layout: str, unroll: bool) -> None:
    """A folded one fills the time of the iterations that it leaves out with one slice."""
    program = layered(layout, 9)
    timeline = simulate(program, flat(program), unroll)
    found = checked(simulated_trace(timeline))
    agrees(timeline, found)
    busy = sum(e["dur"] for e in found[0, 0]) / 1e6
    assert busy == pytest.approx(timeline.seconds)
    assert any(e["cat"] == "folded" for e in found[0, 0]) != unroll


def test_slices_say_where_they_come_from_and_why() -> None:
    program = layered("both", 9)
    trace = simulated_trace(simulate(program, flat(program)))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "folded"]
    for event in slices:
        args = event["args"]
        assert program.placed.named.span.source.line(args["line"]).strip()
        assert args["bytes"] >= 0
        assert args["why"] if "axes" in args else args["flops"] >= 0
    assert {e["cat"] for e in slices} == {"forward", "backward", "update", "wait"}


def test_names_are_strings_whatever_a_file_is_called() -> None:
    name = '"},\n{"ph": "X".mdsl'
    text = "dim a = 4\nlayout l { a -> x }\nprogram p(x[a]) {\n  y = sum[a](x)\n  return y\n}\n"
    options = Options(mesh="x:2", layout="l")
    program = compile_source(Source(name, text), options, Diagnostics()).device
    trace = json.loads(json.dumps(simulated_trace(simulate(program, flat(program)))))
    assert {e["args"]["file"] for e in trace["traceEvents"] if e["ph"] == "X"} == {name}


def test_measured_lines_become_statements() -> None:
    """Lines of one statement are one slice; a step that is repeated has it twice."""
    program = layered("data_parallel", 3)
    nodes = statements_of(program)
    last = max(nodes) + 1
    timed = [(line, 1000 + 10 * i, 1007 + 10 * i) for i, line in enumerate([*range(last)] * 2)]
    trace = measured_trace(program, nodes, [timed, timed])
    found = checked(trace)
    assert {pid for pid, _ in found} == {0, 1}
    assert trace["otherData"]["seconds"] == pytest.approx((timed[-1][2] - 1000) / 1e9)
    shown = Counter(e["name"] for e in found[0, 0])
    computed = {label(n) for n in nodes.values() if isinstance(n, Compute)}
    assert computed <= set(shown)
    assert any(name.startswith("wait for ") for name in shown)
    lines = Counter(map(id, nodes.values()))
    assert sum(shown.values()) <= 2 * len(lines)
    assert max(lines.values()) > 1


def statements_of(program: DeviceProgram) -> dict[int, Node]:
    """The statements behind the lines of the emitted text."""
    return emit(program, {}).nodes
