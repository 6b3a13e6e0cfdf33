"""BERT and ViT, on the state dict of its publishers' code."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from tests.examples.formulas.published import (
    BATCH,
    LAYERS,
    MODEL,
    SEQ,
    VOCAB,
    Inputs,
    Published,
    Shapes,
    State,
    attended,
    drawn_ids,
    per_layer,
    with_biases,
)


def bert(state: State, given: Inputs) -> torch.Tensor:
    """BERT's logits of every word: norms stand behind the sums, and padding is not read."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.layer_norm(x, name, 1e-12)

    e = "bert.embeddings"
    x = state[f"{e}.word_embeddings.weight"][given["tokens"]]
    x = x + state[f"{e}.position_embeddings.weight"][:SEQ]
    x = norm(x + state[f"{e}.token_type_embeddings.weight"][given["segment_ids"]], f"{e}.LayerNorm")
    for layer in range(LAYERS):
        h = f"bert.encoder.layer.{layer}"
        q, k, v = (state.heads(x, f"{h}.attention.self.{n}") for n in ("query", "key", "value"))
        o = attended(q, k, v, given["present"][:, None, None, :] > 0)
        o = state.linear(o, f"{h}.attention.output.dense")
        x = norm(x + o, f"{h}.attention.output.LayerNorm")
        up = functional.gelu(state.linear(x, f"{h}.intermediate.dense"))
        x = norm(x + state.linear(up, f"{h}.output.dense"), f"{h}.output.LayerNorm")
    c = "cls.predictions"
    y = functional.gelu(state.linear(x, f"{c}.transform.dense"))
    y = norm(y, f"{c}.transform.LayerNorm")
    return y @ state[f"{e}.word_embeddings.weight"].T + state[f"{c}.bias"]


def _bert_shapes() -> Shapes:
    names = {f"attention.self.{n}": [MODEL, MODEL] for n in ("query", "key", "value")}
    names |= {"attention.output.dense": [MODEL, MODEL], "attention.output.LayerNorm": [MODEL]}
    names |= {"intermediate.dense": [64, MODEL], "output.dense": [MODEL, 64]}
    names["output.LayerNorm"] = [MODEL]
    names = per_layer("bert.encoder.layer.{}.", names)
    names["bert.embeddings.LayerNorm"] = [MODEL]
    names["cls.predictions.transform.dense"] = [MODEL, MODEL]
    names["cls.predictions.transform.LayerNorm"] = [MODEL]
    shapes = with_biases(names)
    for name, size in {"word": VOCAB, "position": 9, "token_type": 2}.items():
        shapes[f"bert.embeddings.{name}_embeddings.weight"] = [size, MODEL]
    return {**shapes, "cls.predictions.bias": [VOCAB]}


def _bert_inputs() -> Inputs:
    ids, length = drawn_ids(BATCH, SEQ), drawn_ids(BATCH, 1, most=SEQ - 2, seed=2) + 3
    return {
        "tokens": ids,
        "targets": ids.flip(1),
        "segment_ids": (torch.arange(SEQ) * 2 // SEQ).int().repeat(BATCH, 1),
        "present": (torch.arange(SEQ) < length).int(),
        "scored": (torch.arange(SEQ) % 2).float().repeat(BATCH, 1),
    }


def _scored_loss(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    losses = functional.cross_entropy(logits.mT, given["targets"], reduction="none")
    return (losses * given["scored"]).sum() / given["scored"].sum()


def vit(state: State, given: Inputs) -> torch.Tensor:
    """ViT's logits: the class token stands before the patches, which are a convolution."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.layer_norm(x, name, 1e-12)

    e = "vit.embeddings"
    kernel, shift = (state[f"{e}.patch_embeddings.projection.{n}"] for n in ("weight", "bias"))
    images = given["images"].to(kernel.dtype)
    patches = functional.conv2d(images, kernel, shift, stride=kernel.shape[-2:])
    token = state[f"{e}.cls_token"].expand(len(images), 1, MODEL)
    x = torch.cat((token, patches.flatten(2).mT), dim=1) + state[f"{e}.position_embeddings"]
    for layer in range(LAYERS):
        h = f"vit.encoder.layer.{layer}"
        a, y = f"{h}.attention", norm(x, f"{h}.layernorm_before")
        q, k, v = (state.heads(y, f"{a}.attention.{n}") for n in ("query", "key", "value"))
        x = x + state.linear(attended(q, k, v), f"{a}.output.dense")
        y = norm(x, f"{h}.layernorm_after")
        up = functional.gelu(state.linear(y, f"{h}.intermediate.dense"))
        x = x + state.linear(up, f"{h}.output.dense")
    return state.linear(norm(x[:, 0], "vit.layernorm"), "classifier")


def _vit_shapes() -> Shapes:
    names = {f"attention.attention.{n}": [MODEL, MODEL] for n in ("query", "key", "value")}
    names |= {"attention.output.dense": [MODEL, MODEL], "layernorm_before": [MODEL]}
    names |= {"intermediate.dense": [64, MODEL], "output.dense": [MODEL, 64]}
    names["layernorm_after"] = [MODEL]
    names = per_layer("vit.encoder.layer.{}.", names)
    names |= {"vit.embeddings.patch_embeddings.projection": [MODEL, 3, 2, 4]}
    names |= {"vit.layernorm": [MODEL], "classifier": [5, MODEL]}
    shapes = with_biases(names)
    shapes["vit.embeddings.cls_token"] = [1, 1, MODEL]
    return {**shapes, "vit.embeddings.position_embeddings": [1, 7, MODEL]}


def _vit_inputs() -> Inputs:
    images = np.random.default_rng(3).standard_normal((BATCH, 3, 4, 12)).astype(np.float32)
    return {"images": torch.from_numpy(images), "labels": drawn_ids(BATCH, most=5)}


def _label_loss(logits: torch.Tensor, given: Inputs) -> torch.Tensor:
    return functional.cross_entropy(logits, given["labels"])


_VIT = {
    "height": 4,
    "width": 12,
    "rows": 2,
    "columns": 3,
    "heads": 4,
    "key": 4,
    "classes": 5,
    "seq": 7,
}

ENCODERS = {
    "bert": Published(
        bert, _bert_shapes(), {"context": 9, "heads": 4, "key": 4}, 1e-8, "pipeline",
        _bert_inputs(), _scored_loss, prefix="bert.",
    ),
    "vit": Published(
        vit, _vit_shapes(), _VIT, 3e-7, "zero3", _vit_inputs(), _label_loss, prefix="vit."
    ),
}  # fmt: skip
