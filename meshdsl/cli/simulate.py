"""`meshdsl simulate`: how long a step takes on a cluster, and what it waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.cli import common
from meshdsl.cli.options import (
    AsData,
    File,
    Force,
    PlacingOptions,
    flag,
    only_one,
    opt,
    option,
    pipeline_options,
)
from meshdsl.diagnostics import Diagnostics
from meshdsl.output_files import write_whole
from meshdsl.pipeline import Compilation

if TYPE_CHECKING:
    from meshdsl.report.document import Document
    from meshdsl.simulate.against import TraceComparisonFacts
    from meshdsl.simulate.timeline import Timeline


@option
class Simulate(PlacingOptions, Force, AsData):
    """Options of `simulate`."""

    trace: Path | None = opt("--trace", "F.json", "Write a trace for Perfetto.")
    against: Path | None = opt(
        "--against", "F.json", "Compare with a trace measured by `run` or `train`."
    )
    unroll: bool = flag("--unroll", "Simulate every iteration of loops.")
    stage: int | None = opt(
        "--stage", "N", "Show this pipeline stage. [default: the one that ends last]", min=0
    )
    top: int = opt("--top", "N", "Show the N slowest lines.", 8, min=1)


def command(file: File, given: Simulate) -> None:
    """Predict the time and memory of one step on a cluster."""
    with common.reporting(given.json) as diagnostics:
        only_one(given, "against", "trace")
        if given.trace is not None:
            common.check_output(given.trace, given.force, file)
        compilation = common.compiled(file, pipeline_options(given), diagnostics, "device")
        if given.against is not None:
            _compare(compilation, given.against, given)
            return
        timeline = timeline_of(compilation, given)
        if given.trace is not None:
            from meshdsl.simulate.trace import simulated_trace, trace_text

            write_whole(given.trace, trace_text(simulated_trace(timeline)))
        _show(compilation, timeline, given)


def timeline_of(made: Compilation, given: Simulate) -> Timeline:
    """The step in time. Raises MD0630 without a cluster, MD0336 for a stage that there is not."""
    from meshdsl.simulate.engine import needed, simulate

    return simulate(made.device, needed(made.timing), given.unroll, given.stage)


def _compare(made: Compilation, path: Path, given: Simulate) -> None:
    """Show a measured trace beside the simulated one of the same program."""
    from meshdsl.report.terminal import print_document

    document, facts = compared_with(made, path, given)
    if given.json:
        common.print_json(facts)
    else:
        print_document(document)


def compared_with(
    made: Compilation, path: Path, given: Simulate
) -> tuple[Document, TraceComparisonFacts]:
    """A measured trace beside the simulated one of the same program, and the same as data."""
    from meshdsl.report.simulation import compared
    from meshdsl.simulate.against import against, of_devices, read_trace, refuse_other
    from meshdsl.simulate.trace import simulated_trace

    trace = read_trace(path)
    head = trace["otherData"]
    evaluate, measured = (head.get(name) is True for name in ("evaluate", "measured"))
    options = replace(made.options, evaluate=evaluate, measured=measured)
    compilation = made.under(options, Diagnostics())
    refuse_other(path, trace, compilation.device)
    timeline = timeline_of(compilation, given)
    comparison = against(simulated_trace(timeline), of_devices(trace, timeline))
    return compared(comparison, given.top), {"version": 1, **comparison}


def _show(made: Compilation, timeline: Timeline, given: Simulate) -> None:
    from meshdsl.report.simulation import simulated, simulation
    from meshdsl.report.terminal import print_document

    facts = simulation(timeline)
    if given.json:
        common.print_json(facts)
        return
    print_document(simulated(facts, {made.source.name: made.source}, given.top))
    if given.trace is not None:
        common.say(f"wrote {given.trace}")
