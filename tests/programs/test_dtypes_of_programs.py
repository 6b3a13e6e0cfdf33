"""Dtypes that nobody writes: of literals, of gradients under `--dtype`, of typed parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from tests.compiling import compile_text, named, run_text

LITERALS = {
    "x + where(x > 0, 2, 0)": "i32",
    "where(x > 0, 2, 0) * y": "i64",
    "y * maximum(where(x > 0, 2, where(x < 3, 0, 1)), -1)": "i64",
    "where(z > 0.0, where(x > 0, 2, 0), x)": "i32",
    "x - (-where(x > 0, 2, 3)) * 2": "i32",
    "mod(x, where(x > 0, 2, 3))": "i32",
    "where(x > 0, 1, 0) * z": "f32",
    "where(x > 0, 1.5, 0) + z": "f32",
    "where(x > 0, 2, 3)": "f32",
    "einsum(x, where(x > 0, 2, 0) -> [])": "i32",
    "einsum(where(x > 0, 2, 0), y -> [n])": "i64",
    "concat[(n, n) -> m](x, where(x > 0, 2, 0))": "i32",
    "einsum(z, where(x > 0, 2, 0) -> [])": "f32",
    "sum[n](where(x > 0, 2, 0))": "f32",
}


@pytest.mark.parametrize("text", LITERALS)
def test_literals_take_the_dtype_of_what_they_meet(text: str) -> None:
    inputs = "x[n]: i32, y[n]: i64, z[n]"
    program = named(f"dim n = 4, m = 8\nprogram p({inputs}) {{\n  return {text}\n}}\n")
    assert program.outputs[0].value.type.dtype.name == LITERALS[text]


ATTENTION = """dim s = 4, m = 4, k = 2
program p(q[s, k], x[m, k], v[m, k]) {
  o = attention[k, m](q, x, v)
  g = grad(sum(o * o), q)
  return g
}
"""


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_the_gradient_of_attention_in_every_dtype(dtype: str) -> None:
    rng = np.random.default_rng(0)
    inputs = {n: rng.normal(size=(4, 2)).astype(np.float32) for n in ("q", "x", "v")}
    found = run_text(ATTENTION, inputs, dtype=dtype)["g"]
    expected = run_text(ATTENTION, inputs)["g"]
    assert np.allclose(np.asarray(found, float), expected, atol=5e-2)


ROUTER = """dim m = 4, e = 2
program p(x[m]) {
  param router[m, e]: f32
  param w[m, e]
  y = einsum(x, router -> [e]) + einsum(x, w -> [e])
  loss = sum(y * y)
  minimize loss with sgd(0.1, compute="bf16")
  return loss
}
"""


def test_a_parameter_keeps_the_dtype_that_its_declaration_states() -> None:
    found = {str(p.value.name): p.value.type.dtype.name for p in named(ROUTER).params}
    assert found == {"router": "f32", "w": "bf16"}


@pytest.mark.parametrize(("mesh", "layout"), [("a:1", ""), ("a:2", "m:a"), ("a:2", "e:a")])
def test_typed_parameters_learn_as_in_torch(mesh: str, layout: str) -> None:
    """The router is rounded for products, and never where it is kept."""
    made = compile_text(ROUTER, mesh=mesh, layout=layout or None).emitted
    rng = np.random.default_rng(2)
    start = {n: rng.normal(size=(4, 2)).astype(np.float32) for n in ("router", "w")}
    start["w"] = np.asarray(torch.tensor(start["w"]).bfloat16().float())
    x = np.array([1, -0.5, 0.25, 0.75], np.float32)
    kept = torch.tensor(start["router"])
    master = torch.tensor(start["w"])
    params: dict[str, Any] = dict(start)
    for _ in range(3):
        done = run_local(made.text, {"x": x}, params, lines=made.places)
        leaves = [kept.clone().requires_grad_(), master.clone().requires_grad_()]
        narrow = torch.tensor(x).bfloat16()
        y = narrow @ leaves[0].bfloat16() + narrow @ leaves[1].bfloat16()
        loss = (y * y).sum()
        loss.backward()
        grads = [leaf.grad for leaf in leaves]
        assert grads[0] is not None
        assert grads[1] is not None
        kept, master = kept - 0.1 * grads[0], master - 0.1 * grads[1]
        master = master.bfloat16().float()  # each run copies w anew
        params = {n: np.asarray(done.updated[n]) for n in ("router", "w")}
        np.testing.assert_allclose(done.outputs["loss"], loss.item(), atol=2e-2)
        np.testing.assert_allclose(params["router"], kept, atol=2e-2)
        np.testing.assert_allclose(params["w"], master, atol=2e-2)
    assert not torch.equal(kept, kept.bfloat16().float())
    router = torch.tensor(np.asarray(params["router"]))
    assert not torch.equal(router, router.bfloat16().float())


STATED = """dim seq = 300, d = 4, n = 3
mesh two = { p: 2 }
layout l { seq -> p }
program p(x[seq, d]) {
  param router[d]: f32
  angle = cast(iota[seq], f32) * 0.3
  total = zeros[seq]()
  carried = cast(iota[seq], f32)
  repeat n {
    total = total + cos(angle)
    carried = carried + x[d = 0]
  }
  y = x * cos(angle) * router
  loss = sum(square(y)) / 300.0
  dx, drouter = grad(loss, x, router)
  return angle, total, carried, y, dx, drouter
}
"""


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_what_a_program_states_is_kept_under_a_narrower_dtype(dtype: str) -> None:
    """Angles are those of f32, in a loop and on two devices, and cast where they meet others."""
    rng = np.random.default_rng(3)
    x, router = (rng.integers(-8, 9, s) / np.float32(8) for s in ((300, 4), 4))  # exact in all
    made = compile_text(STATED, dtype=dtype, layout="l")
    types = {str(o.value.name or o.name): o.value.type.dtype.name for o in made.named.outputs}
    stated = "f64" if dtype == "f64" else "f32"
    assert (types["angle"], types["carried"]) == (stated, stated)
    assert (types["total"], types["y"], types["dx"]) == (dtype, dtype, dtype)
    assert [p.value.type.dtype.name for p in made.named.params] == [stated]
    run = run_local(made.emitted.text, {"x": x}, {"router": router}, lines=made.emitted.places)
    found = {name: np.asarray(a, float) for name, a in run.outputs.items()}
    angle = np.arange(300)[:, None] * 0.3
    y = x * np.cos(angle) * router
    slope = 2 * y * np.cos(angle) / 300
    exact = {
        "angle": angle[:, 0],
        "carried": np.arange(300) + 3 * x[:, 0],
        "total": 3 * np.cos(angle)[:, 0],
        "y": y,
        "dx": slope * router,
        "drouter": (slope * x).sum(0),
    }
    for name, wanted in exact.items():
        atol = {"angle": 3e-5, "carried": 6.0}.get(name, 0.05) if dtype != "f64" else 1e-12
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=atol, err_msg=name)
    narrow = torch.tensor(angle).bfloat16().double().numpy()
    assert np.abs(angle - narrow).max() > 0.1  # what bf16 would have made of them
