"""The training steps that `benchmarks/training.py` times: programs, sizes, and their first values.

Every variant begins with the same parameters and inputs: those that the emitted program makes up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshdsl.backends.runtime.values import Array, Spec, draw_part, local_part
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.optimizers import LearningRate
from meshdsl.pipeline import Options, compile_source

OPTIMIZERS = {
    "sgd": "sgd(lr=0.1)",
    "adamw": "adamw(lr=cosine(3e-3, 1000, warmup=50, final=1e-4), clip=1.0)",
}
SGD_LR = 0.1
RATE = LearningRate("cosine", 3e-3, 1000, 50, 1e-4)
BETAS = (0.9, 0.999)
ADAMW: dict[str, Any] = {"eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
KEY = 32

MLP = """
dim batch = 512, io = 64, hidden = 64
program mlp(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, io])
  loss = mean((y - target)^2)
  return loss
  minimize loss with sgd
}"""
LM = (Path(__file__).parent.parent / "examples" / "lm.mdsl").read_text(encoding="utf-8")
TEXTS = {"mlp": MLP, "lm": LM}
LAYOUTS = {
    ("mlp", "tensor"): "hidden:device",
    ("lm", "tensor"): "heads:device,hidden:device",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One training step, at `sizes` of its program.

    `parallel` is `one` (device), `data` or `tensor`, the latter on two. `compiled` adds the
    emitted program as `torch.compile` makes it faster.
    """

    family: str
    parallel: str
    optimizer: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False

    @property
    def name(self) -> str:
        """What stands in the table."""
        width = self.sizes.get("hidden" if self.family == "mlp" else "model", "")
        long = f" seq {self.sizes['seq']}" if "seq" in self.sizes else ""
        size = f" {width}" if self.sizes else ".mdsl"
        return f"{self.family}{size}{long} {self.parallel} {self.optimizer}"

    @property
    def devices(self) -> int:
        """How many take part."""
        return 1 if self.parallel == "one" else 2

    def emitted(self) -> str:
        """The emitted text."""
        text = re.sub(
            "minimize loss with .*",
            f"minimize loss with {OPTIMIZERS[self.optimizer]}",
            TEXTS[self.family],
        )
        layout = LAYOUTS.get((self.family, self.parallel), "batch:device")
        options = Options(layout=layout, mesh=f"device:{self.devices}", set_dims=self.sizes)
        return compile_source(Source("training.mdsl", text), options, Diagnostics()).text


def cases(quick: bool) -> list[Case]:
    """The steps that were promised to be as fast as those of JAX; unless `quick`, others too."""
    pair = ("tensor", "data")
    eight = [Case("mlp", p, "sgd", mlp_sizes(width)) for width in (64, 256) for p in pair]
    eight += [Case("lm", p, "sgd", lm_sizes(width)) for width in (128, 256) for p in pair]
    if quick:
        return eight
    return [
        *eight,
        *[Case("mlp", p, "adamw", mlp_sizes(256)) for p in pair],
        *[Case("lm", p, "adamw", lm_sizes(128)) for p in pair],
        *[Case("lm", p, "sgd", {**lm_sizes(128), "seq": 512}) for p in pair],
        *[Case("mlp", p, "sgd", mlp_sizes(2048)) for p in pair],
        Case("lm", "one", "adamw"),
        Case("mlp", "one", "sgd", mlp_sizes(256)),
    ]


def mlp_sizes(width: int) -> dict[str, int]:
    """512 samples, all layers of one width."""
    return {"io": width, "hidden": width}


def lm_sizes(model: int) -> dict[str, int]:
    """Two layers with heads of 32, 8 × 64 tokens."""
    shape = {"batch": 8, "layers": 2}
    return {**shape, "model": model, "heads": model // 32, "hidden": 4 * model}


def first_values(specs: Mapping[str, Spec], mesh: dict[str, int], rank: int) -> dict[str, Array]:
    """What device `rank` of `mesh` begins with, as the emitted program makes it up."""
    return {
        name: draw_part(spec, name, 0, local_part(spec, mesh, rank)) for name, spec in specs.items()
    }
