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
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.optimizers import LearningRate
from meshdsl.pipeline import Compilation, Options, compile_source

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
EXAMPLES = Path(__file__).parent.parent / "examples"
TEXTS = {
    "mlp": MLP,
    **{n: (EXAMPLES / f"{n}.mdsl").read_text(encoding="utf-8") for n in ("lm", "moe", "resnet")},
    "nmt": (EXAMPLES / "nmt.mdsl").read_text(encoding="utf-8"),
}
"""By family; a program is called as its family is."""
LAYOUTS = {
    ("mlp", "tensor"): "hidden:device",
    ("lm", "tensor"): "heads:device,hidden:device",
    ("moe", "one"): "group:device",
}
WIDTHS = {"mlp": "hidden", "lm": "model", "moe": "model", "resnet": "h", "nmt": "hidden"}
"""The dim whose size stands in the name of a case."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training step, at `sizes` of its program.

    `parallel` is `one` (device), `data` or `tensor`, the latter on two. `compiled` adds the
    emitted program as `torch.compile` makes it faster. `at_once`: the local engine lets devices
    take no turns.
    """

    family: str
    parallel: str
    optimizer: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    compiled: bool = False
    at_once: bool = False

    @property
    def name(self) -> str:
        """What stands in the table."""
        width = self.sizes.get(WIDTHS[self.family], "")
        long = f" seq {self.sizes['seq']}" if "seq" in self.sizes else ""
        size = f" {width}" if self.sizes else ".mdsl"
        return f"{self.family}{size}{long} {self.parallel} {self.optimizer}"

    @property
    def devices(self) -> int:
        """How many take part."""
        return 1 if self.parallel == "one" else 2

    def compilation(self) -> Compilation:
        """The step, compiled."""
        text = re.sub(
            "minimize loss with .*",
            f"minimize loss with {OPTIMIZERS[self.optimizer]}",
            TEXTS[self.family],
        )
        layout = LAYOUTS.get((self.family, self.parallel), "batch:device")
        options = Options(
            program=self.family,
            layout=layout,
            mesh=f"device:{self.devices}",
            set_dims=self.sizes,
        )
        return compile_source(Source("training.mdsl", text), options, Diagnostics())

    def emitted(self) -> ProgramText:
        """The emitted text, with its statements."""
        return self.compilation().emitted


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
        *networks(),
    ]


def networks() -> list[Case]:
    """A mixture of experts, convolutions with batch norms, and LSTMs, on one device."""
    moe = {"group": 8, "token": 64, "model": 128, "hidden": 256, "slot": 16, "experts": 8}
    resnet = {"h": 32, "w": 32, "h2": 16, "w2": 16, "batch": 64}
    nmt = {"source": 20, "target": 20, "model": 128, "hidden": 256}
    return [
        Case("moe", "one", "adamw", {**moe, "inner": 512}),
        Case("resnet", "one", "adamw", resnet),
        Case("nmt", "one", "adamw", nmt),
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
