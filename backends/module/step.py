"""A loaded text: its forward pass, and its backward pass as an autograd function."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshdsl.api.errors import told
from meshdsl.backends.engines.in_process import load
from meshdsl.backends.module.blocks import local_of, sum_gradient
from meshdsl.backends.module.mesh import MeshRanks
from meshdsl.backends.runtime.values import Spec
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
        self.grads: dict[str, Spec] = getattr(self.program, "PARAM_GRADS", {})

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
        """The outputs; their cotangents propagate to inputs and parameters.

        Gradients that the backward pass leaves as partial sums are reduced, with the partial sums
        that parameters have from other batches.
        """
        local = {name: local_of(param) for name, param in params.items()}
        return self._passed(params, inputs, local)

    def unsynchronized(self, inputs: Tensors, params: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs; gradients of parameters are left as partial sums.

        A partial sum may be larger than the block of its parameter: both are DTensors.
        """
        return self._passed(None, inputs, params)

    def _passed(
        self, leaves: Tensors | None, inputs: Tensors, params: Tensors
    ) -> tuple[torch.Tensor, ...]:
        tensors = [inputs[name] for name in self.inputs] + [params[name] for name in self.params]
        outputs: tuple[torch.Tensor, ...] = _Passes.apply(self, leaves, *tensors)  # type: ignore[no-untyped-call]
        return outputs

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, dict[str, Any]]:
        """The forward pass on inputs and parameters, in order: outputs, and saved values."""
        count = len(self.inputs)
        inputs = dict(zip(self.inputs, tensors[:count], strict=True))
        params = dict(zip(self.params, map(local_of, tensors[count:]), strict=True))
        with self.ranks.here():
            passed: tuple[Tensors, dict[str, Any]] = self.program.forward(
                self.ranks.rank, self.groups, inputs, params
            )
        return passed

    def backward(
        self,
        saved: Mapping[str, Any],
        cotangents: Sequence[torch.Tensor | None],
        leaves: Tensors | None,
    ) -> list[torch.Tensor | None]:
        """The gradients of inputs and parameters, in order; `cotangents` are those of outputs.

        Without `leaves`, the parameters, theirs are DTensors, and perhaps partial sums.
        """
        all_cotangents = dict(zip(self.outputs, cotangents, strict=True))
        needed = {name: all_cotangents[name] for name in self.cotangents}
        program, place = self.program, (self.ranks.rank, self.groups)
        with self.ranks.here():
            params, inputs = program.backward(*place, saved, needed)
            if leaves is None:
                params = {n: self._as_dtensor(n, partial) for n, partial in params.items()}
            elif hasattr(program, "reduce_gradients"):
                for name, partial in params.items():
                    self._add_accumulated(leaves[name], name, partial)
                params = program.reduce_gradients(*place, params)
            else:
                for name in params:
                    sum_gradient(leaves[name])
        return [inputs.get(n) for n in self.inputs] + [params.get(n) for n in self.params]

    def _as_dtensor(self, name: str, partial: torch.Tensor) -> torch.Tensor:
        return self.ranks.as_dtensor(name, self.grads[name], partial)

    def _add_accumulated(self, param: torch.Tensor, name: str, partial: torch.Tensor) -> None:
        """Take the partial sum that a parameter has as its gradient, and add it to another one."""
        grad = param.grad if param.is_leaf else None
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            assert grad.placements == self.ranks.placements(name, self.grads[name])
            partial.add_(grad.to_local())
            param.grad = None


class _Passes(torch.autograd.Function):
    """Both passes of a step as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any, step: CompiledStep, leaves: Tensors | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, saved = step.forward(tensors)
        ctx.step, ctx.leaves = step, leaves
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
        return None, None, *ctx.step.backward(saved, cotangents, ctx.leaves)
