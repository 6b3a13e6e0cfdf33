"""Parameter groups: torch's own, under every layout; frozen parameters cost nothing."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.programs.harness import Case
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
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}, embed]
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
