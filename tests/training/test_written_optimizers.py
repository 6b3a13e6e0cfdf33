"""Optimizers that are functions of the file, compared with their formulas in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshdsl.device.memory import memory
from meshdsl.diagnostics import DiagnosticError
from tests.compiling import named
from tests.programs.harness import Case, compiled
from tests.training.stepping import Arrays, compiled_step, hold_to, values

FUNCTIONS = """
dim batch = 8, io = 4, hidden = 8, layers = 2, turns = 3

def lion(w[...], g[...], lr, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.0) -> [...] {
  param m[...] = zeros()
  m := beta2 * m + (1 - beta2) * g
  return w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
}

def muon[rows, cols, other](w[..., rows, cols], g[..., rows, cols], lr, beta = 0.95) {
  param m[..., rows, cols] = zeros()
  v = beta * m + g
  m := v
  n = g + beta * v
  x = n / (sqrt(sum[rows, cols](n^2)) + 1e-7)
  repeat turns {
    a = einsum(x, x[rows -> other] -> [..., rows, other])
    y = einsum(a, x[rows -> other] -> [..., rows, cols])
    x = 3.4445 * x - 4.775 * y + 2.0315 * einsum(a, y[rows -> other] -> [..., rows, cols])
  }
  return w - lr * x
}

def falling(step, w[...], lr) -> [...] {
  return w * (1 - lr / step)
}

def shrinking(w[...], g[...], lr, step) -> [...] {
  return falling(step, w, lr) - lr * g
}
"""
PROGRAM = (
    FUNCTIONS
    + """
