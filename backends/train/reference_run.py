"""Training by the reference engine: in this process, on one device, computed by numpy in float64.

Between steps, parameters and states are stored in the dtypes of the program, as on any device. Of a
layout with updates on the way a step is the table of its schedule, carried out from the first
micro-batch to the last update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.backends.engines.asynchronous_reference import replay_of
from meshdsl.backends.engines.in_process import Emitted, Programs, as_array
from meshdsl.backends.engines.reference import reference_step, run_reference
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Compilation
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Step = Callable[..., tuple[dict[str, Array], dict[str, Array]]]
Device = Callable[..., dict[str, "torch.Tensor"]]


def on_one_device(made: Compilation) -> Compilation:
    """The training step on one device, without a layout: its text has the tables of what is stored.

    Where stages update on the way there is no gradient of one time, and no norm of it.
    """
    measured = made.options.measured and replay_of(made) is None
    one = replace(made.options, mesh="one:1", layout="", sbp=None, schedule=None)
    return made.under(replace(one, cluster=None, objective=None, measured=measured), Diagnostics())


@dataclass(frozen=True, slots=True)
class Referred(Emitted):
    """Texts of one device, and the functions that are called in place of each one's `device`."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    """By the field of each text."""

    def load(self) -> Programs:
        """All texts as modules."""
        programs = Emitted.load(self)
        for name, device in self.devices.items():
            getattr(programs, name).device = device
        return programs


def referred(made: Compilation, one: Compilation, evaluated: bool) -> Referred:
    """The texts of `one` device, computed by the reference engine as `made` says."""
    replay, program = replay_of(made), one.named

    def step(*arrays: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        if replay is None:
            return reference_step(program, *arrays)
        replayed = replay.step(*arrays)
        return replayed.outputs, replayed.updated

    texts, devices = {"program": one.emitted}, {"program": _trained(step)}
    if evaluated:
        texts["evaluation"], devices["evaluation"] = one.forward.emitted, _evaluated(one.forward)
    if one.warmup is not None:
        texts["warmup"] = one.warmup.emitted
        devices["warmup"] = _trained(partial(reference_step, one.warmup.named))
    return Referred(**texts, devices=devices)


def evaluated(made: Compilation, short: Compilation | None) -> Referred:
    """The texts of forward passes on one device, computed by the reference engine."""
    if short is None:
        return Referred(made.emitted, devices={"program": _evaluated(made)})
    devices = {"program": _evaluated(made), "evaluation": _evaluated(short)}
    return Referred(made.emitted, short.emitted, devices=devices)


def _trained(step: Step) -> Device:
    """What stands for the function `device` of a training step: it overwrites what is stored."""

    def device(
        rank: int, groups: object, inputs: Tensors, params: Tensors, states: Tensors
    ) -> dict[str, torch.Tensor]:
        outputs, updated = step(*map(_arrays, (inputs, params, states)))
        for name, tensor in {**params, **states}.items():
            if name in updated:
                tensor.copy_(_tensor(updated[name]))
        return {name: _tensor(array) for name, array in outputs.items()}

    return device


def _evaluated(forward: Compilation) -> Device:
    """What stands for the function `device` of a forward pass."""
    program = forward.named

    def device(
        rank: int, groups: object, inputs: Tensors, params: Tensors
    ) -> dict[str, torch.Tensor]:
        outputs = run_reference(program, _arrays(inputs), _arrays(params))
        return {name: _tensor(array) for name, array in outputs.items()}

    return device


def _arrays(tensors: Tensors) -> dict[str, Array]:
    return {name: as_array(tensor.cpu()) for name, tensor in tensors.items()}


def _tensor(array: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.array(array))
