"""Programs for the tests of modules, each with the same mathematics in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensors = Mapping[str, torch.Tensor]

MLP = """
dim batch = 8, io = 8, hidden = 16

layout dp { batch -> a }
layout tp { hidden -> a }
layout both { batch -> a, hidden -> b }
layout fsdp { batch -> a, params: io -> a }
layout kept { batch -> a, params: io -> a keep }
layout zero2 { batch -> a, params: io -> a, grads: io -> b, state: io -> b }
layout hybrid { batch -> a, hidden -> b, params: io -> a }
layout swapped { hidden -> (b, a) }
layout inner { io -> a }

program mlp(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param b[hidden] = zeros()
  param v[hidden, io]

  h = relu(einsum(x, w -> [batch, hidden]) + b)
  y = einsum(h, v -> [batch, io])
  loss = mean((y - target)^2)
  return loss, y
}
"""

BLOCK = """
dim batch = 4, seq = 8, mem = seq, model = 8, heads = 4, key = 4, hidden = 16, layers = 2

layout dp { batch -> a }
layout tp { heads -> a, hidden -> a }
layout both { batch -> a, heads -> b, hidden -> b }
layout fsdp { batch -> a, params: model -> a }
layout hybrid { batch -> a, heads -> b, hidden -> b, params: model -> a }
layout sequence { seq -> a }
layout wide { heads -> (a, b), hidden -> (a, b) }
layout staged { layers -> a, batch -> b } with one_f_one_b[batch](2)

def attention(x[batch, seq, model]) -> [batch, seq, model] {
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
}

def mlp(x[batch, seq, model]) -> [batch, seq, model] {
  param w1[model, hidden]
  param w2[hidden, model]
  return einsum(gelu(einsum(x, w1 -> [batch, seq, hidden])), w2 -> [batch, seq, model])
}

program block(x[batch, seq, model]) {
  repeat layers {
    x = x + attention(rms_norm[model](x))
    x = x + mlp(rms_norm[model](x))
  }
  loss = mean(x^2)
  return loss, x
}
"""

ALIAS = """
dim n = 8, m = 4

layout rows { n -> a }
layout columns { m -> a, params: m -> none }

program alias(x[n, m]) {
  param w[n, m]
  param u[m, n]
  param v[n, m]
  y = x + w + u + v
  return y
}
"""
"""All gradients are views of that of `y`."""

SCALARS = """
dim n = 8

layout rows { n -> a }

program scalars(x[n], s[]) {
  param w[n]
  param g[]
  y = x * w * s + g
  loss = mean(y * y)
  return loss, y
}
"""
"""An input, a parameter and an output without dims."""

ODD = """
dim n = 8, m = 4

program odd(x[n], ids[m]: i32, mask[n]: bool) {
  param w[n]
  param unused[n]
  param table[n, m] = normal(1.0)
  param train[m] = ones()
  rows = table[n = ids]
  y = where(mask, x * w, 0.0)
  same = y
  z = stop_gradient(y)
  half = einsum(rows, train -> [])
  nothing = ones[n]()
  return y, same, z, x, w, ids, half, nothing, rows, mask
}
"""
"""Outputs that are inputs, parameters, one another, integers, constants; a name of torch's own."""


def mlp(params: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """The MLP."""
    h = torch.relu(inputs["x"] @ params["w"] + params["b"])
    y = h @ params["v"]
    return {"loss": ((y - inputs["target"]) ** 2).mean(), "y": y}


def block(params: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """A small transformer."""
    x = inputs["x"]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for layer in range(len(params["mlp.w1"])):
        own = {name: param[layer] for name, param in params.items()}
        n = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        q, k, v = (torch.einsum("bsm,mhk->bhsk", n, own[f"attention.w{i}"]) for i in "qkv")
        s = (q @ k.mT / q.shape[-1] ** 0.5).where(later, -1e9)
        o = torch.softmax(s, -1) @ v
        x = x + torch.einsum("bhsk,hkm->bsm", o, own["attention.wo"])
        n = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        x = x + F.gelu(n @ own["mlp.w1"]) @ own["mlp.w2"]
    return {"loss": (x**2).mean(), "x": x}


def alias(params: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """A sum."""
    return {"y": inputs["x"] + params["w"] + params["u"].T + params["v"]}


def scalars(params: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Scaled, shifted, squared."""
    y = inputs["x"] * params["w"] * inputs["s"] + params["g"]
    return {"loss": (y * y).mean(), "y": y}


def odd(params: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """The outputs of the odd program that have gradients."""
    y = torch.where(inputs["mask"], inputs["x"] * params["w"], 0.0)
    rows = params["table"][inputs["ids"].long(), torch.arange(4)]
    half = rows @ params["train"]
    return {"y": y, "same": y, "x": inputs["x"], "w": params["w"], "half": half, "rows": rows}


@dataclass(frozen=True, slots=True)
class Case:
    """A program under a layout on a mesh, and what it computes."""

    text: str
    math: Callable[[Tensors, Tensors], dict[str, torch.Tensor]]
    layout: str
    axes: dict[str, int]
    reduce: str = "optimal"

    @property
    def name(self) -> str:
        """The name of the case in a list of tests."""
        mesh = "x".join(map(str, self.axes.values()))
        return f"{self.math.__name__}-{self.layout}-{mesh}-{self.reduce}"


def _cases() -> list[Case]:
    line, two, square = {"a": 4}, {"a": 2}, {"a": 2, "b": 2}
    meshes: dict[str, list[dict[str, int]]] = {
        **{name: [two, line] for name in ("dp", "tp", "fsdp", "kept", "inner", "sequence")},
        **{name: [two] for name in ("rows", "columns")},
        **{name: [square] for name in ("both", "zero2", "hybrid", "swapped")},
    }
    found: list[Any] = []
    for text, math in ((MLP, mlp), (BLOCK, block), (ALIAS, alias), (SCALARS, scalars)):
        names = [line.split()[1] for line in text.splitlines() if line.startswith("layout")]
        # The search for the optimum takes long for `wide`.
        names = [name for name in names if name not in ("wide", "staged")]
        found += [(text, math, name, axes) for name in names for axes in meshes[name]]
    cases = [Case(*case) for case in found]
    others = ("immediate", "mesh-tf", "deferred")
    cases += [Case(MLP, mlp, "both", square, policy) for policy in others]
    one_more = (("wide", "deferred"), ("staged", "optimal"))
    return [*cases, *(Case(BLOCK, block, name, square, policy) for name, policy in one_more)]


CASES = _cases()


def drawn(specs: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Whole float64 tensors for the entries of a table, so that gradients can be compared."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(list(spec.dims.values()), generator=generator, dtype=torch.float64)
        for name, spec in specs.items()
    }


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of a case in plain torch: outputs, and gradients by inputs and parameters."""

    outputs: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]


def expected(case: Case, inputs: Tensors, params: Tensors, cotangents: Tensors) -> Expected:
    """Run the mathematics of a case on whole tensors, on one device."""
    own_inputs = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    own_params = {n: t.clone().requires_grad_() for n, t in params.items()}
    outputs = case.math(own_params, own_inputs)
    total = sum((outputs[name] * cotangents[name]).sum() for name in outputs)
    assert isinstance(total, torch.Tensor)
    total.backward()
    grads = [{n: t.grad for n, t in own.items()} for own in (own_inputs, own_params)]
    return Expected({n: t.detach() for n, t in outputs.items()}, *grads)  # type: ignore[arg-type]