program net(x[batch, io], target[batch, io]) {
  param first[io, hidden]
  param last[hidden, io]
  param scale[io] = ones()
  h = einsum(einsum(x, first -> [batch, hidden]), last -> [batch, io]) * scale
  repeat layers {
    param w[io, hidden]
    param b[io] = normal(0.1)
    h = h + tanh(einsum(einsum(h, w -> [batch, hidden]), w -> [batch, io]) + b)
  }
  loss = mean((h - target)^2)
  return loss
  minimize loss with muon(lr=linear(0.02, 10, final=0.01), clip=0.5) {
    b: lion(lr=1e-3, weight_decay=0.1), beta1 = 0.8
    scale: shrinking(0.01)
    last: adam(lr=0.01)
  }
}
"""
)
LAYOUTS = (
    "data:2 { batch -> data, params: hidden -> data, state: hidden -> data }",
    "data:2,tp:2 { batch -> data, hidden -> tp }",
    "pipe:2 { layers -> pipe } with one_f_one_b[batch](4)",
)
STEPS = 5


def orthogonal(n: torch.Tensor) -> torch.Tensor:
    """Three turns of the iteration of Newton and Schulz of Muon."""
    x = n / (torch.sqrt((n**2).sum()) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x - 4.775 * a @ x + 2.0315 * a @ a @ x
    return x


def in_torch(inputs: Arrays, params: Arrays) -> Arrays:
    x, target = (torch.tensor(inputs[n]) for n in ("x", "target"))
    tensors = {n: torch.tensor(a).requires_grad_() for n, a in params.items()}
    kept: dict[str, Any] = {n: torch.zeros_like(t) for n, t in tensors.items()}
    adam = torch.optim.Adam([tensors["last"]], lr=0.01)
    for step in range(1, STEPS + 1):
        h = x @ tensors["first"] @ tensors["last"] * tensors["scale"]
        for w, b in zip(tensors["w"], tensors["b"], strict=True):
            h = h + torch.tanh(h @ w @ w.T + b)
        adam.zero_grad()
        grads = torch.autograd.grad(((h - target) ** 2).mean(), list(tensors.values()))
        norm = torch.sqrt(torch.stack([(g**2).sum() for g in grads]).sum())
        scale = min(1.0, 0.5 / (float(norm) + 1e-6))
        grad = {n: g * scale for n, g in zip(tensors, grads, strict=True)}
        tensors["last"].grad = grad["last"]
        adam.step()
        rate = 0.02 - 0.01 * (step - 1) / 10
        with torch.no_grad():
            for name in ("first", "w"):
                kept[name] = 0.95 * kept[name] + grad[name]
                n = grad[name] + 0.95 * kept[name]
                each = torch.stack([orthogonal(m) for m in n]) if n.dim() == 3 else orthogonal(n)
                tensors[name] -= rate * each
            b, g = tensors["b"], grad["b"]
            b -= 1e-3 * 0.1 * b + 1e-3 * torch.sign(0.8 * kept["b"] + 0.2 * g)
            kept["b"] = 0.99 * kept["b"] + 0.01 * g
            tensors["scale"] *= 1 - 0.01 / step
            tensors["scale"] -= 0.01 * grad["scale"]
    return {n: t.detach().numpy() for n, t in tensors.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_optimizers_are_their_formulas(layout: str) -> None:
    mesh, _, rules = layout.partition(" ")
    made = compiled_step(Case(PROGRAM, mesh, rules, "optimal"))
    states = {s.value.name for s in made.named.states}
    assert states == {"step", "first.m", "w.m", "b.m", "last.m", "last.v"}
    inputs, params = values(made.named)
    expected, kept = in_torch(inputs, params), dict(params)
    for _ in range(STEPS):
        step = made.step(inputs, kept)
        kept = step.run.updated
    hold_to(step, {}, expected, 1e-9)


def test_their_states_are_placed_and_typed_as_those_of_others() -> None:
    text = PROGRAM.replace("clip=0.5", 'compute="bf16"')
    made = compiled(Case(text, "data:2", "{ state: hidden -> data, batch -> data }"))
    kinds = {s.value.name: s.value.type.dtype.name for s in made.named.states}
    assert kinds["w.m"] == kinds["w.master"] == kinds["b.master"] == "f32"
    split, whole = 4 * 8 * (2 + 2 * 2) + 8 * 4 * 3, (4 * 2) * 2 + 4
    assert memory(made.device)["state"] == 4 * (split // 2 + whole + 1)


# --- what is refused ------------------------------------------------------------------------------

WRONG = {
    "lion(1e-3)": None,
    "lion()": ("MD0274", "lion()", "write `lion(lr=0.001)`"),
    "lion(lr=1e-3, beta3=1)": ("MD0272", "beta3", "did you mean `beta2` or `beta1`?"),
    "lion(lr=-1)": ("MD0276", "-1", "write `lr=0.001`"),
    "lion(lr=1e-3, beta1=x)": ("MD0275", "x", "write `beta1=0.9`"),
    "muon(lr=1e-3)": ("MD0279", "muon", "`b: adamw(lr=1e-3)`"),
    "muon(lr=1e-3) { b: sgd(1), b: beta = 2 }": ("MD0272", "beta", "there are `lr`"),
    "muon(lr=1e-3) { b: sgd(1), params: beta = 0.5 }": None,
    "muon(lr=1e-3) { b: sgd(1, clip=2) }": ("MD0272", "clip", "of the optimizer of all"),
    "muon(lr=1e-3) { b: sdg(1) }": ("MD0270", "sdg", "did you mean `sgd`?"),
    "rateless(lr=1)": ("MD0279", "rateless", "the learning rate"),
    "tensors(lr=1)": ("MD0279", "v[d]", "leave out its dims"),
    "unassigned(lr=1)": ("MD0279", "m[...]", "write `m := …`"),
    "with_ones(lr=1)": ("MD0279", "m[...]", "`= zeros()`"),
    "narrow(lr=1)": ("MD0279", "narrow", "return `cast(…, f32)`"),
    "of_gradient(lr=1)": ("MD0279", "grad(sum(w^2), w)", "the gradient of the loss"),
    "clipping(lr=1)": ("MD0279", "clip = 1.0", "another name"),
    "worded(lr=1) { b: optimizer = 1 }": ("MD0279", "optimizer = 1.0", "another name"),
    "below_zero(lr=1)": None,
    "needy(lr=1)": ("MD0274", "needy(lr=1)", "add `much=1.0`"),
    "needy(lr=0.001, much=1.0)": None,
    "drawing(lr=1)": ("MD0279", "drawing", "leave them out"),
    "misshapen(lr=1)": ("MD0250", "misshapen", "or change what is on the right"),
    "mistaken(lr=1)": ("MD0102", "q", "known: `w`, `g`, `lr`"),
}
REFUSED = """
def rateless(w[...], g[...]) -> [...] { return w - g }
def tensors[d](w[d], g[d], lr, v[d]) { return w - lr * g * v }
def unassigned(w[...], g[...], lr) -> [...] {
  param m[...] = zeros()
  return w - lr * (g + m)
}
def with_ones(w[...], g[...], lr) -> [...] {
  param m[...] = ones()
  m := g
  return w - lr * m
}
def drawing(w[...], g[...], lr) -> [...] { return w - lr * dropout(g, 0.5) }
def narrow(w[...], g[...], lr) -> [...] { return cast(w - lr * g, bf16) }
def of_gradient(w[...], g[...], lr) -> [...] { return w - lr * grad(sum(w^2), w) }
def clipping(w[...], g[...], lr, clip = 1.0) -> [...] { return w - lr * clip * g }
def worded(w[...], g[...], lr, optimizer = 1.0) -> [...] { return w - lr * optimizer * g }
def below_zero(w[...], g[...], lr, much = -1) -> [...] { return w + lr * much * g }
def needy(w[...], g[...], lr, much) -> [...] { return w - lr * much * g }
def misshapen(w[...], g[...], lr) { return sum[...](w - lr * g) }
def mistaken(w[...], g[...], lr) { return w - lr * q }

program p(x[io]) {
  param w[io, hidden]
  param b[io]
  loss = sum((sum[hidden](w) * x + b)^2)
  return loss
  minimize loss with OPTIMIZER
}
"""


@pytest.mark.parametrize("optimizer", WRONG)
def test_what_is_no_optimizer_is_refused(optimizer: str) -> None:
    text, wanted = FUNCTIONS + REFUSED.replace("OPTIMIZER", optimizer), WRONG[optimizer]
    if wanted is None:
        named(text)
        return
    with pytest.raises(DiagnosticError) as raised:
        named(text)
    found = raised.value.diagnostics[0]
    assert found.span is not None
    assert (found.code, found.span.text) == wanted[:2]
    assert wanted[2] in (found.help or "")
