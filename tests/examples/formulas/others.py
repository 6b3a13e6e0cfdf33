"""Mamba-2 and DLRM, on the state dicts of their publishers' code."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from tests.examples.formulas.published import (
    BATCH,
    LAYERS,
    MODEL,
    USUAL,
    VOCAB,
    Inputs,
    Published,
    Shapes,
    State,
    drawn_ids,
    per_layer,
    with_biases,
)

GROUPS, HEADS, PART, MEMORY, TAPS = 2, 2, 3, 3, 4
INNER, SHARED = GROUPS * HEADS * PART, GROUPS * MEMORY


def mamba2(state: State, given: Inputs) -> torch.Tensor:
    """Mamba-2's logits: one step after another, where the model has chunks."""

    def mixer(y: torch.Tensor, h: str) -> torch.Tensor:
        widths = [INNER, INNER + 2 * SHARED, GROUPS * HEADS]
        gate, wide, dt = state.linear(y, f"{h}.in_proj").split(widths, dim=-1)
        kernel, shift = state[f"{h}.conv1d.weight"], state[f"{h}.conv1d.bias"]
        padded = functional.pad(wide.mT, (TAPS - 1, 0))
        wide = functional.silu(functional.conv1d(padded, kernel, shift, groups=len(shift)).mT)
        x, b, c = wide.split([INNER, SHARED, SHARED], dim=-1)
        x = x.unflatten(-1, (-1, PART))
        b, c = (t.unflatten(-1, (GROUPS, MEMORY)).repeat_interleave(HEADS, dim=-2) for t in (b, c))
        dt = functional.softplus(dt + state[f"{h}.dt_bias"])
        decay = torch.exp(-torch.exp(state[f"{h}.A_log"]) * dt)
        memory, outputs = torch.zeros(()), []
        for t in range(y.shape[1]):
            added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
            memory = decay[:, t, :, None, None] * memory + added
            outputs.append(torch.einsum("bhpn,bhn->bhp", memory, c[:, t]))
        o = torch.stack(outputs, dim=1) + state[f"{h}.D"][:, None] * x
        gated = o.flatten(-2) * functional.silu(gate)
        return state.linear(state.rms_norm(gated, f"{h}.norm", 1e-5), f"{h}.out_proj")

    x = state["backbone.embeddings.weight"][given["tokens"]]
    for layer in range(LAYERS):
        h = f"backbone.layers.{layer}"
        x = x + mixer(state.rms_norm(x, f"{h}.norm", 1e-5), f"{h}.mixer")
    return state.rms_norm(x, "backbone.norm_f", 1e-5) @ state["lm_head.weight"].T


def _mamba2_shapes() -> Shapes:
    heads, wide = GROUPS * HEADS, INNER + 2 * SHARED
    mixer = {
        "in_proj.weight": [INNER + wide + heads, MODEL], "conv1d.weight": [wide, 1, TAPS],
        "conv1d.bias": [wide], "dt_bias": [heads], "A_log": [heads], "D": [heads],
        "norm.weight": [INNER], "out_proj.weight": [MODEL, INNER],
    }  # fmt: skip
    layer = {"norm.weight": [MODEL], **{f"mixer.{n}": s for n, s in mixer.items()}}
    ends = {"embeddings.weight": [VOCAB, MODEL], "norm_f.weight": [MODEL]}
    shapes = {f"backbone.{n}": s for n, s in (per_layer("layers.{}.", layer) | ends).items()}
    return shapes | {"lm_head.weight": [VOCAB, MODEL]}


TABLES, ROWS, DENSE = 4, 6, 5


def dlrm(state: State, given: Inputs) -> torch.Tensor:
    """DLRM's logits: the features are the dense ones and the tables', each pair once."""
    x = given["numbers"].to(state["bot_l.0.weight"].dtype)
    for n in (0, 2, 4):
        x = torch.relu(state.linear(x, f"bot_l.{n}"))
    found = [state[f"emb_l.{n}.weight"][given["ids"][:, n]] for n in range(TABLES)]
    features = [x, *found]
    pairs = [(a * b).sum(dim=-1) for n, a in enumerate(features) for b in features[:n]]
    x = torch.cat((x, torch.stack(pairs, dim=1)), dim=1)
    for n in (0, 2, 4):
        x = torch.relu(state.linear(x, f"top_l.{n}"))
    return state.linear(x, "top_l.6")[:, 0]


def clicked_loss(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    return functional.binary_cross_entropy(logits.sigmoid(), given["clicked"].to(logits.dtype))


def _dlrm_shapes() -> Shapes:
    pairs = (TABLES + 1) * TABLES // 2
    widths = {"bot_l": [DENSE, 8, 12, MODEL], "top_l": [MODEL + pairs, 8, 12, 4, 1]}
    linear = {
        f"{part}.{2 * n}": [outputs, inputs]
        for part, sizes in widths.items()
        for n, (inputs, outputs) in enumerate(pairwise(sizes))
    }
    return with_biases(linear) | {f"emb_l.{n}.weight": [ROWS, MODEL] for n in range(TABLES)}


def _clicks() -> Inputs:
    draw = np.random.default_rng(0)
    numbers = torch.from_numpy(draw.standard_normal((BATCH, DENSE), np.float32))
    clicked = drawn_ids(BATCH, most=2, seed=3).float()
    return {"numbers": numbers, "ids": drawn_ids(BATCH, TABLES, most=ROWS), "clicked": clicked}


OTHERS = {
    "mamba2": Published(
        mamba2, _mamba2_shapes(),
        {"chunk": 2, "groups": GROUPS, "heads": HEADS, "part": PART, "state": MEMORY},
        1.25e-6, "context", prefix="backbone.", layouts=(*USUAL, "context"),
    ),
    "dlrm": Published(
        dlrm, _dlrm_shapes(),
        {
            "table": TABLES, "rows": ROWS, "dense": DENSE, "bottom1": 8, "bottom2": 12,
            "top1": 8, "top2": 12, "top3": 4,
        },
        1e-3, "rows", _clicks(), clicked_loss,
        layouts=("data_parallel", "zero3", "tables", "rows"),
    ),
}  # fmt: skip
