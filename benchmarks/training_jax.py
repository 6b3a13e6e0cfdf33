"""Training steps in JAX on host devices: `jit` over sharded arrays, in one process."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.training_cases import ADAMW, BETAS, CLIP, KEY, RATE, SGD_LR, Case
from meshdsl.backends.runtime.values import Array

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"

SPLITS = {
    "w": (None, "device"),
    "v": ("device", None),
    "project.wq": (None, None, "device", None),
    "project.wk": (None, None, "device", None),
    "project.wv": (None, None, "device", None),
    "joined.wo": (None, "device", None, None),
    "mlp.w1": (None, None, "device"),
    "mlp.w2": (None, "device", None),
}
"""Tensor parallel: what is split, dim by dim."""


def configure() -> None:
    """Two host devices of one thread each; before JAX is imported."""
    os.environ["XLA_FLAGS"] = FLAGS
    os.environ["JAX_PLATFORMS"] = "cpu"


def is_there() -> bool:
    """Whether JAX can be imported."""
    import importlib.util

    return importlib.util.find_spec("jax") is not None


def mlp_loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mean squared error."""
    import jax.numpy as jnp

    y = jnp.maximum(inputs["x"] @ params["w"], 0) @ params["v"]
    return jnp.mean((y - inputs["target"]) ** 2)


def lm_loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mean cross-entropy."""
    import jax
    import jax.numpy as jnp

    x = params["embed"][inputs["tokens"]] + params["position"]
    seq = x.shape[1]
    mask = jnp.tril(jnp.ones((seq, seq), bool))
    for layer in range(len(params["g1"])):
        p = {n: value[layer] for n, value in params.items() if n not in ("embed", "position")}
        z = normed(x) * p["g1"]
        q, k, v = (jnp.einsum("bsm,mhk->bhsk", z, p[f"project.w{n}"]) for n in "qkv")
        s = jnp.where(mask, jnp.einsum("bhsk,bhmk->bhsm", q, k) / KEY**0.5, -1e9)
        o = jnp.einsum("bhsm,bhmk->bhsk", jax.nn.softmax(s, -1), v)
        x = x + jnp.einsum("bhsk,hkm->bsm", o, p["joined.wo"])
        z = normed(x) * p["g2"]
        x = x + jax.nn.gelu(z @ p["mlp.w1"], approximate=False) @ p["mlp.w2"]
    return cross_entropy(normed(x) @ params["embed"].T, inputs["targets"])


def moe_loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mean squared error, and a hundredth of the balance of the experts."""
    import jax.numpy as jnp

    x = normed(inputs["input"])
    tokens, auxiliary = x.shape[1], 0.0
    for layer in range(len(params["wg"])):
        p = {name: value[layer] for name, value in params.items()}
        x = x + jnp.maximum(x @ p["dense.w1"], 0) @ p["dense.w2"]
        combine, balance = top2_gating(x @ p["wg"], 2 * tokens // p["wg"].shape[1])
        inside = jnp.einsum("gtes,gtm->egsm", (combine > 0).astype(x.dtype), x)
        h = jnp.maximum(jnp.einsum("egsm,emi->egsi", inside, p["expert.wi"]), 0)
        out = jnp.einsum("egsi,eim->egsm", h, p["expert.wo"])
        x = x + jnp.einsum("gtes,egsm->gtm", combine, out)
        auxiliary = auxiliary + balance
    return jnp.mean((x - inputs["target"]) ** 2) + 0.01 * auxiliary


def top2_gating(logits: Any, slots: int) -> tuple[Any, Any]:
    """What each slot of each expert takes of each token, and how uneven the load is (GShard)."""
    import jax
    import jax.numpy as jnp

    experts = logits.shape[-1]
    gates = jax.nn.softmax(logits, -1)
    first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates - 2 * first, -1), experts)
    g1, g2 = jnp.sum(gates * first, -1), jnp.sum(gates * second, -1)
    second = second * (g2 > 0)[..., None]
    queue1 = jnp.cumsum(first, -2) - first
    queue2 = jnp.cumsum(second, -2) - second + jnp.sum(first, -2, keepdims=True)
    combine: Any = 0.0
    for share, chosen, queue in ((g1, first, queue1), (g2, second, queue2)):
        slot = jax.nn.one_hot(jnp.sum(queue * chosen, -1).astype(int), slots)
        weight = (share / (g1 + g2))[..., None] * chosen
        combine = combine + weight[..., None] * slot[..., None, :]
    balance = jnp.mean(jnp.mean(gates, -2) * jnp.mean(first, -2)) * experts**2
    return combine, balance


