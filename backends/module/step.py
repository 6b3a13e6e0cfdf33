"""A loaded text: its forward pass, and its backward pass as an autograd function."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshdsl.api.errors import told
from meshdsl.backends.engines.in_process import load
from meshdsl.backends.module.mesh import MeshRanks
from meshdsl.diagnostics import fail

Tensors = dict[str, torch.Tensor]
_NUMBERS = itertools.count(1)


class CompiledStep:
    """A compiled text with its process groups. `inputs` and `params` are names, in order."""

    def __init__(self, text: str, ranks: MeshRanks) -> None:
        self.text, self.ranks = text, ranks
        self.program: Any = load(text)
        self._register()
        self.groups = ranks.groups(self.program.GROUPS)
        self.inputs, self.params = tuple(self.program.INPUTS), tuple(self.program.PARAMS)
        self.outputs = tuple(self.program.OUTPUTS)
        self.cotangents = tuple(getattr(self.program, "COTANGENTS", ()))

    def _register(self) -> None:
        """Register the text as a module under a name of its own while this step lives.

        `torch.compile` imports the module of a function to find the function's globals.
        """
        name = self.program.__name__ = f"{self.program.__name__}_{next(_NUMBERS)}"
        sys.modules[name] = self.program
        weakref.finalize(self, sys.modules.pop, name, None)

    def evaluate(self, inputs: Tensors, params: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs, with nothing saved for a backward pass."""
        with torch.no_grad(), self.ranks.here():
            outputs = self.program.device(self.ranks.rank, self.groups, inputs, params)
        return tuple(outputs[name].detach() for name in self.outputs)

    def differentiable(self, inputs: Tensors, params: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs; their cotangents propagate to inputs and parameters."""
        tensors = [inputs[name] for name in self.inputs] + [params[name] for name in self.params]
        outputs: tuple[torch.Tensor, ...] = _Passes.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, dict[str, Any]]:
        """The forward pass on inputs and parameters, in order: outputs, and saved values."""
        count = len(self.inputs)
        inputs = dict(zip(self.inputs, tensors[:count], strict=True))
        params = dict(zip(self.params, tensors[count:], strict=True))
        with self.ranks.here():
            passed: tuple[Tensors, dict[str, Any]] = self.program.forward(
                self.ranks.rank, self.groups, inputs, params
            )
        return passed

    def backward(
        self, saved: Mapping[str, Any], cotangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of inputs and parameters, in order; `cotangents` are those of outputs."""
        all_cotangents = dict(zip(self.outputs, cotangents, strict=True))
        needed = {name: all_cotangents[name] for name in self.cotangents}
        with self.ranks.here():
            params, inputs = self.program.backward(self.ranks.rank, self.groups, saved, needed)
        return [inputs.get(n) for n in self.inputs] + [params.get(n) for n in self.params]


class _Passes(torch.autograd.Function):
    """Both passes of a step as an autograd function."""

    @staticmethod
    def forward(ctx: Any, step: CompiledStep, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = step.forward(tensors)
        ctx.step = step
        flat, ctx.structure = tree_flatten(saved)  # lists of tensors, and of tuples of them
        ctx.save_for_backward(*flat)
        # Detached: a saved value may be a view of an output, which must not keep its own history.
        detached = {name: outputs[name].detach() for name in step.outputs}
        ctx.mark_non_differentiable(*(t for n, t in detached.items() if n not in step.cotangents))
        return tuple(detached.values())

    @staticmethod
    @told
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            # `once_differentiable` would silently drop paths that avoid the cotangents.
            message = "the backward pass of a module cannot be differentiated again"
            help = "leave `create_graph` out, or write `grad(…)` in the program and return it"
            fail("MD0565", message, help=help)
        saved = tree_unflatten(ctx.saved_tensors, ctx.structure)
        return None, *ctx.step.backward(saved, cotangents)
