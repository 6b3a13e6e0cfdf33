"""The devices along a pipeline that do the same: what is counted of one holds for all of them."""

from __future__ import annotations

from meshdsl.device.ir import (
    Compute,
    DeviceProgram,
    Move,
    StagePhase,
    on_device,
    only_on,
    walk,
)
from meshdsl.ir.program import every


def alike_devices(program: DeviceProgram, in_memory: bool = False) -> tuple[tuple[int, ...], ...]:
    """The devices along the axis of a pipeline, in groups of those that do the same passes.

    They may do them in another order. With `in_memory` those of a group hold as many bytes, too.
    Without a pipeline, the only device there is along none.
    """
    pipe = program.pipeline
    if pipe is None:
        return ((0,),)
    table = pipe.known
    differ: object = pipe.node_stages
    if in_memory:
        # Blocks of sizes of their own, and versions by the order of passes.
        differ = differ or program.mesh.given or pipe.versioned or table.schedule.updates
    alone = _alone(program)
    alike: dict[object, list[int]] = {}
    for device, stages in enumerate(table.held):
        done = tuple(tuple(pipe.does(part, stage) for part in StagePhase) for stage in stages)
        times = tuple(map(pipe.on(*stages, device=device).times, StagePhase))
        sizes = tuple(pipe.sizes[stage] for stage in stages) if pipe.sizes else ()
        separate = device if differ or device in alone else None
        alike.setdefault((separate, done, times, sizes), []).append(device)
    return tuple(map(tuple, alike.values()))


def _alone(program: DeviceProgram) -> set[int | None]:
    """The devices that have a value or a statement of their own."""
    nodes = tuple(every(program.body))
    stored = (*program.inputs, *program.params, *program.states)
    alone = {v.on for v in (*stored, *(v for node in nodes for v in node.makes))}
    alone.update(only_on(node) for node in nodes)
    alone.update(node.step.at for node in nodes if isinstance(node, Move))
    return alone


def computed(program: DeviceProgram) -> int:
    """The floating-point operations of a device in a step: of that which has most."""
    return max(
        sum(node.flops * times for node, times in walk(body) if isinstance(node, Compute))
        for body in (on_device(program, group[0]) for group in alike_devices(program))
    )
