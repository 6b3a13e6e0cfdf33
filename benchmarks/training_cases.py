"""The training steps that `benchmarks/training.py` times: programs, sizes, and their first values.

Every variant begins with the same parameters and inputs: those that the emitted program makes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshdsl.backends.runtime.values import Array, Spec, draw_part, local_part
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source

OPTIMIZERS = {"sgd": "sgd(lr=0.1)", "adamw": "adamw(lr=1e-3, weight_decay=0.01)"}
LONG = 512
"""Positions of the long sequences."""
SGD_LR = 0.1
BETAS = (0.9, 0.999)
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}

MLP = """
dim batch = {batch}, io = {hidden}, hidden = {hidden}
mesh pair = {{ device: 2 }}
mesh one = {{ device: 1 }}
layout data {{ batch -> device }}
layout tensor {{ hidden -> device }}
program mlp(x[batch, io], target[batch, io]) {{
  param w[io, hidden]
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, io])
  loss = mean((y - target)^2)
  return loss
  minimize loss with {optimizer}
}}"""

TRANSFORMER = """
dim batch = {batch}, seq = {seq}, mem = seq, model = {model}, heads = {heads}, key = {key}
dim hidden = {hidden}, vocab = {vocab}, layers = {layers}
mesh pair = {{ device: 2 }}
mesh one = {{ device: 1 }}
layout data {{ batch -> device }}
layout tensor {{ heads -> device, hidden -> device }}

def attention(x[batch, seq, model]) -> [batch, seq, model] {{
  param wq[model, heads, key]
  param wk[model, heads, key]
  param wv[model, heads, key]
  param wo[heads, key, model]
  q = einsum(x, wq -> [batch, heads, seq, key])
  k = einsum(x, wk -> [batch, heads, seq, key])[seq -> mem]
  v = einsum(x, wv -> [batch, heads, seq, key])[seq -> mem]
  s = einsum(q, k -> [batch, heads, seq, mem]) / sqrt(key)
  s = where(iota[seq] >= iota[mem], s, -1e9)
  o = einsum(softmax[mem](s), v -> [batch, heads, seq, key])
  return einsum(o, wo -> [batch, seq, model])
}}

def mlp(x[batch, seq, model]) -> [batch, seq, model] {{
  param w1[model, hidden]
  param w2[hidden, model]
  return einsum(gelu(einsum(x, w1 -> [batch, seq, hidden])), w2 -> [batch, seq, model])
}}

program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32) {{
  param embed[vocab, model] = normal(0.02)
  x = embed[vocab = tokens]
  repeat layers {{
    x = x + attention(rms_norm[model](x))
    x = x + mlp(rms_norm[model](x))
  }}
  logits = einsum(rms_norm[model](x), embed -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with {optimizer}
}}"""
TEXTS = {"mlp": MLP, "transformer": TRANSFORMER}


@dataclass(frozen=True, slots=True)
class Case:
    """One training step. `parallel` is `one` (device), `data` or `tensor`, the latter on two."""

    family: str
    parallel: str
    optimizer: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What stands in the table."""
        width = self.sizes["hidden" if self.family == "mlp" else "model"]
        long = " long" if self.sizes.get("seq") == LONG else ""
        return f"{self.family} {width:4} {self.parallel:6} {self.optimizer}{long}"

    @property
    def devices(self) -> int:
        """How many take part."""
        return 1 if self.parallel == "one" else 2

    def source(self) -> str:
        """The program text."""
        return TEXTS[self.family].format(optimizer=OPTIMIZERS[self.optimizer], **self.sizes)

    def emitted(self) -> str:
        """The emitted text."""
        diagnostics = Diagnostics()
        mesh = "one" if self.devices == 1 else "pair"
        layout = "data" if self.devices == 1 else self.parallel
        options = Options(layout=layout, mesh=mesh)
        made = compile_source(Source("training.mdsl", self.source()), options, diagnostics)
        return made.text


def cases(quick: bool) -> list[Case]:
    """All of them, or a few for a first look."""
    parallels = ("tensor", "data") if quick else ("tensor", "data", "one")
    widths = (64, 256) if quick else (64, 128, 256, 1024, 2048)
    optimizers = ("sgd",) if quick else ("sgd", "adamw")
    mlps = [
        Case("mlp", parallel, optimizer, {"batch": 512, "hidden": width})
        for parallel in parallels
        for width in widths
        for optimizer in optimizers
    ]
    return (
        mlps
        + [
            Case("transformer", parallel, optimizer, transformer_sizes(model))
            for parallel in parallels
            for model in ((128,) if quick else (128, 256))
            for optimizer in optimizers
        ]
        + [
            Case("transformer", parallel, "sgd", {**transformer_sizes(128), "seq": LONG})
            for parallel in parallels
            if not quick
        ]
    )


def transformer_sizes(model: int) -> dict[str, int]:
    """Two layers with heads of 32, 8 × 64 tokens."""
    shape = {"batch": 8, "seq": 64, "vocab": 256, "layers": 2}
    return {**shape, "model": model, "heads": model // 32, "key": 32, "hidden": 4 * model}


def first_values(specs: Mapping[str, Spec], mesh: dict[str, int], rank: int) -> dict[str, Array]:
    """What device `rank` of `mesh` begins with, as the emitted program makes it up."""
    return {
        name: draw_part(spec, name, 0, local_part(spec, mesh, rank)) for name, spec in specs.items()
    }
