"""The simulator: streams, loops and memory."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshdsl.cluster.profile import Level
from meshdsl.cluster.timing import Time, Timing
from meshdsl.device.ir import Collective, Compute, DeviceProgram, Move, Start, Wait
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostics
from meshdsl.ir.program import every
from meshdsl.pipeline import Options, compile_source
from meshdsl.records import dataclass
from meshdsl.report.explanation import explain
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.timeline import COMPUTE, PER_SECOND, Timeline
from tests.covering import covered, some
from tests.report.golden import CASES, PIPELINE, Case, made, source
from tests.simulate.flat import LAYOUTS, LINKS, flat, layered

SLOW = replace(LINKS, bandwidth=1e6, alpha=0.0)
"""Links so slow that no collective is over before it is waited for."""

FIGURES = ("ticks", "compute", "exposed", "sending", "peak", "mfu", "hfu", "idle")


@functools.cache
def stepped(layout: str, layers: int, unroll: bool = False, link: Level = LINKS) -> Timeline:
    """A simulated training step."""
    program = layered(layout, layers)
    return simulate(program, flat(program, link=link), unroll)


@pytest.mark.parametrize("case", some(CASES), ids=lambda case: case.name)
def test_the_peak_is_that_of_explain(case: Case) -> None:
    program = made(case).device
    timeline = simulate(program, flat(program))
    said = memory(program)
    assert timeline.peak[0] == said["peak"]
    kinds = max((each for _, each in timeline.memory_by_kind), key=lambda each: sum(each.values()))
    assert kinds == {k: said[k] for k in kinds} | {"grads": said["grads"] - said["grads_later"]}
    consistent(timeline)


def consistent(timeline: Timeline) -> None:
    """A device works, waits or is idle at any time, and no stream does two things at once."""
    waited = sum(e.total for e in timeline.during("wait"))
    worked = sum(e.total for e in timeline.during("run") if COMPUTE in e.streams)
    idle = sum(e.total for e in timeline.during("idle"))
    assert worked + waited + idle == timeline.ticks
    assert timeline.idle == pytest.approx(idle / PER_SECOND)
    assert not idle or timeline.stage is not None
    assert timeline.hfu <= 1 + 1e-9
    assert sum(timeline.exposed.values()) == pytest.approx(waited / PER_SECOND)
    pipe = timeline.program.placed.pipe  # along its axis stages wait for the work of others, too
    alone = {a: s for a, s in timeline.exposed.items() if pipe is None or pipe.axis not in a}
    assert all(waited <= timeline.sending[axes] for axes, waited in alone.items())
    for stream in timeline.streams:
        own = [e for e in timeline.events if stream in e.streams]
        assert all(a.end <= b.start for a, b in pairwise(own))
        assert all(e.start < e.end <= timeline.ticks for e in own)
    times = [at for at, _ in timeline.memory]
    assert times == sorted(times)
    assert 0 < timeline.mfu < 1


@functools.cache
def staged(layers: int | None = None, **options: Any) -> tuple[DeviceProgram, list[int]]:
    """A pipeline, and the peak of each stage that its report says."""
    sizes = {} if layers is None else {"layers": layers}
    chosen = Options(set_dims=sizes, **options)
    program = compile_source(source(PIPELINE.example), chosen, Diagnostics()).device
    report = explain(program)["pipeline"]
    return program, report["peak"]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "gpipe"])
@pytest.mark.parametrize("link", [LINKS, SLOW], ids=["fast links", "slow links"])
def test_every_stage_of_a_pipeline(link: Level, schedule: str) -> None:
    """Memory is that of the report, and the last stages send in one direction alone."""
    program, peaks = staged(layout=PIPELINE.layout, schedule=f"{schedule}[batch](4)")
    timing = flat(program, link=link)
    each = [simulate(program, timing, stage=stage) for stage in range(len(peaks))]
    sent = []
    for timeline, peak in zip(each, peaks, strict=True):
        consistent(timeline)
        assert timeline.peak[0] == peak
        assert timeline.bubble == each[0].bubble
        ran = [e.node for e in timeline.during("run")]
        sent.append(sum(isinstance(n, Move) and n.step.kind == "send" for n in ran))
    assert sent == [4, 8, 4]
    last = simulate(program, timing)
    assert last.ticks == each[last.stage or 0].ticks
    assert last.ticks == simulate(program, timing, events=False).ticks
    assert max(timeline.ticks for timeline in each) <= 1.02 * last.ticks


@pytest.mark.parametrize("link", [LINKS, SLOW], ids=["fast links", "slow links"])
def test_every_device_where_each_stage_is_on_two(link: Level) -> None:
    """Both devices of a pair do the same: half of the micro-batches on either stage."""
    program, peaks = staged(
        mesh="pipe:4", layout=PIPELINE.layout, schedule="chimera[batch](8)", layers=4
    )
    timing = flat(program, link=link)
    each = [simulate(program, timing, stage=device) for device in range(4)]
    sent = []
    for timeline, peak in zip(each, peaks, strict=True):
        consistent(timeline)
        assert timeline.peak[0] == peak
        ran = [e.node for e in timeline.during("run") if isinstance(e.node, Move)]
        sent.append([sum(n.step.kind == kind for n in ran) for kind in ("send", "exchange")])
    blocks = 2 * sum(
        move.step.kind == "exchange" for move in program.body if isinstance(move, Move)
    )
    assert [one for one, _ in sent] == [8, 16, 16, 8]
    assert {both for _, both in sent} == {blocks // 2}
    assert simulate(program, timing).ticks == simulate(program, timing, events=False).ticks


@covered(layout=LAYOUTS, layers=(1, 2, 3, 4, 9), link=(LINKS, SLOW))
def test_folded_loops_take_exactly_what_unrolled_ones_do(
    layout: str, layers: int, link: Level
) -> None:
    folded, unrolled = (stepped(layout, layers, unroll, link) for unroll in (False, True))
    for figure in FIGURES:
        assert getattr(folded, figure) == getattr(unrolled, figure), figure
    assert not unrolled.folded
    assert bool(folded.folded) == (layers > 3)
    consistent(folded)
    consistent(unrolled)


@dataclass(frozen=True)
class Drawn(Timing):
    """Times drawn from a seed: what is hidden, and after how many iterations, differs each time."""

    seed: int = 0

    def node(self, node: Compute | Collective) -> Time:
        """A time of up to a millisecond, the same for the same statement."""
        known = f"{self.seed} {[v.name for v in node.makes]}"
        return replace(super().node(node), seconds=random.Random(known).random() / 1e3)


@pytest.mark.parametrize("layout", ["zero1", "zero3", "both"])
def test_folded_loops_are_exact_whatever_takes_how_long(layout: str) -> None:
    program = layered(layout, 12)
    fair = flat(program)
    for seed in range(40):
        timing = Drawn(fair.cluster, fair.mesh, seed=seed)
        folded, unrolled = (simulate(program, timing, unroll) for unroll in (False, True))
        for figure in FIGURES:
            assert getattr(folded, figure) == getattr(unrolled, figure), (seed, figure)
        consistent(folded)


def test_a_deep_program_costs_no_more_than_a_shallow_one() -> None:
    deep, shallow = stepped("zero3", 96), stepped("zero3", 8)
    assert len(deep.events) == len(shallow.events)
    assert deep.compute > 8 * shallow.compute


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_hides_time_and_free_links_leave_none_to_hide(layout: str) -> None:
    plain, overlapped = (layered(layout, 9, overlapping) for overlapping in (False, True))
    one, other = (simulate(p, flat(p, slowdown=1.0)) for p in (plain, overlapped))
    assert other.ticks <= one.ticks
    assert one.exposed == pytest.approx(one.sending)
    free = replace(LINKS, bandwidth=1e30, alpha=0.0)
    idle = simulate(overlapped, flat(overlapped, link=free, launch=0.0))
    assert not idle.exposed
    assert idle.seconds == pytest.approx(idle.compute)


@pytest.mark.parametrize("layout", ["zero3", "both"])
def test_computing_beside_a_collective_is_slower(layout: str) -> None:
    """By no more than the whole of the time beside collectives."""
    program = layered(layout, 9)
    fair, slowed = (simulate(program, flat(program, slowdown=s)) for s in (1.0, 1.5))
    assert any(isinstance(node, Start) for node in every(program.body))
    beside = sum(fair.sending.values())
    assert fair.compute < slowed.compute <= fair.compute + 0.5 * beside * 1.5


def test_a_collective_begins_when_what_it_reads_is_there() -> None:
    """It stands after the statements before its `Start`, and a `Wait` is over when it is."""
    timeline = stepped("zero3", 9, unroll=True, link=SLOW)
    by_node = {e.node: e for e in timeline.during("run")}
    nodes = [n for n in timeline.program.body if not isinstance(n, Wait)]
    for before, node in pairwise(nodes):
        if isinstance(node, Start) and isinstance(before, Compute) and before in by_node:
            assert by_node[node.collective].start >= by_node[before].end
    waits = {e.node: e for e in timeline.during("wait")}
    assert waits
    ends = {(e.node, e.end) for e in timeline.during("run")}
    assert all((e.node, e.end) in ends for e in waits.values())


def test_a_larger_mesh_costs_as_much_as_a_small_one() -> None:
    """All devices are one timeline."""
    text = layered("data_parallel", 9)
    events = []
    for devices in (8, 3072):
        mesh = replace(text.mesh, axes=(("data", devices),))
        events.append(len(simulate(text, flat(replace(text, mesh=mesh))).events))
    assert events[0] == events[1]
