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

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    x = params["embed"][inputs["tokens"]] + params["position"]
    seq = x.shape[1]
    mask = jnp.tril(jnp.ones((seq, seq), bool))
    for layer in range(len(params["g1"])):
        p = {n: value[layer] for n, value in params.items() if n not in ("embed", "position")}
        z = norm(x) * p["g1"]
        q, k, v = (jnp.einsum("bsm,mhk->bhsk", z, p[f"project.w{n}"]) for n in "qkv")
        s = jnp.where(mask, jnp.einsum("bhsk,bhmk->bhsm", q, k) / KEY**0.5, -1e9)
        o = jnp.einsum("bhsm,bhmk->bhsk", jax.nn.softmax(s, -1), v)
        x = x + jnp.einsum("bhsk,hkm->bsm", o, p["joined.wo"])
        z = norm(x) * p["g2"]
        x = x + jax.nn.gelu(z @ p["mlp.w1"], approximate=False) @ p["mlp.w2"]
    shares = jax.nn.log_softmax(norm(x) @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(shares, inputs["targets"][..., None], -1))


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

        loss = {"mlp": mlp_loss, "lm": lm_loss}[self.case.family]

        def step(params: Any, state: Any, inputs: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, inputs)
            if not state:
                return {n: w - SGD_LR * grads[n] for n, w in params.items()}, state, value
            return (*adamw(params, grads, state), value)

        return step

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
