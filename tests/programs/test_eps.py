"""Norms with an `eps` of their own: torch's float64 kernels and gradients, fused and in parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.prelude import prelude
from meshdsl.ops.normalise import USUAL_EPS
from meshdsl.syntax import ast
from tests.compiling import compile_text, run_text

EPS = 0.25
PROGRAM = """
dim batch = 2, group = 2, c = 3, h = 2, w = 5, channels = group * c
mesh m = { p: 2 }
layout whole { batch -> p }
layout parts { w -> p }
layout channels { c -> p }
program test(x[batch, group, c, h, w], t[batch, group, c, h, w], g[group, c], b[group, c], gw[w],
  bw[w]) {
  y = CALL
  dx = grad(sum(y * t), x)
  return y, dx
}
"""
CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm[w](x, gw, bw, eps=0.25)": lambda x, g, b, gw, bw: functional.layer_norm(
        x, (5,), gw, bw, EPS
    ),
    "rms_norm[w](x, gw, eps=0.25)": lambda x, g, b, gw, bw: functional.rms_norm(x, (5,), gw, EPS),
    "rms_norm[w](x, eps=0)": lambda x, g, b, gw, bw: functional.rms_norm(x, (5,), None, 0.0),
    "group_norm[c, h, w](x, g, b, eps=0.25)": lambda x, g, b, gw, bw: functional.group_norm(
        x.flatten(1, 2), 2, g.flatten(), b.flatten(), EPS
    ).unflatten(1, (2, 3)),
    "batch_norm[batch, h, w](x, g, b, eps=0.25)": lambda x, g, b, gw, bw: functional.batch_norm(
        x.flatten(1, 2), None, None, g.flatten(), b.flatten(), training=True, eps=EPS
    ).unflatten(1, (2, 3)),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_it_means(call: str) -> None:
    rng = np.random.default_rng(4)
    shapes = {"x": (2, 2, 3, 2, 5), "t": (2, 2, 3, 2, 5), "g": (2, 3), "b": (2, 3)}
    given = {n: rng.normal(size=s) for n, s in {**shapes, "gw": (5,), "bw": (5,)}.items()}
    x, t, *scales = (torch.tensor(a) for a in given.values())
    y = CALLS[call](x.requires_grad_(), *scales)
    (dx,) = torch.autograd.grad((y * t).sum(), x)
    text = PROGRAM.replace("CALL", call)
    for layout in ("whole", "parts"):
        found = run_text(text, given, layout=layout, dtype="f64")
        np.testing.assert_allclose(found["y"], y.detach(), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(found["dx"], dx, rtol=1e-11, atol=1e-12)


def test_the_fused_kernels_have_it() -> None:
    calls = "rms_norm[w](layer_norm[w](x, gw, bw, eps=0.25), eps=0.5)"
    text = compile_text(PROGRAM.replace("CALL", calls), layout="whole").emitted.text
    assert "functional.layer_norm(x, (5,), gw, bw, eps=0.25)" in text
    assert "(5,), eps=0.5)" in text
    assert "rms_norm_grad" in text
    assert "native_layer_norm_backward" in text
    norm = PROGRAM.replace("CALL", "batch_norm[batch, h, w](x, g, b, eps=0.25)")
    kernel = compile_text(norm, layout="channels").emitted.text
    assert "eps=0.25" in kernel
    usual = compile_text(PROGRAM.replace("CALL", "rms_norm[w](x, eps=1e-6)"), layout="whole")
    plain = compile_text(PROGRAM.replace("CALL", "rms_norm[w](x)"), layout="whole")
    assert usual.named.body[0].attrs == plain.named.body[0].attrs  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "code"),
    {
        "rms_norm[w](x, eps=-1.0)": "MD0213",
        'rms_norm[w](x, eps="small")': "MD0213",
        "batch_norm[batch, h, w](x, eps=-1.0)": "MD0213",
        "group_norm[c, h, w](x, eps=-1e-5)": "MD0213",
        'batch_norm[batch, h, w](x, eps="small")': "MD0254",
        "batch_norm[batch, h, w](x, eps=1e400)": "MD0007",
    }.items(),
)
def test_what_is_refused(call: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_text(PROGRAM.replace("CALL", call), layout="whole")
    assert [d.code for d in error.value.diagnostics] == [code]


def test_functions_and_operators_have_one_usual_eps() -> None:
    for name in USUAL_EPS:
        (param,) = (p for p in prelude().functions[name].params if p.name.text == "eps")
        assert isinstance(param.default, ast.Number)
        assert param.default.value == USUAL_EPS[name]
