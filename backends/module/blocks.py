"""Tensors that a module takes or returns: local blocks, whole tensors, DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from meshdsl.backends.engines.in_process import as_tensor, torch_dtype
from meshdsl.backends.engines.persistent import lacking
from meshdsl.backends.module.mesh import MeshRanks, is_strided
from meshdsl.backends.runtime.values import Spec, draw_part
from meshdsl.diagnostics import did_you_mean, fail


def drawn(ranks: MeshRanks, name: str, spec: Spec, seed: int) -> torch.Tensor:
    """This device's block of drawn values, on its torch device."""
    return as_tensor(draw_part(spec, name, seed, ranks.part(spec)), spec).to(ranks.where)


def block(
    ranks: MeshRanks, name: str, spec: Spec, value: Any, code: str = "MD0563"
) -> torch.Tensor:
    """This device's block of a whole tensor, or of a DTensor of any mesh and placement.

    Raises DiagnosticError with `code` for another shape.
    """
    shape = tuple(spec.dims.values())
    refuse_without_values(name, value, code)
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != shape:
        message = f"`{name}` has the shape {list(shape)}, and {list(value.shape)} is given"
        fail(code, message, help="give the whole tensor, or a DTensor")
    if isinstance(value, DTensor):
        placements = ranks.placements(name, spec)
        if value.device_mesh == ranks.device_mesh and (
            value.placements == placements or not any(map(is_strided, placements))
        ):
            return value.redistribute(placements=placements).to_local()
        value = value.full_tensor()
    part: torch.Tensor = value[ranks.part(spec)]
    return part.to(ranks.where)


def stored_param(
    ranks: MeshRanks, name: str, placements: tuple[Placement, ...], param: torch.Tensor
) -> torch.Tensor:
    """A parameter as the program stores it: a DTensor of these placements.

    Raises MD0561 for a plain tensor where there is a DeviceMesh.
    """
    if ranks.device_mesh is None:
        return param
    if not isinstance(param, DTensor):
        message = f"the parameter `{name}` was replaced by a plain tensor, which has no placement"
        help = f'make a DTensor: `distribute_tensor(whole, mesh, module.placements("{name}"))`'
        fail("MD0561", message, help=help)
    return param if param.placements == placements else param.redistribute(placements=placements)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this device has of a tensor; gradients go through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sum_gradient(param: torch.Tensor) -> None:
    """Reduce the gradient of a parameter where it is a partial sum."""
    grad = param.grad if param.is_leaf else None
    if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
        assert isinstance(param, DTensor)
        param.grad = grad.redistribute(placements=param.placements)


def refuse_without_values(name: str, value: Any, code: str) -> None:
    """Refuse a tensor that is sparse, masked or the like. Raises DiagnosticError with `code`."""
    if problem := lacking(value):
        fail(code, f"`{name}` {problem}", help="give a plain tensor, or a DTensor")


def local_input(
    ranks: MeshRanks, name: str, spec: Spec, expected: tuple[int, ...], value: Any
) -> torch.Tensor:
    """This device's block of an input, of shape `expected`: a DTensor is resharded to it.

    Anything else is the block already. Raises MD0561 where it does not fit.
    """
    refuse_without_values(name, value, "MD0561")
    if isinstance(value, DTensor):
        value = _of_dtensor(ranks, name, spec, value)
    elif not isinstance(value, torch.Tensor):
        message = f"the input `{name}` is a {type(value).__name__}, not a tensor"
        fail("MD0561", message, help="`torch.as_tensor(…)` makes one of an array")
    if tuple(value.shape) != expected:
        _refuse_shape(name, spec, expected, tuple(value.shape))
    if value.dtype != torch_dtype(spec.dtype):
        message = f"the input `{name}` is {spec.dtype}, and a tensor of {value.dtype} is given"
        help = f"convert it: `{name}.to({torch_dtype(spec.dtype)})`"
        fail("MD0561", message, help=help)
    tensor: torch.Tensor = value
    return tensor


def _of_dtensor(ranks: MeshRanks, name: str, spec: Spec, value: DTensor) -> torch.Tensor:
    if value.device_mesh != ranks.device_mesh:
        message = f"the input `{name}` is a DTensor on another DeviceMesh than the module"
        fail("MD0561", message, help="make it on the module's own: `module.device_mesh`")
    if tuple(value.shape) != tuple(spec.dims.values()):
        _refuse_shape(name, spec, tuple(spec.dims.values()), tuple(value.shape))
    return value.redistribute(placements=ranks.placements(name, spec)).to_local()


def _refuse_shape(name: str, spec: Spec, expected: tuple[int, ...], given: tuple[int, ...]) -> None:
    dims = ", ".join(
        f"{dim}@{'+'.join(axes)}" if (axes := spec.split.get(dim)) else dim for dim in spec.dims
    )
    message = (
        f"this device holds {list(expected)} of the input `{name}[{dims}]`, "
        f"and a tensor of shape {list(given)} is given"
    )
    is_global = given == tuple(spec.dims.values())
    help = f'give its part of the whole: `module.local("{name}", tensor)`; or a DTensor'
    fail("MD0561", message, help=help if is_global else "give what this device holds of it")


def refuse_names(given: Mapping[str, Any], known: Mapping[str, Any], what: str, code: str) -> None:
    """Refuse names that the program does not have."""
    for name in given:
        if name not in known:
            close = did_you_mean(name, list(known)) or f"there are {', '.join(known) or 'none'}"
            fail(code, f"the program has no {what} `{name}`", help=close)
