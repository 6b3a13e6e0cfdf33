"""T5 and Whisper, on the state dict of its publishers' code."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from tests.examples.formulas.published import (
    BATCH,
    KEY,
    LAYERS,
    MODEL,
    SEQ,
    VOCAB,
    Inputs,
    Published,
    Shapes,
    State,
    attended,
    causal,
    drawn_ids,
    per_layer,
    with_biases,
)

SOURCE, BUCKETS, REACH = 11, 8, 6


def bucket(distance: int, both: bool) -> int:
    """T5's bucket of a distance (key less query): half of them exact, the others logarithmic.

    For `both` directions, later keys have the second half of the buckets.
    """
    buckets = BUCKETS // 2 if both else BUCKETS
    first = buckets if both and distance > 0 else 0
    size = abs(distance) if both else max(-distance, 0)
    exact = buckets // 2
    if size < exact:
        return first + size
    shared = exact + int(math.log(size / exact) / math.log(REACH / exact) * exact)
    return first + min(shared, buckets - 1)


def t5(state: State, given: Inputs) -> torch.Tensor:
    """The logits of T5 1.1: scores are not scaled, and the first layer's table is that of all."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.rms_norm(x, f"{name}layer_norm", 1e-6)

    def attend(
        x: torch.Tensor,
        of: torch.Tensor,
        name: str,
        seen: torch.Tensor,
        bias: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        q = state.heads(x, f"{name}.q")
        k, v = (state.heads(of, f"{name}.{n}") for n in "kv")
        return state.linear(attended(q, k, v, seen, 1.0, bias), f"{name}.o")

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (state.linear(x, f"{name}.wi_{n}") for n in (0, 1))
        return state.linear(functional.gelu(gate, approximate="tanh") * up, f"{name}.wo")

    def bias(half: str, length: int, both: bool) -> torch.Tensor:
        name = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rows = [[bucket(k - q, both) for k in range(length)] for q in range(length)]
        return state[name][torch.tensor(rows)].permute(2, 0, 1)

    there = (given["words"] != 0)[:, None, None, :]
    x, near = state["shared.weight"][given["words"]], bias("encoder", SOURCE, both=True)
    for layer in range(LAYERS):
        h = f"encoder.block.{layer}.layer."
        y = norm(x, f"{h}0.")
        x = x + attend(y, y, f"{h}0.SelfAttention", there, near)
        x = x + mlp(norm(x, f"{h}1."), f"{h}1.DenseReluDense")
    read = norm(x, "encoder.final_")

    y, near = state["shared.weight"][given["written"]], bias("decoder", SEQ, both=False)
    for layer in range(LAYERS):
        h = f"decoder.block.{layer}.layer."
        z = norm(y, f"{h}0.")
        y = y + attend(z, z, f"{h}0.SelfAttention", causal(SEQ), near)
        y = y + attend(norm(y, f"{h}1."), read, f"{h}1.EncDecAttention", there)
        y = y + mlp(norm(y, f"{h}2."), f"{h}2.DenseReluDense")
    return norm(y, "decoder.final_") @ state["lm_head.weight"].T


def _t5_shapes() -> Shapes:
    shapes = {"shared.weight": [VOCAB, MODEL], "lm_head.weight": [VOCAB, MODEL]}
    for half, attentions in {
        "encoder": ("SelfAttention",),
        "decoder": ("SelfAttention", "EncDecAttention"),
    }.items():
        layer = {f"{n}.layer_norm.weight": [MODEL] for n in range(len(attentions) + 1)}
        for n, name in enumerate(attentions):
            layer |= {f"{n}.{name}.{part}.weight": [16, MODEL] for part in "qkvo"}
        mlp = f"{len(attentions)}.DenseReluDense"
        layer |= {f"{mlp}.wi_0.weight": [12, MODEL], f"{mlp}.wi_1.weight": [12, MODEL]}
        shapes |= per_layer(half + ".block.{}.layer.", {**layer, f"{mlp}.wo.weight": [MODEL, 12]})
        name = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes |= {name: [BUCKETS, 4], f"{half}.final_layer_norm.weight": [MODEL]}
    return shapes


def _t5_inputs() -> Inputs:
    words, targets = drawn_ids(BATCH, SOURCE), drawn_ids(BATCH, SEQ, seed=5)
    words[:, 0], words[: BATCH // 2, SEQ:] = 1, 0  # half of the texts are shorter
    return {"words": words, "written": targets.roll(1, dims=1), "targets": targets}


def _t5_loss(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    return functional.cross_entropy(logits.mT, given["targets"], ignore_index=0)


def whisper(state: State, given: Inputs) -> torch.Tensor:
    """Whisper's logits: two convolutions stand before the encoder, the second of step 2."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.layer_norm(x, f"{name}layer_norm", 1e-5)

    def attend(
        x: torch.Tensor, of: torch.Tensor, name: str, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, (k, v) = (
            state.heads(x, f"{name}.q_proj"),
            (state.heads(of, f"{name}.{n}_proj") for n in "kv"),
        )
        return state.linear(attended(q, k, v, seen), f"{name}.out_proj")

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.linear(functional.gelu(state.linear(x, f"{name}fc1")), f"{name}fc2")

    def conv(x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        kernel, shift = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.gelu(functional.conv1d(x, kernel, shift, stride, padding=1))

    e, d = "model.encoder.", "model.decoder."
    x = given["sound"].to(state[f"{e}conv1.weight"].dtype)
    x = conv(conv(x, f"{e}conv1", 1), f"{e}conv2", 2).mT + state[f"{e}embed_positions.weight"]
    for layer in range(LAYERS):
        h = f"{e}layers.{layer}."
        y = norm(x, f"{h}self_attn_")
        x = x + attend(y, y, f"{h}self_attn")
        x = x + mlp(norm(x, f"{h}final_"), h)
    heard = norm(x, e)

    embed = state[f"{d}embed_tokens.weight"]
    y = embed[given["written"]] + state[f"{d}embed_positions.weight"][:SEQ]
    for layer in range(LAYERS - 1):
        h = f"{d}layers.{layer}."
        z = norm(y, f"{h}self_attn_")
        y = y + attend(z, z, f"{h}self_attn", causal(SEQ))
        y = y + attend(norm(y, f"{h}encoder_attn_"), heard, f"{h}encoder_attn")
        y = y + mlp(norm(y, f"{h}final_"), h)
    return norm(y, d) @ embed.T


def _whisper_shapes() -> Shapes:
    shapes = with_biases(
        {"encoder.conv1": [MODEL, 5, 3], "encoder.conv2": [MODEL, MODEL, 3]}
        | {"encoder.layer_norm": [MODEL], "decoder.layer_norm": [MODEL]}
    )
    for half, layers, attentions in (
        ("encoder", LAYERS, ("self_attn",)),
        ("decoder", LAYERS - 1, ("self_attn", "encoder_attn")),
    ):
        layer = {"fc1": [64, MODEL], "fc2": [MODEL, 64], "final_layer_norm": [MODEL]}
        for name in attentions:
            layer |= {f"{name}.{part}_proj": [MODEL, MODEL] for part in ("q", "k", "v", "out")}
            layer[f"{name}_layer_norm"] = [MODEL]
        tensors = with_biases(layer)
        tensors = {n: s for n, s in tensors.items() if not n.endswith("k_proj.bias")}
        for n in range(layers):
            shapes |= {f"{half}.layers.{n}.{name}": s for name, s in tensors.items()}
    shapes |= {"encoder.embed_positions.weight": [5, MODEL]}
    shapes |= {"decoder.embed_positions.weight": [9, MODEL]}
    shapes |= {"decoder.embed_tokens.weight": [VOCAB, MODEL]}
    return {f"model.{name}": sizes for name, sizes in shapes.items()}


def _whisper_inputs() -> Inputs:
    sound = np.random.default_rng(3).standard_normal((BATCH, 5, 10)).astype(np.float32)
    targets = drawn_ids(BATCH, SEQ)
    written = targets.roll(1, dims=1)
    return {"sound": torch.from_numpy(sound), "written": written, "targets": targets}


_T5 = {"source": SOURCE, "target": SEQ, "heads": 4, "key": KEY, "hidden": 12}
_WHISPER = {"mel": 5, "time": 10, "target": SEQ, "context": 9, "heads": 4, "key": KEY}
_WHISPER["decoders"] = LAYERS - 1
_LAYOUTS = ("data_parallel", "zero3", "megatron", "hybrid", "pipeline")

ENCODER_DECODERS = {
    "t5": Published(
        t5, _t5_shapes(), {**_T5, "buckets": BUCKETS, "reach": REACH}, 1e-7, "megatron",
        _t5_inputs(), _t5_loss, layouts=_LAYOUTS,
    ),
    "whisper": Published(
        whisper, _whisper_shapes(), _WHISPER, 2e-8, "zero3", _whisper_inputs(), prefix="model.",
        still=("model.encoder.embed_positions.weight",), layouts=_LAYOUTS,
    ),
}  # fmt: skip
