"""The language model of `benchmarks/pipelines.py` as torch modules, one for each stage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

KEY = 32


class Part(nn.Module):
    """A stage: its layers, before them the table, behind them the head."""

    def __init__(self, given: dict[str, torch.Tensor], stage: int, count: int) -> None:
        super().__init__()
        self.stage, self.last = stage, stage == count - 1
        each = len(given["w1"]) // count
        own = range(stage * each, (stage + 1) * each)
        self.layers = nn.ModuleList(Layer(given, layer) for layer in own)
        self.embed = nn.Parameter(given["embed"].clone()) if stage == 0 else None
        self.head = nn.Parameter(given["head"].clone()) if self.last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the next stage goes on with; of the last one the logits."""
        if self.embed is not None:
            x = F.embedding(x, self.embed)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return x
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) @ self.head


class Layer(nn.Module):
    """Attention and an MLP, with q, k and v in one product and torch's fused attention."""

    def __init__(self, given: dict[str, torch.Tensor], layer: int) -> None:
        super().__init__()
        qkv = [given[f"w{n}"][layer].flatten(1) for n in "qkv"]
        self.wqkv = nn.Parameter(torch.cat(qkv, 1))
        self.wo = nn.Parameter(given["wo"][layer].flatten(0, 1).clone())
        self.g1, self.g2, self.w1, self.w2 = (
            nn.Parameter(given[name][layer].clone()) for name in ("g1", "g2", "w1", "w2")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer."""
        z = F.rms_norm(x, self.g1.shape, self.g1, eps=1e-6)
        heads = (z @ self.wqkv).view(*z.shape[:2], 3, -1, KEY)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + o.transpose(1, 2).flatten(2) @ self.wo
        z = F.rms_norm(x, self.g2.shape, self.g2, eps=1e-6)
        return x + F.gelu(z @ self.w1) @ self.w2
