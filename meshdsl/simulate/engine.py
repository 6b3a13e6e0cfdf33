"""How long a step takes: the simulation of a device program, of a pipeline that of a stage."""

from __future__ import annotations

from meshdsl.cluster.profile import refuse_unnamed
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceProgram, Pipeline
from meshdsl.option_edits import leave_out, numbers, refuse
from meshdsl.simulate.device_run import DeviceRun
from meshdsl.simulate.stage_run import simulate_stage
from meshdsl.simulate.timeline import Timeline


def simulate(
    program: DeviceProgram,
    timing: Timing,
    unroll: bool = False,
    stage: int | None = None,
    events: bool = True,
) -> Timeline:
    """The timeline of one step of a device program on a cluster.

    Of a pipeline it is that of the devices of a `stage`, or of the one that ends last.

    Iterations that begin like an earlier one are folded (`Folded`): the result is exactly that of
    `unroll`, which simulates each. Where only the length of the step counts, the passes of a
    pipeline need no `events`.
    """
    pipe = next((node for node in program.body if isinstance(node, Pipeline)), None)
    if pipe is not None:
        _refuse_stage(stage, len(pipe.rows))
        return simulate_stage(program, timing, unroll, stage, events)
    _refuse_stage(stage, 0)
    run = DeviceRun(program, timing, unroll)
    run.walked()
    return run.timeline()


def _refuse_stage(stage: int | None, stages: int) -> None:
    """Raise MD0336 unless the stage is one of so many."""
    if stage is not None and not 0 <= stage < stages:
        message = f"there is no stage {stage}: the layout has {stages or 'none'}"
        fixes = numbers("--stage", 0, stages - 1) if stages else (leave_out("--stage"),)
        refuse("MD0336", message, fixes)


def needed(timing: Timing | None) -> Timing:
    """The timing of the cluster that is named. Raises MD0630 where none is."""
    if timing is None:
        message = "no cluster is named, and how long a step takes depends on it"
        refuse_unnamed("MD0630", message)
    return timing
