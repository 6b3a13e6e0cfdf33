"""The local blocks of every batch on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.runtime.values import draw_part, step_seed
from meshdsl.backends.train.batches import Batches
from meshdsl.diagnostics import DiagnosticError

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import LoadedProgram


class DataRefused(DiagnosticError):
    """A batch has values that the program does not take. No device has begun its step."""


class Feed:
    """The local blocks of every batch on one device, as tensors.

    The seed of a step is that of the run, hashed with the step.
    """

    def __init__(self, program: LoadedProgram, batches: Batches, ranks: Ranks, seed: int) -> None:
        self.specs, self.batches, self.where = program.INPUTS, batches, ranks.where
        self.ranks, self.seed = ranks, seed
        self.parts = {n: ranks.part(s) for n, s in self.specs.items()}

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The inputs of step `step` (from 0). Raises DataRefused, on all devices."""
        if not self.batches.may_refuse:
            return self._read(step)
        try:
            return self.ranks.agreed(lambda: self._read(step))
        except DiagnosticError as error:
            raise DataRefused(*error.diagnostics) from None

    def _read(self, step: int) -> dict[str, torch.Tensor]:
        from meshdsl.backends.engines.in_process import as_tensor

        inputs = {}
        for name, spec in self.specs.items():
            part = self.parts[name]
            if spec.draw == ("seed",):
                block = draw_part(spec, name, step_seed(self.seed, step), part)
            else:
                block = self.batches.block(name, spec, step, part)
            inputs[name] = as_tensor(block, spec).to(self.where)
        return inputs
