"""Several targets of one `grad`: in any order, with one cotangent between them, the loss itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.reference import made_up, whole_specs
from tests.compiling import named, run_text

Tensors = dict[str, torch.Tensor]
N = 3


@dataclass(frozen=True, slots=True)
class Targets:
    """Statements that make `loss`, the same in torch, and what gradients are taken by."""

    body: str
    meaning: Callable[[Tensors], Tensors]
    targets: tuple[str, ...]


def _views(v: Tensors) -> Tensors:
    t = v["x"].view_as(v["x"])
    u = t.view_as(t)
    return {"t": t, "u": u, "loss": (u * u).sum()}


def _added(v: Tensors) -> Tensors:
    t = v["x"] + 1.0
    return {"t": t, "loss": (t * t * v["y"]).sum()}


def _zero_added(v: Tensors) -> Tensors:
    t = v["x"] + 0.0
    u = t - 0.0
    return {"t": t, "u": u, "loss": (u**3).mean()}


def _renamed(v: Tensors) -> Tensors:
    t = v["x"].view_as(v["x"])
    u = t.view_as(t)
    return {"t": t, "u": u, "loss": (u * u * v["y"]).sum()}


def _linear(v: Tensors) -> Tensors:
    t = v["x"] + v["y"]
    return {"t": t, "loss": t.sum()}


def _products(v: Tensors) -> Tensors:
    t = v["w"] + v["x"]
    return {"t": t, "loss": (t * v["y"]).sum()}


def _scalars(v: Tensors) -> Tensors:
    s = v["x"].sum()
    u = s + 1.0
    return {"s": s, "u": u, "loss": u * 1.0}


def _looped(v: Tensors) -> Tensors:
    t = v["x"] + 1.0
    h = t.view_as(t)
    for _ in range(N):
        h = torch.tanh(h * v["w"])
    return {"t": t, "h": h, "loss": (h * h).sum()}


def _handed_on(v: Tensors) -> Tensors:
    t = v["x"] + 1.0
    h = t.view_as(t)
    return {"t": t, "h": h, "loss": (h * v["y"]).sum()}


def _softmax(v: Tensors) -> Tensors:
    t = torch.softmax(v["x"], 0)
    u = t + 0.0
    return {"t": t, "u": u, "loss": (u * v["y"]).sum()}


def _nothing(v: Tensors) -> Tensors:
    t = v["x"] * 0.0
    u = t + v["y"]
    return {"t": t, "u": u, "loss": (u * u).sum()}


def _nested(v: Tensors) -> Tensors:
    t = v["x"] + 1.0
    inner = (t**3).sum()
    (d,) = torch.autograd.grad(inner, [t], create_graph=True)
    return {"t": t, "d": d, "loss": (d * v["y"]).sum()}


def _found_before(v: Tensors) -> Tensors:
    (d,) = torch.autograd.grad((v["y"] ** 3).sum(), [v["y"]], create_graph=True)
    return {"d": d, "loss": (d * d * v["y"]).sum()}


def _done_again(v: Tensors) -> Tensors:
    t = v["x"] * v["x"]
    (d,) = torch.autograd.grad((t**3).sum(), [t], create_graph=True)
    return {"t": t, "d": d, "loss": (t * d * v["y"]).sum()}


CASES = {
    "names of one tensor": Targets("t = x\nu = t\nloss = sum(u * u)", _views, ("x", "t", "u")),
    "a number added": Targets("t = x + 1.0\nloss = sum(t * t * y)", _added, ("t", "x", "y")),
    "zero added": Targets(
        "t = x + 0.0\nu = t - 0.0\nloss = mean(u * u * u)", _zero_added, ("t", "x", "u")
    ),
    "renamed": Targets("t = x[a -> c]\nu = t[c -> a]\nloss = sum(u * u * y)", _renamed, ("u", "x")),
    "a sum of all": Targets("t = x + y\nloss = sum(t)", _linear, ("t", "x", "y")),
    "a parameter": Targets("t = w + x\nloss = sum(t * y)", _products, ("w", "t", "x", "y")),
    "numbers": Targets("s = sum(x)\nu = s + 1.0\nloss = u * 1.0", _scalars, ("s", "u", "x")),
    "through a loop": Targets(
        "t = x + 1.0\nh = t\nrepeat n { h = tanh(h * w) }\nloss = sum(h * h)",
        _looped,
        ("t", "h", "x", "w"),
    ),
    "a loop that changes nothing": Targets(
        "t = x + 1.0\nh = t\nrepeat n { h = h }\nloss = sum(h * y)", _handed_on, ("h", "t", "x")
    ),
    "a softmax": Targets(
        "t = softmax[a](x)\nu = t + 0.0\nloss = sum(u * y)", _softmax, ("u", "x", "t")
    ),
    "a gradient that is zero": Targets(
        "t = x * 0.0\nu = t + y\nloss = sum(u * u)", _nothing, ("x", "t", "u", "y")
    ),
    "a gradient that was there before": Targets(
        "d = grad(sum(y * y * y), y)\ne = grad(sum(x * d), x)\nloss = sum(d * e * y)",
        _found_before,
        ("y", "d"),
    ),
    "a gradient of values that are computed again": Targets(
        "recompute {\n  t = x * x\n  u = t * t * t\n}\nd = grad(sum(u), t)\nloss = sum(t * d * y)",
        _done_again,
        ("t", "d", "y"),
    ),
    "a gradient of a gradient": Targets(
        "t = x + 1.0\nd = grad(sum(t * t * t), t)\nloss = sum(d * y)", _nested, ("t", "x", "d")
    ),
}


def text_of(case: Targets, targets: tuple[str, ...], more: str = "") -> str:
    names = ", ".join(f"d{i}" for i in range(len(targets)))
    lines = ["param w[a, b]", *case.body.split("\n")]
    lines += [f"{names} = grad(loss, {', '.join(targets)})", f"return {names}, sum(w){more}"]
    body = "".join(f"  {line}\n" for line in lines)
    return f"dim a = 2, b = 4, c = a, n = {N}\nprogram p(x[a, b], y[a, b]) {{\n{body}}}\n"


def expected(case: Targets, text: str, targets: tuple[str, ...]) -> list[np.ndarray]:
    """Torch's gradients, on the values that every engine makes up."""
    program = named(text, mesh="d:1", dtype="f64")
    given = [made_up(specs) for specs in whole_specs(program, draws(program))]
    leaves = {n: torch.tensor(a, requires_grad=True) for g in given for n, a in g.items()}
    values = leaves | case.meaning(leaves)
    found = torch.autograd.grad(values["loss"], [values[t] for t in targets])
    return [g.numpy() for g in found]


