"""Parameter groups: torch's own, under every layout; frozen parameters cost nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.device.memory import memory
from meshdsl.named.ir import values_of
from meshdsl.report.explanation import explain
from tests.programs.harness import Case, compiled
from tests.training.stepping import Arrays, compiled_step, hold_to, values

PROGRAM = """
dim batch = 8, io = 4, hidden = 8, layers = 4

def norm(x[..., io]) -> [..., io] {
  param scale[io] = ones()
  return x * scale
}

def mlp(x[batch, io]) -> [batch, io] {
  param w[io, hidden]
  param b[hidden] = normal(0.1)
  param v[hidden, io]
  return einsum(tanh(einsum(x, w -> [batch, hidden]) + b), v -> [batch, io])
}

program net(x[batch, io], target[batch, io]) {
  param embed[io, hidden]
  param base[hidden, io]
  h = einsum(einsum(x, embed -> [batch, hidden]), base -> [batch, io])
  repeat layers {
    h = h + mlp(norm(h))
  }
  loss = mean((h - target)^2)
  return loss, h
  minimize loss with adamw(lr=0.01, weight_decay=0.1, clip=1.0) {
    (norm, mlp.b): weight_decay = 0
    base: frozen
    embed: lr = cosine(0.02, 10)
  }
}
"""

LAYOUTS = {
    "one device": "one:1 { batch -> none }",
    "data parallel": "data:4 { batch -> data }",
    "zero 1": "data:4 { batch -> data, state: hidden -> data }",
    "zero 2": "data:4 { batch -> data, state: hidden -> data, grads: hidden -> data }",
    "zero 3": "data:4 { batch -> data, params: hidden -> data, state: hidden -> data }",
    "tensor parallel": "data:2,tp:2 { batch -> data, hidden -> tp }",
    "pipeline": "pipe:2 { layers -> pipe } with one_f_one_b[batch](4)",
    "pipeline and data": "data:2,pipe:2 { layers -> pipe, batch -> data } with gpipe[batch](2)",
}
LAYER = ("norm.scale", "mlp.w", "mlp.b", "mlp.v")
STEPS = 20
MOST = 1e-10


def case(layout: str) -> Case:
    mesh, _, rules = LAYOUTS[layout].partition(" ")
    return Case(PROGRAM, mesh, rules, "optimal")


@functools.cache
def in_torch(given: tuple[tuple[str, bytes, tuple[int, ...]], ...]) -> Arrays:
    """Inputs and parameters by name; the parameters after the steps, by torch's groups."""
    tensors = {n: torch.frombuffer(bytearray(b), dtype=torch.float64).view(s) for n, b, s in given}
    x, target = tensors.pop("x"), tensors.pop("target")
    frozen = {"base"}
    trained = {n: t.requires_grad_() for n, t in tensors.items() if n not in frozen}
    no_decay = [trained["norm.scale"], trained["mlp.b"]]
    decay = [trained["mlp.w"], trained["mlp.v"]]
    embed = {"params": [trained["embed"]], "lr": 0.02}
    groups: list[dict[str, Any]] = [
        {"params": decay},
        {"params": no_decay, "weight_decay": 0.0},
        embed,
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        rate = 0.01 * (1 + np.cos(np.pi * min(step, 10) / 10))
        optimizer.param_groups[2]["lr"] = rate
        h = x @ tensors["embed"] @ tensors["base"]
        for layer in range(4):
            inner = torch.tanh(
                h * tensors["norm.scale"][layer] @ tensors["mlp.w"][layer] + tensors["mlp.b"][layer]
            )
            h = h + inner @ tensors["mlp.v"][layer]
        loss = ((h - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)
        optimizer.step()
    return {n: t.detach().numpy() for n, t in tensors.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_torch(layout: str) -> None:
    made = compiled_step(case(layout))
    inputs, params = values(made.named)
    arrays = {**inputs, **params}
    expected = in_torch(tuple((n, a.tobytes(), a.shape) for n, a in arrays.items()))
    assert np.array_equal(expected["base"], params["base"])
    kept = dict(params)
    for _ in range(STEPS):
        step = made.step(inputs, kept)
        kept = step.run.updated
    hold_to(step, {}, expected, MOST)


# --- frozen parameters ----------------------------------------------------------------------------

LORA = """
dim batch = 8, model = 16, hidden = 32, rank = 2, layers = 2

def adapted(x[batch, model]) -> [batch, hidden] {{
  param w[model, hidden]
  return einsum(x, w -> [batch, hidden]) + lora(x)
}}

def lora(x[batch, model]) -> [batch, hidden] {{
  param a[model, rank]
  param b[rank, hidden] = normal(0.1)
  return einsum(einsum(x, a -> [batch, rank]), b -> [batch, hidden])
}}

program net(x[batch, model], target[batch, model]) {{
  param base[model] = ones()
  x = x * base
  repeat layers {{
    param down[hidden, model]
    x = x + einsum(gelu(adapted(x)), down -> [batch, model])
  }}
  loss = mean((x - target)^2)
  return loss
  minimize loss with adamw(lr=0.01{options}) {{ params: frozen, lora: trained }}
}}
"""
ADAPTERS = 2 * (16 * 2 + 2 * 32)
"""Elements of the adapters of both layers."""

FROZEN = {
    "data:2 { batch -> data }": 2 * ADAPTERS,
    "data:2 { batch -> data, state: hidden -> data }": 2 * (64 + 64),
    "data:2 { batch -> data, params: hidden -> data, state: hidden -> data }": 2 * (64 + 64),
    "tp:2 { hidden -> tp }": 2 * (64 + 64),
    "pipe:2 { layers -> pipe } with one_f_one_b": ADAPTERS,
}
"""Elements of the states of Adam on a device."""


@pytest.mark.parametrize("options", [", accumulate=2", ', accumulate=2, compute="bf16"'])
@pytest.mark.parametrize("layout", FROZEN)
def test_frozen_parameters_have_no_gradient_and_no_state(layout: str, options: str) -> None:
    mesh, _, rules = layout.partition(" ")
    made = compiled(Case(LORA.format(options=options), mesh, rules, "optimal"))
    kinds = ("m", "v", "master") if "bf16" in options else ("m", "v")
    names = {f"{adapter}.{kind}" for adapter in ADAPTED for kind in kinds}
    assert {state.value.name for state in made.named.states} == {"step", *names}
    assert {u.old.name for u in made.named.updates} == {*names, "step", *ADAPTED}
    assert {v.source.name for v in values_of(made.named) if v.role == "grad"} == ADAPTED
    held = memory(made.device)
    assert held["state"] == 4 * len(kinds) * FROZEN[layout] // 2 + 4
    assert 0 < held["grads"] <= 4 * ADAPTERS
    frozen = explain(made.device).get("frozen")
    assert frozen is not None
    assert {*frozen["params"], *ADAPTED} == {str(p.value.name) for p in made.named.params}
    assert 0 < frozen["bytes"] < held["params"]
    narrow = {p.value.type.dtype.name for p in made.named.params}
    assert narrow == ({"bf16"} if "bf16" in options else {"f32"})


ADAPTED = {"adapted.lora.a", "adapted.lora.b"}
