"""Where the blocks of stored variables lie along the axis of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.device.ir import DeviceProgram, StageRows, Var

Blocks = dict[str, list[list[int]]]
"""By dim, which indices of it lie in each block (`Spec.blocks`)."""


def lying(var: Var, program: DeviceProgram) -> tuple[dict[str, tuple[str, ...]], Blocks]:
    """The axes that split dims of a stored variable, and what lies where of them (`Spec.blocks`).

    Of what one device along the axis of the stages has alone, that has all of a dim, others none.
    """
    split, pipe = dict(var.placement.splits), program.placed.pipe
    blocks = program.placed.blocks(var.type, var.placement)
    if var.on is not None and pipe is not None:
        sizes = {dim.name: dim.size for dim in var.type.dims}
        lie_alone(sizes, split, blocks, pipe.axis, range(program.mesh.size(pipe.axis)), var.on)
    return split, blocks


def lie_alone(
    sizes: Mapping[str, int],
    split: dict[str, tuple[str, ...]],
    blocks: Blocks,
    axis: str,
    devices: range,
    on: int,
) -> None:
    """Add to splits and blocks of a tensor that one of the devices along an axis has all of it.

    Its smallest dim lies so, of those that nothing else splits if there are such.
    """
    if sizes:
        dim = min(sizes, key=lambda name: (name in split, sizes[name]))
        split[dim] = (axis, *split.get(dim, ()))
        blocks[dim] = [[*range(sizes[dim])] if device == on else [] for device in devices]


def of_other_stages(program: DeviceProgram) -> frozenset[str]:
    """The names of variables that a device has of the other stage of its pair."""
    stacked = () if program.pipeline is None else program.pipeline.stacked
    rows = {item.other for item in stacked if isinstance(item, StageRows) and item.other}
    sliced = {item.outer for item in stacked if item.inside in rows}
    return frozenset(var.name for var in rows | sliced)


def home_of(var: Var, device: int, program: DeviceProgram, others: frozenset[str]) -> int:
    """The device whose block a variable is that a device has outside of passes.

    It is its own; of two stages in a pair, also that of the other (`others`: `of_other_stages`).
    """
    pipe = program.placed.pipe
    return pipe.others[device] if pipe is not None and var.name in others else device
