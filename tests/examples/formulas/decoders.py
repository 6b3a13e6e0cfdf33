"""GPT-2, Llama, Mixtral and Gemma 2, on the state dicts of their publishers' code."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from tests.examples.formulas.published import (
    LAYERS,
    MODEL,
    SEQ,
    USUAL,
    VOCAB,
    Inputs,
    Published,
    Shapes,
    State,
    attended,
    causal,
    per_layer,
    split,
)

EXPERTS = 4


def gpt2(state: State, given: Inputs) -> torch.Tensor:
    """GPT-2's logits: weights are stored as `Conv1D` has them, inputs before outputs."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.layer_norm(x, name, 1e-5)

    ids = given["tokens"]
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(LAYERS):
        h = f"transformer.h.{layer}"
        q, k, v = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(MODEL, dim=-1)
        o = attended(split(q), split(k), split(v), causal(ids.shape[1]))
        x = x + linear(o, f"{h}.attn.c_proj")
        up = functional.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + linear(up, f"{h}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T


def _gpt2_shapes() -> Shapes:
    layer: Shapes = {}
    for name, sizes in {
        "ln_1": [MODEL], "ln_2": [MODEL], "attn.c_attn": [MODEL, 48],
        "attn.c_proj": [MODEL, MODEL], "mlp.c_fc": [MODEL, 64], "mlp.c_proj": [64, MODEL],
    }.items():  # fmt: skip
        layer |= {f"{name}.weight": sizes, f"{name}.bias": sizes[-1:]}
    ends = {"wte.weight": [VOCAB, MODEL], "wpe.weight": [9, MODEL]}
    ends |= {"ln_f.weight": [MODEL], "ln_f.bias": [MODEL]}
    return {f"transformer.{name}": s for name, s in (per_layer("h.{}.", layer) | ends).items()}


def rotated(x: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE (Su et al. 2021) of [..., positions, key] by halves."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[-2]).double(), frequency).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    turn = torch.cat((-second, first), dim=-1)
    return (x * angle.cos() + turn * angle.sin()).to(x.dtype)


def gated(
    state: State,
    layer: str,
    x: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
) -> torch.Tensor:
    gate, up = (state.linear(x, f"{layer}.mlp.{n}_proj") for n in ("gate", "up"))
    return state.linear(activation(gate) * up, f"{layer}.mlp.down_proj")


def llama(
    state: State,
    given: Inputs,
    base: float = 500000.0,
    mlp: Callable[[State, str, torch.Tensor], torch.Tensor] = gated,
) -> torch.Tensor:
    """Llama's logits: weights are stored as `Linear` has them, outputs before inputs."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.rms_norm(x, name, 1e-5)

    x = state["model.embed_tokens.weight"][given["tokens"]]
    for layer in range(LAYERS):
        h = f"model.layers.{layer}"
        y = norm(x, f"{h}.input_layernorm")
        q, k, v = (state.heads(y, f"{h}.self_attn.{n}_proj") for n in "qkv")
        o = attended(rotated(q, base), rotated(k, base), v, causal(q.shape[-2]))
        x = x + state.linear(o, f"{h}.self_attn.o_proj")
        x = x + mlp(state, h, norm(x, f"{h}.post_attention_layernorm"))
    return norm(x, "model.norm") @ state["lm_head.weight"].T


def _llama_shapes(mlp: Shapes, norms: tuple[str, ...], *head: str) -> Shapes:
    layer = {
        "self_attn.q_proj": [16, MODEL], "self_attn.k_proj": [8, MODEL],
        "self_attn.v_proj": [8, MODEL], "self_attn.o_proj": [MODEL, 16],
    }  # fmt: skip
    layer |= {name: [MODEL] for name in norms} | mlp
    shapes = per_layer("model.layers.{}.", {f"{name}.weight": s for name, s in layer.items()})
    shapes |= {"model.embed_tokens.weight": [VOCAB, MODEL], "model.norm.weight": [MODEL]}
    return shapes | {key: [VOCAB, MODEL] for key in head}


def mixtral(state: State, given: Inputs) -> torch.Tensor:
    """Mixtral's logits: each token is the sum of two experts, by shares that are 1 together."""

    def moe(state: State, layer: str, x: torch.Tensor) -> torch.Tensor:
        h = f"{layer}.block_sparse_moe"
        shares = functional.softmax(state.linear(x, f"{h}.gate"), dim=-1)
        shares, which = shares.topk(2, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, down, up = (state[f"{h}.experts.{expert}.w{n}.weight"].T for n in (1, 2, 3))
            share = (shares * (which == expert)).sum(dim=-1, keepdim=True)
            y = y + share * ((functional.silu(x @ gate) * (x @ up)) @ down)
        return y

    return llama(state, given, 1000000.0, moe)


def _mixtral_mlp() -> Shapes:
    sizes = {"w1": [12, MODEL], "w2": [MODEL, 12], "w3": [12, MODEL]}
    names = {f"experts.{n}.{w}": shape for n in range(EXPERTS) for w, shape in sizes.items()}
    names["gate"] = [EXPERTS, MODEL]
    return {f"block_sparse_moe.{name}": shape for name, shape in names.items()}


WINDOW, SCALAR = 3, 5


def gemma2(state: State, given: Inputs) -> torch.Tensor:
    """Gemma 2's logits: scales are stored less 1, and stand behind each half of a layer as well."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return state.rms_norm(x, name, 1e-6, above=1.0)

    def mlp(x: torch.Tensor, layer: str) -> torch.Tensor:
        return gated(state, layer, x, lambda y: functional.gelu(y, approximate="tanh"))

    embed = state["model.embed_tokens.weight"]
    x = embed[given["tokens"]] * math.sqrt(MODEL)
    for layer in range(LAYERS):
        h = f"model.layers.{layer}"
        seen = causal(SEQ) if layer % 2 else causal(SEQ).triu(1 - WINDOW)
        y = norm(x, f"{h}.input_layernorm")
        q, k, v = (state.heads(y, f"{h}.self_attn.{n}_proj") for n in "qkv")
        q, k = rotated(q, 10000.0), rotated(k, 10000.0)
        o = attended(q, k, v, seen, SCALAR**-0.5, cap=50.0)
        o = state.linear(o, f"{h}.self_attn.o_proj")
        x = x + norm(o, f"{h}.post_attention_layernorm")
        y = mlp(norm(x, f"{h}.pre_feedforward_layernorm"), h)
        x = x + norm(y, f"{h}.post_feedforward_layernorm")
    return 30.0 * torch.tanh(norm(x, "model.norm") @ embed.T / 30.0)


_SIZES = {"kv": 2, "group": 2, "half": 2, "hidden": 12}
_MLP = {"mlp.gate_proj": [12, MODEL], "mlp.up_proj": [12, MODEL], "mlp.down_proj": [MODEL, 12]}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_MORE_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

DECODERS = {
    "gpt2": Published(
        gpt2, _gpt2_shapes(), {"context": 9, "heads": 4, "key": 4}, 3e-7, "megatron",
        prefix="transformer.",
    ),
    "llama": Published(
        llama, _llama_shapes(_MLP, _NORMS, "lm_head.weight"), _SIZES, 1.5e-7, "zero3"
    ),
    "mixtral": Published(
        mixtral, _llama_shapes(_mixtral_mlp(), _NORMS, "lm_head.weight"),
        {**_SIZES, "experts": EXPERTS}, 1.5e-7, "expert_parallel",
        layouts=(*USUAL, "expert_parallel"),
    ),
    "gemma2": Published(
        gemma2, _llama_shapes(_MLP, _NORMS + _MORE_NORMS),
        {**_SIZES, "window": WINDOW, "scalar": SCALAR}, 1.5e-7, "pipeline",
    ),
}  # fmt: skip
