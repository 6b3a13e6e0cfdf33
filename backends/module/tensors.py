"""Tensors that a module is given or gives: local blocks, whole tensors, DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshdsl.backends.engines.in_process import as_tensor, torch_dtype
from meshdsl.backends.module.mesh import Team
from meshdsl.backends.runtime.values import Spec, draw_part, local_part
from meshdsl.diagnostics import did_you_mean, fail


def drawn(team: Team, name: str, spec: Spec, seed: int) -> torch.Tensor:
    """The block of this device of values that are made up, on its device."""
    part = local_part(spec, team.axes, team.rank)
    return as_tensor(draw_part(spec, name, seed, part), spec).to(team.device)


def block(team: Team, name: str, spec: Spec, value: Any, code: str = "MD0563") -> torch.Tensor:
    """The block of this device of a whole tensor, or of a DTensor of any mesh and placement.

    Raises DiagnosticError with `code` for another shape.
    """
    whole = tuple(spec.dims.values())
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != whole:
        message = f"`{name}` has the shape {list(whole)}, and {list(value.shape)} is given"
        fail(code, message, help="give the whole tensor, or a DTensor")
    if isinstance(value, DTensor):
        same = value.device_mesh == team.mesh and team.is_expressible(spec)
        if same:
            return value.redistribute(placements=team.placements(name, spec)).to_local()
        value = value.full_tensor()
    found: torch.Tensor = value[local_part(spec, team.axes, team.rank)]
    return found.to(team.device)


def local_input(team: Team, name: str, spec: Spec, value: Any) -> torch.Tensor:
    """What this device holds of an input: a DTensor is brought to its placement.

    Anything else is what it holds already. MD0561: it does not fit.
    """
    if isinstance(value, DTensor):
        value = _of_dtensor(team, name, spec, value)
    elif not isinstance(value, torch.Tensor):
        message = f"the input `{name}` is a {type(value).__name__}, not a tensor"
        fail("MD0561", message, help="`torch.as_tensor(…)` makes one of an array")
    expected = block_shape(team, spec)
    if tuple(value.shape) != expected:
        _refuse_shape(name, spec, expected, tuple(value.shape))
    if value.dtype != torch_dtype(spec.dtype):
        message = f"the input `{name}` is {spec.dtype}, and a tensor of {value.dtype} is given"
        help = f"convert it: `{name}.to({torch_dtype(spec.dtype)})`"
        fail("MD0561", message, help=help)
    tensor: torch.Tensor = value
    return tensor


def block_shape(team: Team, spec: Spec) -> tuple[int, ...]:
    """The sizes of the block that a device holds."""
    return tuple(p.stop - p.start for p in local_part(spec, team.axes, team.rank))


def _of_dtensor(team: Team, name: str, spec: Spec, value: DTensor) -> torch.Tensor:
    if value.device_mesh != team.mesh:
        message = f"the input `{name}` is a DTensor on another DeviceMesh than the module"
        fail("MD0561", message, help="make it on the module's own: `module.device_mesh`")
    if tuple(value.shape) != tuple(spec.dims.values()):
        _refuse_shape(name, spec, tuple(spec.dims.values()), tuple(value.shape))
    return value.redistribute(placements=team.placements(name, spec)).to_local()


def _refuse_shape(name: str, spec: Spec, expected: tuple[int, ...], given: tuple[int, ...]) -> None:
    dims = ", ".join(
        f"{dim}@{'+'.join(axes)}" if (axes := spec.split.get(dim)) else dim for dim in spec.dims
    )
    message = (
        f"this device holds {list(expected)} of the input `{name}[{dims}]`, "
        f"and a tensor of shape {list(given)} is given"
    )
    whole = given == tuple(spec.dims.values())
    help = f'give its part of the whole: `module.local("{name}", tensor)`; or a DTensor'
    fail("MD0561", message, help=help if whole else "give what this device holds of it")


def refuse_names(given: Mapping[str, Any], known: Mapping[str, Any], what: str, code: str) -> None:
    """Refuse names that the program does not have."""
    for name in given:
        if name not in known:
            close = did_you_mean(name, list(known)) or f"there are {', '.join(known) or 'none'}"
            fail(code, f"the program has no {what} `{name}`", help=close)


def whole(team: Team, spec: Spec, local: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every device, of the blocks that the devices hold."""
    axes = tuple(a for a in team.axes if any(a in split for split in spec.split.values()))
    if not axes:
        return local.clone()
    group = team.group(axes)
    blocks = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(blocks, local.contiguous(), group=group)
    found = local.new_empty(list(spec.dims.values()))
    for held, rank in zip(blocks, _places(team, axes), strict=True):
        found[local_part(spec, team.axes, rank)] = held
    return found


def _places(team: Team, axes: tuple[str, ...]) -> list[int]:
    """The places in the mesh of the members of this device's group over `axes`."""
    assert team.mesh is not None
    every: list[int] = team.mesh.mesh.flatten().tolist()
    return [every.index(rank) for rank in team.members(axes)]