def normed(x: Any) -> Any:
    """`x` by its root mean square along the last axis."""
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def resnet_loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mean cross-entropy, with the statistics of the batch."""
    import jax
    import jax.numpy as jnp

    p = {name.removeprefix("scores."): value for name, value in params.items()}

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME")

    def batch_norm(x: Any, name: str) -> Any:
        off = x - jnp.mean(x, (0, 2, 3), keepdims=True)
        scaled = off * jax.lax.rsqrt(jnp.mean(off * off, (0, 2, 3), keepdims=True) + 1e-5)
        return scaled * p[f"{name}.scale"][:, None, None] + p[f"{name}.shift"][:, None, None]

    def block(x: Any, name: str) -> Any:
        a = jnp.maximum(batch_norm(conv(x, p[f"{name}.k1"]), f"{name}.normed"), 0)
        return jnp.maximum(x + batch_norm(conv(a, p[f"{name}.k2"]), f"{name}.normed_2"), 0)

    x = jnp.maximum(conv(inputs["images"][:, None], p["stem"][:, None]), 0)
    y = jnp.maximum(conv(block(x, "block"), p["down"], 2), 0)
    logits = jnp.mean(block(y, "block_2"), (2, 3)) @ p["last"] + p["bias"]
    return cross_entropy(logits, inputs["labels"])


def nmt_loss(params: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """The mean cross-entropy over the words."""
    import jax
    import jax.numpy as jnp

    hidden = params["out"].shape[0]

    def lstm(text: Any, reads: Any, on: Any, state: Any) -> Any:
        x = jnp.einsum("bsm,mgh->sbgh", params["embed"][text], reads)

        def word(state: Any, x: Any) -> Any:
            said, memory = state
            g = x + jnp.einsum("bl,lgh->bgh", said, on)
            forget, entered, cell, told = (g[:, i] for i in range(4))
            memory = memory * jax.nn.sigmoid(forget + 1) + jax.nn.sigmoid(entered) * jnp.tanh(cell)
            said = jax.nn.sigmoid(told) * jnp.tanh(memory)
            return (said, memory), said

        return jax.lax.scan(word, state, x)

    zeros = jnp.zeros((len(inputs["read"]), hidden))
    state, heard = lstm(inputs["read"], params["reads"], params["reads_on"], (zeros, zeros))
    _, said = lstm(inputs["before"], params["writes"], params["writes_on"], state)
    look = jax.nn.softmax(jnp.einsum("tbh,sbh->bts", said, heard) / hidden**0.5, -1)
    seen = jnp.einsum("bts,sbh->tbh", look, heard)
    logits = said @ params["out"] + seen @ params["out_seen"]
    return cross_entropy(logits, inputs["answer"].T)


def cross_entropy(logits: Any, answers: Any) -> Any:
    """The mean, along the last axis."""
    import jax
    import jax.numpy as jnp

    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], -1))


LOSSES = {
    "mlp": mlp_loss,
    "lm": lm_loss,
    "moe": moe_loss,
    "resnet": resnet_loss,
    "nmt": nmt_loss,
}


class WithJax:
    """The training step; call it. Takes whole parameters and inputs."""

    def __init__(self, case: Case, whole: dict[str, Array], inputs: dict[str, Array]) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.case = case
        mesh = Mesh(jax.devices()[: case.devices], ("device",))

        def put(array: Array, split: tuple[Any, ...]) -> Any:
            spec: Any = PartitionSpec
            return jax.device_put(array, NamedSharding(mesh, spec(*split)))

        def split_of(name: str) -> tuple[Any, ...]:
            return SPLITS.get(name, ()) if case.parallel == "tensor" else ()

        batch = ("device",) if case.parallel == "data" else ()
        self.inputs = {n: put(a, batch) for n, a in inputs.items()}
        self.params = {n: put(a, split_of(n)) for n, a in whole.items()}
        zeros = {n: put(0 * a, split_of(n)) for n, a in whole.items()}
        twice = {n: put(0 * a, split_of(n)) for n, a in whole.items()}
        self.state: Any = (0.0, zeros, twice) if case.optimizer == "adamw" else ()
        self.step = jax.jit(self.make(), donate_argnums=(0, 1))

    def make(self) -> Any:
        """The pure function of a step."""
        import jax

        loss = LOSSES[self.case.family]

        def step(params: Any, state: Any, inputs: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, inputs)
            if not state:
                return {n: w - SGD_LR * grads[n] for n, w in params.items()}, state, value
            return (*adamw(params, grads, state), value)

        return step

    def peak(self) -> int:
        """Bytes that the compiler reserves for a step: arguments, results and all between."""
        compiled = self.step.lower(self.params, self.state, self.inputs).compile()
        found: Any = compiled.memory_analysis()
        whole = found.argument_size_in_bytes + found.output_size_in_bytes
        return int(whole - found.alias_size_in_bytes + found.temp_size_in_bytes)

    def __call__(self) -> Any:
        """One step; the loss. Awaited: two steps on the way at once can deadlock on two threads."""
        self.params, self.state, loss = self.step(self.params, self.state, self.inputs)
        return loss.block_until_ready()


def adamw(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """New parameters and states (Loshchilov and Hutter 2019)."""
    import jax.numpy as jnp

    step, m, v = state
    lr = rate(step)
    step = step + 1
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(CLIP / (norm + 1e-6), 1.0)
    grads = {n: scale * g for n, g in grads.items()}
    b1, b2 = BETAS
    m = {n: b1 * m[n] + (1 - b1) * g for n, g in grads.items()}
    v = {n: b2 * v[n] + (1 - b2) * g * g for n, g in grads.items()}
    decay, eps = ADAMW["weight_decay"], ADAMW["eps"]

    def moved(n: str, w: Any) -> Any:
        root = jnp.sqrt(v[n] / (1 - b2**step)) + eps
        return w * (1 - lr * decay) - lr * (m[n] / (1 - b1**step)) / root

    return {n: moved(n, w) for n, w in params.items()}, (step, m, v)


def rate(step: Any) -> Any:
    """The learning rate after `step` steps: `RATE.at`, traced."""
    import jax.numpy as jnp

    done = jnp.clip((step - RATE.warmup) / (RATE.steps - RATE.warmup), 0.0, 1.0)
    height = (1 + jnp.cos(jnp.pi * done)) / 2
    rise = jnp.minimum((step + 1) / RATE.warmup, 1.0)
    return rise * (RATE.final + (RATE.peak - RATE.final) * height)