def check(case: Targets, targets: tuple[str, ...], **options: str) -> None:
    text = text_of(case, targets)
    found = run_text(text, None, dtype="f64", **options)
    for i, wanted in enumerate(expected(case, text, targets)):
        np.testing.assert_allclose(found[f"d{i}"], wanted, rtol=1e-10, atol=1e-12, err_msg=text)


@pytest.mark.parametrize("name", CASES)
def test_in_every_order(name: str) -> None:
    """All orders of two targets, some of more: each is at each place."""
    case = CASES[name]
    orders = list(itertools.permutations(case.targets))
    for targets in orders[:: max(1, len(orders) // 3)]:
        check(case, targets, mesh="d:1", reduce="deferred")


@pytest.mark.parametrize("name", CASES)
def test_twice_and_with_the_loss_itself(name: str) -> None:
    every = (*CASES[name].targets, "loss")
    check(CASES[name], (*every, *every), mesh="d:1", reduce="deferred")
    check(CASES[name], ("loss", *CASES[name].targets), mesh="d:1", reduce="deferred")


@pytest.mark.parametrize(
    ("rule", "reduce"), [("a:d,c:d", "deferred"), ("b:d", "deferred"), ("b:d", "optimal")]
)
@pytest.mark.parametrize("name", CASES)
def test_under_layouts(name: str, rule: str, reduce: str) -> None:
    check(CASES[name], CASES[name].targets, mesh="d:2", layout=rule, reduce=reduce)


@pytest.mark.parametrize("reduce", ["deferred", "optimal"])
def test_inside_a_loop(reduce: str) -> None:
    """Targets that are made in the loop, one the other with a number added."""
    text = f"""
dim a = 2, b = 4, n = {N}
program p(x[a, b], y[a, b]) {{
  z = x
  repeat n {{
    s = z + 0.0
    t = s + 1.0
    dt, ds = grad(sum(t * t * y), t, s)
    z = z - 0.1 * dt - 0.2 * ds
  }}
  return z
}}
"""
    program = named(text, mesh="d:1", dtype="f64")
    inputs = made_up(whole_specs(program, draws(program))[0])
    z, y = inputs["x"], inputs["y"]
    for _ in range(N):
        z = z - 0.3 * 2 * (z + 1.0) * y
    for place in ({"mesh": "d:1"}, {"mesh": "d:2", "layout": "a:d"}):
        found = run_text(text, None, dtype="f64", reduce=reduce, **place)
        np.testing.assert_allclose(found["z"], z, rtol=1e-12)


def test_a_number_that_enters_a_loop_in_parts_is_a_tensor() -> None:
    text = """
dim a = 2, b = 4
program p(x[b], y) {
  t = y
  repeat a {
    t = tanh(t * 0.5 + mean(x * t))
  }
  return grad(t, y)
}
sbp s { d_t: (P), x: S(0) }
"""
    (whole,) = run_text(text, None, dtype="f64", mesh="x:1").values()
    (parts,) = run_text(text, None, dtype="f64", mesh="x:2", sbp="s").values()
    np.testing.assert_allclose(parts, whole, rtol=1e-10)
