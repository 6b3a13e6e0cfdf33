"""Training steps with DTensor: `parallelize_module` and `distribute_tensor`, the same layout."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.training_cases import ADAMW, BETAS, CLIP, KEY, RATE, SGD_LR, Case

Tensors = dict[str, torch.Tensor]


class Mlp(nn.Module):
    """Two products with a relu between."""

    def __init__(self, whole: Tensors) -> None:
        super().__init__()
        self.up, self.down = linear(whole["w"]), linear(whole["v"])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean squared error."""
        y = self.down(torch.relu(self.up(x)))
        # Of a mean over split samples DTensor 2.13 makes gradients that are too large.
        return F.mse_loss(y, target, reduction="sum") / target.numel()


class Layer(nn.Module):
    """A layer of the transformer; works on whole and on split weights."""

    def __init__(self, whole: Tensors, layer: int) -> None:
        super().__init__()
        self.g1, self.g2 = (nn.Parameter(whole[g][layer].clone()) for g in ("g1", "g2"))
        for n in "qkv":
            setattr(self, n, linear(whole[f"project.w{n}"][layer].flatten(1)))
        self.out = linear(whole["joined.wo"][layer].flatten(0, 1))
        self.up, self.down = linear(whole["mlp.w1"][layer]), linear(whole["mlp.w2"][layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each after a norm and beside a skip."""
        z = F.rms_norm(x, x.shape[-1:], self.g1, eps=1e-6)
        q, k, v = (f(z).unflatten(-1, (-1, KEY)).transpose(1, 2) for f in self.products())
        o = attention(q, k, v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        z = F.rms_norm(x, x.shape[-1:], self.g2, eps=1e-6)
        y: torch.Tensor = x + self.down(F.gelu(self.up(z)))
        return y

    def products(self) -> list[Any]:
        """What makes q, k and v."""
        return [self.q, self.k, self.v]


class LanguageModel(nn.Module):
    """The decoder."""

    def __init__(self, whole: Tensors) -> None:
        super().__init__()
        self.embed = nn.Parameter(whole["embed"].clone())
        self.position = nn.Parameter(whole["position"].clone())
        self.layers = nn.ModuleList(Layer(whole, layer) for layer in range(len(whole["g1"])))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        x = F.embedding(tokens, self.embed) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = F.rms_norm(x, x.shape[-1:], eps=1e-6) @ self.embed.mT
        labels = targets.flatten().long()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / labels.numel()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's fused kernel, which DTensor does not know on a CPU: every device on its samples."""
    if not isinstance(q, DTensor):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (q, k, v)]
    o = F.scaled_dot_product_attention(local[0], local[1], local[2], is_causal=True)
    return DTensor.from_local(o, q.device_mesh, q.placements, run_check=False)


def linear(weight: torch.Tensor) -> nn.Linear:
    """`x @ weight` as a module, whose own weight is stored the other way round."""
    made = nn.Linear(weight.shape[0], weight.shape[1], bias=False)
    made.weight = nn.Parameter(weight.mT.clone(memory_format=torch.contiguous_format))
    return made


COLUMNS = ("up", "q", "k", "v")
ROWS = ("down", "out")


class WithDTensor:
    """The training step; call it. Takes whole parameters and inputs."""

    def __init__(self, case: Case, whole: Tensors, inputs: Tensors, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        self.model = Mlp(whole) if case.family == "mlp" else LanguageModel(whole)
        if case.parallel == "tensor":
            self.split()
            self.inputs = list(inputs.values())
        else:
            self.copy()
            self.inputs = [distribute_tensor(x, mesh, [Shard(0)]) for x in inputs.values()]
        self.rates = map(RATE.at, itertools.count())
        self.optimizers = [
            optimizer(case, [p for p in self.model.parameters() if isinstance(p, DTensor) == kind])
            for kind in (True, False)  # torch's fast forms refuse a mixture
        ]

    def split(self) -> None:
        """Megatron's layout, in DTensor's own words."""
        model = self.model
        for parent in model.layers if isinstance(model, LanguageModel) else [model]:
            names = [name for name, _ in parent.named_children()]
            plan: dict[str, Any] = {n: ColwiseParallel() for n in names if n in COLUMNS}
            plan |= {n: RowwiseParallel() for n in names if n in ROWS}
            parallelize_module(parent, self.mesh, plan)

    def copy(self) -> None:
        """Every parameter on all devices."""
        for module in self.model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                where: list[Placement] = [Replicate()]
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(p.data, self.mesh, where))
                )

    def __call__(self) -> torch.Tensor:
        """One step; the loss over all samples."""
        loss = self.model(*self.inputs)
        loss.backward()
        for p in self.model.parameters():
            grad = p.grad
            if isinstance(grad, DTensor) and any(isinstance(g, Partial) for g in grad.placements):
                p.grad = grad.redistribute(placements=[Replicate()])
        made = [update for update in self.optimizers if update is not None]
        if self.case.optimizer == "adamw":
            self.clip(made)
        for update in made:
            update.step()
            update.zero_grad()
        found: torch.Tensor = loss.detach()
        return found.full_tensor() if isinstance(found, DTensor) else found

    def clip(self, made: list[torch.optim.Optimizer]) -> None:
        """Clip the gradients, and set the learning rate: split and whole ones do not mix."""
        every = [[p.grad for p in update.param_groups[0]["params"]] for update in made]
        norms = [torch.nn.utils.get_total_norm(grads) for grads in every]
        norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        scale = min(CLIP / (float(torch.stack(norms).norm()) + 1e-6), 1.0)
        lr = next(self.rates)
        for update, grads in zip(made, every, strict=True):
            torch._foreach_mul_(grads, scale)
            update.param_groups[0]["lr"] = lr


def optimizer(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The fastest form that torch has; None where there is nothing to update."""
    if not params:
        return None
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, SGD_LR, foreach=True)
    return torch.optim.AdamW(params, fused=True, betas=BETAS, **ADAMW)
