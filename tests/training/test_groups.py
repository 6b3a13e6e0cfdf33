"""Parameter groups: torch's own, under every layout; frozen parameters cost nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.device.memory import memory
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import values_of
from meshdsl.report.explanation import explain
from tests.programs.harness import Case, compiled
from tests.training.stepping import Arrays, compiled_step, hold_to, values

PROGRAM = """
dim batch = 8, io = 4, hidden = 8, layers = 2

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
    "data parallel": "data:2 { batch -> data }",
    "zero 1": "data:2 { batch -> data, state: hidden -> data }",
    "zero 2": "data:2 { batch -> data, state: hidden -> data, grads: hidden -> data }",
    "zero 3": "data:2 { batch -> data, params: hidden -> data, state: hidden -> data }",
    "tensor parallel": "data:2,tp:2 { batch -> data, hidden -> tp }",
    "pipeline": "data:2,pipe:2 { layers -> pipe, batch -> data } with gpipe[batch](2)",
}
LAYER = ("norm.scale", "mlp.w", "mlp.b", "mlp.v")
STEPS = 20
MOST = 1e-10
Tensors = list[torch.Tensor]


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
        for layer in range(2):
            scale, w, b, v = (tensors[name][layer] for name in LAYER)
            h = h + torch.tanh((h * scale) @ w + b) @ v
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


def test_parameters_of_equal_options_are_updated_in_one_call() -> None:
    text = compiled(case("data parallel")).emitted.text
    device = text[text.index("def device(") : text.index("def adam_(")]
    assert device.count("adam_(") == len(("weights", "without decay", "embed"))


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


# --- two losses -----------------------------------------------------------------------------------

RIVALS = """
dim batch = 8, noise = 4, io = 8, hidden = 8

def judged(x[batch, io], u[io, hidden], v[hidden]) -> [batch] {{
  return einsum(tanh(einsum(x, u -> [batch, hidden])), v -> [batch])
}}

def generator(z[batch, noise]) -> [batch, io] {{
  param w[noise, hidden]
  param o[hidden, io]
  return einsum(tanh(einsum(z, w -> [batch, hidden])), o -> [batch, io])
}}

program rivals(x[batch, io], z[batch, noise]) {{
  param u[io, hidden]
  param v[hidden]
  fake = generator(z)
  real_score, fake_score = scores(x, fake, u, v)
  judge_loss = mean(softplus(-real_score)) + mean(softplus(fake_score))
  return judge_loss
  minimize judge_loss with adam(lr=0.01, clip=0.1{first}) {{ generator: frozen }}
  minimize mean(softplus(-fake_score)) with momentum(lr=0.02) {{
    {others}
    generator.o: lr = 0.01
  }}
}}

def scores(x[batch, io], fake[batch, io], u[io, hidden], v[hidden]) {{
  return judged(x, u, v), judged(fake, u, v)
}}
"""
OF_JUDGE = "(u, v): frozen"


def rivals_in_torch(x: Tensors, z: Tensors, tensors: dict[str, torch.Tensor]) -> Arrays:
    """Parameters after the steps; `x` and `z` are the batches of each."""
    u, v = judge = [tensors[n].requires_grad_() for n in ("u", "v")]
    w, o = generator = [tensors[n].requires_grad_() for n in ("generator.w", "generator.o")]
    adam = torch.optim.Adam(judge, lr=0.01)
    groups: list[dict[str, Any]] = [{"params": [w]}, {"params": [o], "lr": 0.01}]
    momentum = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    softplus = torch.nn.functional.softplus
    for _ in range(STEPS):
        fakes = [torch.tanh(each @ w) @ o for each in z]
        fake_scores = [torch.tanh(fake @ u) @ v for fake in fakes]
        losses = [
            softplus(-torch.tanh(real @ u) @ v).mean() + softplus(score).mean()
            for real, score in zip(x, fake_scores, strict=True)
        ]
        judge_loss = torch.stack(losses).mean()
        fool_loss = torch.stack([softplus(-score).mean() for score in fake_scores]).mean()
        u.grad, v.grad = torch.autograd.grad(judge_loss, judge, retain_graph=True)
        w.grad, o.grad = torch.autograd.grad(fool_loss, generator)
        torch.nn.utils.clip_grad_norm_(judge, 0.1)
        adam.step()
        momentum.step()
    return {n: t.detach().numpy() for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("data:2 { batch -> data, params: hidden -> data, state: hidden -> data }", ""),
        ("data:2,tp:2 { batch -> data, hidden -> tp }", ""),
        ("data:2 { batch -> data }", ", accumulate=2"),
    ],
)
def test_two_losses_are_two_optimizers_of_torch(layout: str, first: str) -> None:
    mesh, _, rules = layout.partition(" ")
    text = RIVALS.format(first=first, others=OF_JUDGE)
    made = compiled_step(Case(text, mesh, rules, "optimal"))
    inputs, kept = values(made.named)
    tensors = {n: torch.tensor(a) for n, a in kept.items()}
    batches = {n: torch.tensor(a).reshape(-1, 8, a.shape[-1]) for n, a in inputs.items()}
    expected = rivals_in_torch([*batches["x"]], [*batches["z"]], tensors)
    for _ in range(STEPS):
        step = made.step(inputs, kept)
        kept = step.run.updated
    hold_to(step, {}, expected, MOST)


WRONG = {
    "": "`u` is minimised by two losses",
    "params: frozen, generator: trained, u: trained": "`u` is minimised by two losses",
}


@pytest.mark.parametrize("others", WRONG)
def test_a_parameter_has_one_loss(others: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        compiled(Case(RIVALS.format(first="", others=others), "one:1", "{ batch -> none }"))
    found = raised.value.diagnostics[0]
    assert (found.code, found.message) == ("MD0295", WRONG[others])


def test_a_pipeline_has_one_loss() -> None:
    text = RIVALS.format(first="", others=OF_JUDGE)
    rules = "{ fake: pipe = 1 } with gpipe[batch](2)"
    with pytest.raises(DiagnosticError, match="MD0907"):
        _ = compiled(Case(text, "pipe:2", rules)).placed


@pytest.mark.parametrize("option", ["accumulate=2", 'compute="bf16"', "compress=powersgd(2)"])
def test_options_of_the_step_are_said_once(option: str) -> None:
    text = RIVALS.format(first="", others=OF_JUDGE)
    text = text.replace("momentum(lr=0.02)", f"momentum(lr=0.02, {option})")
    with pytest.raises(DiagnosticError, match="MD0295"):
        compiled(Case(text, "one:1", "{ batch -> none }"))
