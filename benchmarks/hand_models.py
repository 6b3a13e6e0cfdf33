"""Models as an engineer writes them in torch: what the benchmarks compare emitted steps with.

Each is a pair: its parameters as torch modules have them, made of ours by name, and its loss. All
run on one device, a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
EPS = 1e-6
"""Of a norm by the root mean square."""


@dataclass(frozen=True, slots=True)
class HandModel:
    """`params` picks the parameters out of ours, `loss` is their loss for the inputs."""

    params: Callable[[Tensors], list[torch.Tensor]]
    loss: Callable[[list[torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]


# --- a language model like Llama -----------------------------------------------------------------

LLAMA_LAYER = tuple(
    f"layer.{name}"
    for name in (
        *("g1", "attend.wq", "attend.wk", "attend.wv", "attend.wo"),
        *("g2", "mlp.w1", "mlp.w3", "mlp.w2"),
    )
)


def llama_params(given: Tensors) -> list[torch.Tensor]:
    """Layer by layer; q, k and v are one matrix, and so are both that a gated layer begins with."""
    found = []
    for layer in range(len(given[LLAMA_LAYER[0]])):
        g1, wq, wk, wv, wo, g2, w1, w3, w2 = (given[name][layer] for name in LLAMA_LAYER)
        qkv = torch.cat([w.flatten(1) for w in (wq, wk, wv)], 1)
        found += [g1.clone(), qkv, wo.flatten(0, 2).clone()]
        found += [g2.clone(), torch.cat([w1, w3], 1), w2.clone()]
    return [*found, given["embed"], given["loss_of.g"], given["loss_of.head"]]


def rotary(seq: int, key: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosine and sine of the angle of each position and element of a key, in f32."""
    rates = torch.exp(torch.arange(key, device=where).float() * -0.1)
    angle = torch.arange(seq, device=where).float()[:, None] * rates
    return angle.cos(), angle.sin()


