"""A published model as its test has it: formulas in torch, tensors by name, tiny sizes, inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional

Shapes = dict[str, list[int]]
Inputs = dict[str, torch.Tensor]

USUAL = ("data_parallel", "zero3", "megatron", "pipeline")
"""The layouts that most of the models declare."""

BATCH, SEQ, VOCAB, LAYERS, MODEL, HEADS, KEY = 8, 6, 24, 4, 16, 4, 4


class State(dict[str, torch.Tensor]):
    """A state dict, and layers that are named as their tensors begin."""

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """`Linear`, whose weight is stored outputs before inputs; with a bias if there is one."""
        return functional.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def layer_norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        scale, shift = self[f"{name}.weight"], self[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], scale, shift, eps)

    def rms_norm(self, x: torch.Tensor, name: str, eps: float, above: float = 0.0) -> torch.Tensor:
        """The scale is the weight and `above`."""
        scale = self[f"{name}.weight"] + above
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * scale

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A projection as [batch, heads, positions, key]."""
        return split(self.linear(x, name))


def split(x: torch.Tensor, key: int = KEY) -> torch.Tensor:
    """[batch, positions, heads * key] as [batch, heads, positions, key]."""
    parts: torch.Tensor = x.unflatten(-1, (-1, key))
    return parts.transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    """The reverse of `split`."""
    return x.transpose(1, 2).flatten(-2)


def with_biases(sizes: Mapping[str, list[int]]) -> Shapes:
    """A weight of these sizes and a bias of the first for each name."""
    weights = {f"{name}.weight": shape for name, shape in sizes.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in sizes.items()}


def per_layer(prefix: str, names: Mapping[str, list[int]]) -> Shapes:
    """The tensors of every layer; the prefix has its number for `{}`."""
    return {prefix.format(n) + name: s for n in range(LAYERS) for name, s in names.items()}


def drawn_ids(*sizes: int, most: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, most, sizes).astype(np.int32))


def _tokens() -> Inputs:
    ids = drawn_ids(BATCH, SEQ)
    return {"tokens": ids, "targets": ids.flip(1)}


def mean_loss(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    """The mean cross-entropy of all targets."""
    return functional.cross_entropy(logits.movedim(-1, 1), given["targets"])


@dataclass
class Published:
    """A model: its logits, tensors and loss, sizes and inputs of the test.

    `rate` is that of the first step; `trained` is the layout of the test that trains. Base models
    are published without the `prefix` of their keys. `still` are tensors without a gradient.
    """

    logits: Callable[[State, Inputs], torch.Tensor]
    shapes: Shapes
    sizes: dict[str, int]
    rate: float
    trained: str
    inputs: Inputs = field(default_factory=_tokens)
    loss: Callable[[torch.Tensor, Inputs], torch.Tensor] = mean_loss
    prefix: str = ""
    still: tuple[str, ...] = ()
    layouts: tuple[str, ...] = USUAL

    def drawn(self, dtype: torch.dtype) -> State:
        """Random tensors; vectors of MODEL numbers, scales among them, are about 1."""
        draw = np.random.default_rng(1)
        return State(
            (n, torch.from_numpy(0.4 * draw.standard_normal(s) + (s == [MODEL])).to(dtype))
            for n, s in self.shapes.items()
        )


def causal(length: int) -> torch.Tensor:
    """[query, key]: what stands no later."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    scale: float | None = None,
    bias: torch.Tensor | float = 0.0,
    cap: float = math.inf,
) -> torch.Tensor:
    """softmax(scale * q·k, soft-capped, + bias)·v, of more queries than keys in groups."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap < math.inf:
        s = cap * torch.tanh(s / cap)
    s = s + bias
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    return joined(torch.softmax(s, dim=-1) @ v)
