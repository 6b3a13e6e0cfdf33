"""What a report says of a pipeline: its schedule, what is idle, what each stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.device.ir import DeviceProgram, Pipeline, StagePhase
from meshdsl.device.memory import walks
from meshdsl.report.document import Block, Gap, Grid, Picture, counted, duration, human
from meshdsl.schedule.verification import Verified, printed

if TYPE_CHECKING:
    from meshdsl.report.schema import (
        DividedFacts,
        PipedFacts,
        PipelineFacts,
        ReportFacts,
        TimeFacts,
        UpdateFacts,
    )
    from meshdsl.schedule.table import Action, ScheduleTable
    from meshdsl.schedule.times import Exact, Times

MOST_ACTIONS = 1024
"""Actions of a schedule whose rows are in the report, and are drawn."""

MOST_STAGES = 12
"""Stages that are listed; of more, the first and the last ones."""


def piped(program: DeviceProgram) -> PipedFacts:
    """The entry of a pipeline in a report, if there is one. Bytes are those of one device.

    `bubble` is the share of the devices' time that is idle where a forward pass takes as long as
    either half of a backward pass, and all iterations take as long.
    """
    pipeline = next((node for node in program.body if isinstance(node, Pipeline)), None)
    if pipeline is None:
        return {}
    from meshdsl.schedule.times import timed

    table = pipeline.table
    assert table is not None
    schedule = table.schedule
    early = list(_early(pipeline))
    small = sum(map(len, schedule.rows)) <= MOST_ACTIONS
    peaks = [sum(walk.stored.values()) + walk.walked().most for walk in walks(program)]
    pipe = program.placed.pipe
    slices = pipe.cut.sizes if pipe is not None and pipe.cut is not None else ()
    facts: PipelineFacts = {
        "axis": pipeline.axis,
        "schedule": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro,
        "rows": schedule.text.splitlines() if small else None,
        "early": list(map(str, early)),
        **_shared(pipeline, table),
        "bubble": str(timed(table, _sized(alike(pipeline.sizes, early), slices, schedule)).bubble),
        "in_flight": list(table.peaks),
        "peak": peaks,
        **_updates(table),
    }
    if slices:
        facts["slices"] = list(slices)
    return {"pipeline": facts}


def _shared(node: Pipeline, table: Verified) -> DividedFacts:
    """How layers and stages are divided, where that is not evident, and what is recomputed."""
    facts: DividedFacts = {}
    if node.sizes:
        facts["layers"] = list(node.sizes)
    if sum(map(len, table.held)) > table.schedule.stages:  # a stage is on several devices
        facts["held"] = list(map(list, table.held))
    if node.recomputes:
        facts["recompute"] = "stage"
    return facts


def _updates(table: Verified) -> UpdateFacts:
    """Of updates on the way: which parameters passes read, and of each stage how old they are.

    `copies` of parameters are held, also for a stage whose passes read the newest ones.
    """
    if not table.schedule.updates:
        return {}
    return {
        "weights": table.schedule.weights,
        "updates_behind": [max(v.staleness) for v in table.versions],
        "copies": [v.copies for v in table.versions],
    }


def _early(node: Pipeline) -> Iterator[Fraction]:
    """Of all stages or of each: the share of its second halves of passes that a message precedes.

    In one pass, that is of the last iteration alone.
    """
    if node.sends_after is None:
        yield Fraction(StagePhase.WEIGHTS in node.parts)
        return
    repeats = node.loop(StagePhase.LOOP_BACKWARD).repeats
    yield from (Fraction(1, size) for size in node.sizes or (repeats,))


def _sized(times: Times, slices: Sequence[int], table: ScheduleTable) -> Times:
    """Times in proportion to the sizes of micro-batches; `times` are those of the first."""
    if not slices:
        return times

    def of(action: Action) -> tuple[Exact, Exact]:
        size = Fraction(slices[action.micro], slices[0])
        duration, leaves = times.of(action)
        return duration * size, leaves * size

    return replace(times, unlike={action: of(action) for row in table.rows for action in row})


def alike(sizes: Sequence[int], early: Sequence[Fraction]) -> Times:
    """Times of stages of such numbers of iterations, or of as many each: one takes 1.

    `early` is the share of the second halves of backward passes that a message precedes.
    """
    from meshdsl.schedule.times import Times

    every = sizes or [1] * len(early)
    shares = [*early] * (len(every) if len(early) == 1 else 1)
    pairs = list(zip(map(Fraction, every), shares, strict=True))
    inputs = tuple(size * (2 - share) for size, share in pairs)
    weights = tuple(size * share for size, share in pairs)
    return Times(tuple(size for size, _ in pairs), inputs, weights)


def pipeline_sentence(pipeline: PipelineFacts, predicted: bool) -> str:
    """`one_f_one_b over pipe: 4 stages, 8 micro-batches; 3/11 (27.3 %) of … is idle.`.

    Where the time of a step is `predicted`, its idle share is told there, and only there.
    """
    stages = counted(pipeline["stages"], "stage")
    batches = counted(pipeline["micro_batches"], "micro-batch")
    share = f"{100 * float(Fraction(pipeline['bubble'])):.3g} %"
    idle = "" if predicted else f"; {pipeline['bubble']} ({share}) of the devices' time is idle"
    again = ", recomputed for their backward passes" if "recompute" in pipeline else ""
    rule = pipeline.get("weights")
    late = f" Stages update asynchronously ({rule})." if rule else ""
    head = f"{pipeline['schedule']} over {pipeline['axis']}: {stages}, {batches}{again}"
    return f"{head}{idle}.{late}"


def by_stage(report: ReportFacts) -> Iterator[Block]:
    """A line for each stage: micro-batches in flight, and memory; for each device with several.

    Where stages are on several devices, `held` are those of each.
    """
    pipeline = report.get("pipeline")
    if pipeline is None:
        return
    if pipeline["rows"] is not None:
        yield _picture(pipeline, pipeline["rows"], report.get("time"))
    each = _row(pipeline)
    head = [each, "in flight", "memory"]
    columns = [map(str, pipeline["in_flight"]), map(human, pipeline["peak"])]
    if "layers" in pipeline and each == "stage":
        head.insert(1, "layers")
        columns.insert(0, map(str, pipeline["layers"]))
    if "held" in pipeline:
        head.insert(1, "stages")
        columns.insert(0, map(_numbers, pipeline["held"]))
    if "weights" in pipeline:
        head[-1:-1] = ["updates behind", "copies"]
        columns[-1:-1] = [map(str, pipeline["updates_behind"]), map(str, pipeline["copies"])]
    rows = [(str(n), *row) for n, row in enumerate(zip(*columns, strict=True))]
    if len(rows) > MOST_STAGES:
        half = MOST_STAGES // 2
        rows = [*rows[:half], ("…", *[""] * len(columns)), *rows[-half:]]
    yield Gap()
    yield Grid(f"by {each}", tuple(head), tuple(rows))


def _picture(pipeline: PipelineFacts, rows: list[str], time: TimeFacts | None) -> Picture:
    """The passes of each stage: as long as is predicted, without a cluster each half alike."""
    from meshdsl.report.schedule_picture import schedule_picture
    from meshdsl.schedule.times import Times, timed

    table = printed("\n".join(rows))
    times = alike(pipeline.get("layers", ()), [*map(Fraction, pipeline["early"])])
    if time is not None:
        each = {
            name: tuple(map(Fraction, timed_table)) for name, timed_table in time["passes"].items()
        }
        update = each.get("U", times.update)
        times = Times(each["F"], each["I"], each["W"], update, each["send"])
    timed_table = timed(table, _sized(times, pipeline.get("slices", ()), table.schedule))
    ends = "" if time is None else duration(float(timed_table.makespan))
    idle = f"{100 * float(timed_table.bubble):.3g} % of the stages' time is idle"
    words = f"{pipeline['schedule']} on {pipeline['stages']} stages: {idle}"
    return Picture(partial(schedule_picture, timed_table, _row(pipeline), ends), words, extra=True)


def _numbers(stages: Sequence[int]) -> str:
    return " ".join(map(str, stages))


def _row(pipeline: PipelineFacts) -> str:
    """What a device is called: by its stage, if it has one that no other has."""
    several = "held" in pipeline or pipeline["stages"] != len(pipeline["peak"])
    return "device" if several else "stage"
