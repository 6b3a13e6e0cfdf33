"""Training steps as an engineer writes them by hand: torch autograd and `torch.distributed`.

Tensor parallel after Megatron-LM (Shoeybi et al. 2019): a column-split and a row-split product with
one all_reduce each way, q, k and v in one product, torch's fused attention. Data parallel with all
gradients, and the loss, in one flat buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.hand_models import HAND_MODELS, HandModel, Tensors
from benchmarks.training_cases import ADAMW, BETAS, CLIP, KEY, RATE, SGD_LR, Case


class SumForward(torch.autograd.Function):
    """The sum over all devices, in place; its gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """All_reduce."""
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Nothing to do."""
        return grad


class SumBackward(torch.autograd.Function):
    """The tensor as it is; its gradient is summed over all devices."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Nothing to do."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """All_reduce."""
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def summed(x: torch.Tensor, parallel: str) -> torch.Tensor:
    """What a row-split product yields, made whole."""
    return SumForward.apply(x) if parallel == "tensor" else x  # type: ignore[no-untyped-call]


def shared(x: torch.Tensor, parallel: str) -> torch.Tensor:
    """What goes into a column-split product."""
    return SumBackward.apply(x) if parallel == "tensor" else x  # type: ignore[no-untyped-call]


# --- models --------------------------------------------------------------------------------------


def mlp_params(given: Tensors) -> list[torch.Tensor]:
    """The weights, as they are."""
    return [given["w"], given["v"]]


def mlp_loss(
    params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor], case: Case
) -> torch.Tensor:
    """The mean squared error over the samples of this device."""
    w, v = params
    y = summed(torch.relu_(inputs["x"] @ w) @ v, case.parallel)
    return F.mse_loss(y, inputs["target"])


def lm_params(given: Tensors) -> list[torch.Tensor]:
    """Layer by layer: gain, q, k, v in one matrix, out, gain, up, down; the tables last."""
    found = []
    for layer in range(len(given["g1"])):
        qkv = [given[f"project.w{n}"][layer].flatten(1) for n in "qkv"]
        found += [given["g1"][layer].clone(), torch.cat(qkv, 1)]
        found.append(given["joined.wo"][layer].flatten(0, 1).clone())
        found.append(given["g2"][layer].clone())
        found += [given[f"mlp.w{n}"][layer].clone() for n in (1, 2)]
    return [*found, given["embed"], given["position"]]


def lm_loss(
    params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor], case: Case
) -> torch.Tensor:
    """The mean cross-entropy over the tokens of this device."""
    *layers, embed, position = params
    width = embed.shape[1:]
    x = F.embedding(inputs["tokens"], embed) + position
    for start in range(0, len(layers), 6):
        g1, wqkv, wo, g2, w1, w2 = layers[start : start + 6]
        z = shared(F.rms_norm(x, width, g1, eps=1e-6), case.parallel)
        heads = (z @ wqkv).view(*z.shape[:2], 3, -1, KEY)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + summed(o.transpose(1, 2).flatten(2) @ wo, case.parallel)
        z = shared(F.rms_norm(x, width, g2, eps=1e-6), case.parallel)
        x = x + summed(F.gelu(z @ w1) @ w2, case.parallel)
    logits = F.rms_norm(x, width, eps=1e-6) @ embed.mT
    return F.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten().long())


def parallel_models(case: Case) -> dict[str, HandModel]:
    """The models that are written for several devices, for the parallelism of the case."""
    return {
        "mlp": HandModel(mlp_params, partial(mlp_loss, case=case)),
        "lm": HandModel(lm_params, partial(lm_loss, case=case)),
    }


# --- a step --------------------------------------------------------------------------------------


class ByHand:
    """The training step; call it."""

    def __init__(self, case: Case, given: Tensors, inputs: Tensors) -> None:
        self.case, self.inputs = case, inputs
        model = HAND_MODELS.get(case.family) or parallel_models(case)[case.family]
        self.loss = model.loss
        self.params = [p.requires_grad_() for p in model.params(given)]
        self.update = updater(case, self.params)
        if case.parallel == "data":
            self.buffer = torch.zeros(1 + sum(p.numel() for p in self.params))
            sizes = [p.numel() for p in self.params]
            parts = zip(torch.split(self.buffer[1:], sizes), self.params, strict=True)
            self.grads = [part.view_as(p) for part, p in parts]

    def __call__(self) -> torch.Tensor:
        """One step; the loss over all samples."""
        loss = self.loss(self.params, self.inputs)
        if self.case.parallel == "data":
            return self.reduced(loss / self.case.devices)
        self.update(list(torch.autograd.grad(loss, self.params)))
        return loss.detach()

    def reduced(self, loss: torch.Tensor) -> torch.Tensor:
        """One all_reduce of a buffer that holds the loss and all gradients."""
        found = torch.autograd.grad(loss, self.params)
        torch._foreach_copy_([self.buffer[:1], *self.grads], [loss.detach(), *found])
        dist.all_reduce(self.buffer)
        self.update(self.grads)
        return self.buffer[0]


def updater(case: Case, params: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    """What changes the parameters in place, given the gradients."""
    if case.optimizer == "sgd":

        def descend(grads: list[torch.Tensor]) -> None:
            with torch.no_grad():
                torch._foreach_add_(params, grads, alpha=-SGD_LR)

        return descend
    optimizer = torch.optim.AdamW(params, fused=True, betas=BETAS, **ADAMW)
    rates = map(RATE.at, itertools.count())

    def step(grads: list[torch.Tensor]) -> None:
        torch._foreach_mul_(grads, clipping(grads, case))
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.param_groups[0]["lr"] = next(rates)
        optimizer.step()
        optimizer.zero_grad()

    return step


def clipping(grads: list[torch.Tensor], case: Case) -> torch.Tensor:
    """The factor of all gradients; those of split parameters are of all devices together."""
    squares = torch.stack(torch._foreach_norm(grads)).square_()
    if case.parallel == "tensor":
        tables = len(grads) - 2 if case.family == "lm" else len(grads)
        split = torch.tensor([g.dim() == 2 and i < tables for i, g in enumerate(grads)])
        others = squares[~split].sum()
        squares = squares[split].sum()
        dist.all_reduce(squares)
        squares += others
    return torch.clamp(CLIP / (squares.sum().sqrt() + 1e-6), max=1.0)
