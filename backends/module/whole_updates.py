"""Optimizers whose update of an element depends on its whole tensor, on parameters that are split.

torch multiplies sharded matrices of `Muon` in bfloat16 and adds their partial sums rounded, so that
each layout trains otherwise; `Adafactor` and `Rprop` fail. Here their steps see one parameter after
the other, gathered with its gradient and state, as on one device. Between steps all are split.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshdsl.api.errors import told
from meshdsl.diagnostics import fail

WITH_DTENSORS: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The modules whose parameters are gathered for an optimizer that needs whole tensors."""

BY_TENSOR = (torch.optim.Muon, torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers that update each tensor by itself: group by group, with nothing in a group's dict."""

TOGETHER = (torch.optim.LBFGS,)
"""Optimizers that make one vector of all tensors."""


class _OneByOne:
    """The groups of an optimizer, as one group for each parameter, gathered while it is used."""

    def __init__(self, optimizer: Optimizer, at_work: Optimizer) -> None:
        self.optimizer, self.at_work = optimizer, at_work

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not isinstance(param, DTensor):
                    self.at_work.state = self.optimizer.state
                    yield {**group, "params": [param]}
                elif param.grad is not None:
                    yield from self._gathered(group, param)

    @torch.no_grad()
    def _gathered(self, group: Mapping[str, Any], param: DTensor) -> Iterator[Mapping[str, Any]]:
        full = torch.nn.Parameter(_whole(param.detach()).clone(), requires_grad=False)
        full.grad = _whole(param.grad)
        state = self.optimizer.state[param]
        gathered = {key: _whole(value) for key, value in state.items()}
        self.at_work.state = {full: gathered}  # type: ignore[assignment]
        yield {**group, "params": [full]}
        param.copy_(_like(param, full.detach()))
        state.update({key: _like(param, value) for key, value in gathered.items()})


def _whole(value: Any) -> Any:
    """A gradient, a parameter or an entry of its state on one device."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(param: DTensor, value: Any) -> Any:
    """What all devices have of a parameter's state, as a DTensor: split as it is, if of its shape.

    Numbers are the same on all, and stay plain tensors, as with every optimizer of torch.
    """
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    mesh = param.device_mesh
    if value.shape != param.shape:
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return distribute_tensor(value, mesh, param.placements, src_data_rank=None)


@told
def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """Let a step that needs whole tensors have them, or refuse it (MD0561)."""
    if not isinstance(optimizer, (*BY_TENSOR, *TOGETHER)):
        return None
    trained = {id(p) for module in WITH_DTENSORS for p in module.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    split = [p for p in params if id(p) in trained and _is_split(p)]
    if not split:
        return None
    if isinstance(optimizer, TOGETHER):
        kind = type(optimizer).__name__
        message = f"`{kind}` makes one vector of all parameters, and the layout splits some of them"
        help = (
            "use an optimizer that works on each of them (`AdamW`, `Muon`), or a layout that "
            "splits no parameter"
        )
        fail("MD0561", message, help=help)
    at_work = object.__new__(type(optimizer))
    at_work.__dict__.update(optimizer.__dict__)
    at_work.param_groups = _OneByOne(optimizer, at_work)  # type: ignore[assignment]
    return (at_work, *args[1:]), kwargs


def _is_split(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and not all(p.is_replicate() for p in param.placements)


register_optimizer_step_pre_hook(_before_step)
