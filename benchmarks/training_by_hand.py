"""Training steps as an engineer writes them by hand: torch autograd and `torch.distributed`.

Tensor parallel after Megatron-LM (Shoeybi et al. 2019): a column-split and a row-split product with
one all_reduce each way, q, k and v in one product, torch's fused attention. Data parallel with all
gradients, and the loss, in one flat buffer, or with an all_reduce of each gradient as soon as it is
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.training_cases import ADAMW, BETAS, SGD_LR, Case

Tensors = dict[str, torch.Tensor]


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


def mlp_loss(params: list[torch.Tensor], inputs: Tensors, case: Case) -> torch.Tensor:
    """The mean squared error over the samples of this device."""
    w, v = params
    y = summed(torch.relu_(inputs["x"] @ w) @ v, case.parallel)
    return F.mse_loss(y, inputs["target"])


def transformer_params(given: Tensors) -> list[torch.Tensor]:
    """Matrices, layer by layer: q, k, v in one, out, up, down; the table last."""
    found = []
    for layer in range(given["attention.wq"].shape[0]):
        qkv = [given[f"attention.w{n}"][layer].flatten(1) for n in "qkv"]
        found.append(torch.cat(qkv, 1))
        found.append(given["attention.wo"][layer].flatten(0, 1).clone())
        found += [given[f"mlp.w{n}"][layer].clone() for n in (1, 2)]
    return [*found, given["embed"]]


def transformer_loss(params: list[torch.Tensor], inputs: Tensors, case: Case) -> torch.Tensor:
    """The mean cross-entropy over the tokens of this device."""
    *layers, embed = params
    model, key = case.sizes["model"], case.sizes["key"]
    x = F.embedding(inputs["tokens"], embed)
    for start in range(0, len(layers), 4):
        wqkv, wo, w1, w2 = layers[start : start + 4]
        z = shared(F.rms_norm(x, (model,), eps=1e-6), case.parallel)
        heads = (z @ wqkv).view(*z.shape[:2], 3, -1, key)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + summed(o.transpose(1, 2).flatten(2) @ wo, case.parallel)
        z = shared(F.rms_norm(x, (model,), eps=1e-6), case.parallel)
        x = x + summed(F.gelu(z @ w1) @ w2, case.parallel)
    logits = F.rms_norm(x, (model,), eps=1e-6) @ embed.mT
    return F.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten().long())


# --- a step --------------------------------------------------------------------------------------


class ByHand:
    """The training step; call it. `sync` is what data parallel does: `flat` or `each`."""

    def __init__(self, case: Case, given: Tensors, inputs: Tensors, sync: str = "") -> None:
        self.case, self.inputs = case, inputs
        make, self.loss = {
            "mlp": (mlp_params, mlp_loss),
            "transformer": (transformer_params, transformer_loss),
        }[case.family]
        self.params = [p.requires_grad_() for p in make(given)]
        self.update = updater(case, self.params)
        self.step = {"": self.alone, "flat": self.flat, "each": self.each}[sync]
        if sync == "flat":
            self.buffer = torch.zeros(1 + sum(p.numel() for p in self.params))
            sizes = [p.numel() for p in self.params]
            parts = zip(torch.split(self.buffer[1:], sizes), self.params, strict=True)
            self.grads = [part.view_as(p) for part, p in parts]
        if sync == "each":
            self.works: list[Any] = []
            for p in self.params:
                p.register_post_accumulate_grad_hook(self.send)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.Tensor:
        """One step; the loss over all samples."""
        return self.step()

    def alone(self) -> torch.Tensor:
        """Nothing to tell one another, or all of it inside the model."""
        loss = self.loss(self.params, self.inputs, self.case)
        self.update(list(torch.autograd.grad(loss, self.params)))
        return loss.detach()

    def flat(self) -> torch.Tensor:
        """One all_reduce of a buffer that holds the loss and all gradients."""
        loss = self.loss(self.params, self.inputs, self.case) / self.case.devices
        found = torch.autograd.grad(loss, self.params)
        torch._foreach_copy_([self.buffer[:1], *self.grads], [loss.detach(), *found])
        dist.all_reduce(self.buffer)
        self.update(self.grads)
        return self.buffer[0]

    def each(self) -> torch.Tensor:
        """An all_reduce of each gradient, begun while the others are still computed."""
        loss = self.loss(self.params, self.inputs, self.case) / self.case.devices
        total = loss.detach().clone()
        self.works = [dist.all_reduce(total, async_op=True)]
        loss.backward()  # type: ignore[no-untyped-call]
        for work in self.works:
            work.wait()
        self.update([p.grad for p in self.params if p.grad is not None])
        for p in self.params:
            p.grad = None
        return total

    def send(self, p: torch.Tensor) -> None:
        """Begin the all_reduce of a gradient that is complete."""
        self.works.append(dist.all_reduce(p.grad, async_op=True))


def updater(case: Case, params: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    """What changes the parameters in place, given the gradients."""
    if case.optimizer == "sgd":

        def descend(grads: list[torch.Tensor]) -> None:
            with torch.no_grad():
                torch._foreach_add_(params, grads, alpha=-SGD_LR)

        return descend
    optimizer = torch.optim.AdamW(params, fused=True, betas=BETAS, **ADAMW)

    def step(grads: list[torch.Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    return step
