"""Programs that take gradients, each for one operator that only gradients are made of."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source

GRADS = {
    "relu_grad": "relu(x) * c",
    "tanh_grad": "tanh(x) * c",
    "sigmoid_grad": "sigmoid(x) * c",
    "silu_grad": "silu(x) * c",
    "gelu_grad": 'gelu(x) * gelu(c, approximate="tanh")',
    "softmax_grad": "softmax[d](x) * c",
    "log_softmax_grad": "log_softmax[d](x) * c",
    "layer_norm_grad": "layer_norm[d](x, g, b) * c",
    "rms_norm_grad": "rms_norm[d](x, g) * c",
    "cross_entropy_grad": "cross_entropy[d](x, ids) * e",
    "broadcast": "sum[d](x) + e",
    "unpick": "x[d = 2] * e",
    "scatter_add": "x[a = ids[a -> k]], v",
}
"""The expression differentiated by x, for every operator that gradients consist of.

It is contracted with another tensor before, so that under `inner` its own gradient is partial.
"""

_HEAD = """
dim a = 4, k = 4, d = 8, m = 4, n = 3
layout rows { a -> p }
layout both { a -> p, d -> q }
layout inner { m -> q }
"""
_PROGRAM = """
program test(x[a, d], c[a, d], e[a], g[d], b[d], u[a, m], v[k, m], ids[a]: i32) {{
  dx = grad(sum(einsum({expression} -> [m])), x)
  return dx
}}
"""
_LOOP = """
program test(x[a, d], c[a, d]) {
  param w[n, d]
  loss = 0.0
  repeat n {
    x = tanh(x * w)
    loss = loss + sum(x * c)
  }
  dw = grad(loss, w)
  return dw, loss
}
"""
LAYOUTS = ("rows", "both", "inner")
MESHES = {2: "p:1,q:2", 4: "p:2,q:2"}


def texts() -> Iterator[tuple[str, str]]:
    """The name and the text of every program."""
    for name, expression in GRADS.items():
        whole = expression if expression.endswith("v") else f"{expression}, u"
        yield name, _HEAD + _PROGRAM.format(expression=whole)
    yield "loop", _HEAD + _LOOP


def compiled(text: str, layout: str, mesh: str, reduce: str) -> Compilation:
    """The stages up to the placed program."""
    options = Options(mesh=mesh, layout=layout, reduce=reduce)
    return compile_source(Source("gradient.mdsl", text), options, Diagnostics(), "placed")