def llama_loss(params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy over the tokens. A key has 128 elements, and two heads share it."""
    *layers, embed, gain, head = params
    key, group, width = 128, 2, embed.shape[1:]
    x = F.embedding(inputs["tokens"], embed)
    batch, seq = x.shape[:2]
    cos, sin = rotary(seq, key, x.device)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * cos + wide.roll(64, -1) * sin).to(x.dtype)

    for start in range(0, len(layers), 6):
        g1, wqkv, wo, g2, w13, w2 = layers[start : start + 6]
        z = F.rms_norm(x, width, g1, eps=EPS) @ wqkv
        kv = z.shape[-1] // (key * (group + 2))
        parts = torch.split(z, [kv * group * key, kv * key, kv * key], -1)
        q, k, v = (p.view(batch, seq, -1, key).transpose(1, 2) for p in parts)
        o = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + o.transpose(1, 2).flatten(2) @ wo
        gate, up = (F.rms_norm(x, width, g2, eps=EPS) @ w13).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w2
    logits = F.rms_norm(x, width, gain, eps=EPS) @ head
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs["targets"].flatten().long())


# --- a mixture of experts ------------------------------------------------------------------------

MOE_LAYER = ("dense.w1", "dense.w2", "wg", "expert.wi", "expert.wo")


def moe_params(given: Tensors) -> list[torch.Tensor]:
    """Layer by layer."""
    layers = len(given[MOE_LAYER[0]])
    return [given[name][layer].clone() for layer in range(layers) for name in MOE_LAYER]


def top2_gating(logits: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each slot of each expert takes of each token, and how uneven the load is (GShard)."""
    experts = logits.shape[-1]
    gates = torch.softmax(logits.float(), -1)
    first = F.one_hot(gates.argmax(-1), experts).to(gates.dtype)
    second = F.one_hot((gates - 2 * first).argmax(-1), experts).to(gates.dtype)
    g1, g2 = (gates * first).sum(-1), (gates * second).sum(-1)
    second = second * (g2 > 0)[..., None]
    queue1 = first.cumsum(-2) - first
    queue2 = second.cumsum(-2) - second + first.sum(-2, keepdim=True)
    place = torch.arange(slots, device=logits.device)
    combine = torch.zeros((), device=logits.device)
    for share, chosen, queue in ((g1, first, queue1), (g2, second, queue2)):
        slot = ((queue * chosen).sum(-1, keepdim=True) == place).to(gates.dtype)
        weight = (share / (g1 + g2))[..., None] * chosen
        combine = combine + weight[..., None] * slot[..., None, :]
    balance = (gates.mean(-2) * first.mean(-2)).mean() * experts**2
    return combine, balance


def moe_loss(params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean squared error, and a hundredth of the balance of the experts."""
    x = F.rms_norm(inputs["input"], inputs["input"].shape[-1:], eps=EPS)
    tokens = x.shape[1]
    auxiliary = torch.zeros((), device=x.device)
    for start in range(0, len(params), 5):
        w1, w2, wg, wi, wo = params[start : start + 5]
        x = x + torch.relu(x @ w1) @ w2
        combine, balance = top2_gating(x @ wg, 2 * tokens // wi.shape[0])
        combine = combine.to(x.dtype)
        inside = torch.einsum("gtes,gtm->egsm", (combine > 0).to(x.dtype), x)
        h = torch.relu(torch.bmm(inside.flatten(1, 2), wi))
        out = torch.bmm(h, wo).view_as(inside)
        x = x + torch.einsum("gtes,egsm->gtm", combine, out)
        auxiliary = auxiliary + balance
    return F.mse_loss(x.float(), inputs["target"].float()) + 0.01 * auxiliary


# --- a residual network --------------------------------------------------------------------------

RESNET_OUTSIDE = tuple(f"scores.{name}" for name in ("stem", "down", "last", "bias"))
RESNET_BLOCK = ("k1", "normed.scale", "normed.shift", "k2", "normed_2.scale", "normed_2.shift")


def resnet_params(given: Tensors) -> list[torch.Tensor]:
    """Those outside of the two blocks, then each block."""
    blocks = [f"scores.{b}.{name}" for b in ("block", "block_2") for name in RESNET_BLOCK]
    stem = given["scores.stem"][:, None]
    return [stem.clone(), *(given[name].clone() for name in (*RESNET_OUTSIDE[1:], *blocks))]


def resnet_loss(params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy, with the statistics of the batch and averages of them."""
    stem, down, last, bias, *blocks = params

    def normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        averages = torch.zeros_like(scale), torch.ones_like(scale)
        return F.batch_norm(x, *averages, scale, shift, training=True, momentum=0.1, eps=1e-5)

    def block(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        k1, scale1, shift1, k2, scale2, shift2 = weights
        a = F.relu(normed(F.conv2d(x, k1, padding="same"), scale1, shift1), inplace=True)
        return F.relu(x + normed(F.conv2d(a, k2, padding="same"), scale2, shift2), inplace=True)

    x = F.relu(F.conv2d(inputs["images"][:, None], stem, padding="same"), inplace=True)
    x = block(x, blocks[:6])
    # A stride of 2 over an even size pads one element, on the right (as "same" does elsewhere).
    y = F.relu(F.conv2d(F.pad(x, (0, 1, 0, 1)), down, stride=2), inplace=True)
    y = block(y, blocks[6:])
    return F.cross_entropy(y.mean((2, 3)) @ last + bias, inputs["labels"].long())


# --- a translator of LSTMs -----------------------------------------------------------------------

GATES = (1, 0, 2, 3)
"""Where torch's gates, in its order (input, forget, cell, output), stand in ours."""
NMT = ("embed", "reads", "reads_on", "writes", "writes_on", "out", "out_seen")


def nmt_params(given: Tensors) -> list[torch.Tensor]:
    """The tables, and the weights of both LSTMs as torch has them: gates by hidden, transposed."""
    return [
        given[name][:, GATES].flatten(1).T.contiguous() if given[name].dim() == 3 else given[name]
        for name in NMT
    ]


def nmt_loss(params: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy over the words."""
    embed, reads, reads_on, writes, writes_on, out, out_seen = params
    hidden = reads_on.shape[1]
    forget = torch.zeros_like(reads[:, 0])
    forget[hidden : 2 * hidden] = 1  # the gate that forgets begins open
    bias = [forget, torch.zeros_like(forget)]
    h = torch.zeros(1, len(inputs["read"]), hidden, dtype=embed.dtype, device=embed.device)
    state = [h, h]
    words = []
    for text, weights in (("read", [reads, reads_on]), ("before", [writes, writes_on])):
        x = F.embedding(inputs[text], embed)
        # Has biases, one layer, no dropout, for training, one direction, the batch first.
        told, *state = torch.lstm(x, state, [*weights, *bias], True, 1, 0.0, True, False, True)
        words.append(told)
    heard, said = words
    look = torch.softmax(said @ heard.mT / hidden**0.5, -1)
    logits = said @ out + (look @ heard) @ out_seen
    return F.cross_entropy(logits.flatten(0, 1), inputs["answer"].flatten().long())


HAND_MODELS = {
    "llama": HandModel(llama_params, llama_loss),
    "moe": HandModel(moe_params, moe_loss),
    "resnet": HandModel(resnet_params, resnet_loss),
    "nmt": HandModel(nmt_params, nmt_loss),
}
