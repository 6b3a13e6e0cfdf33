"""Composite operators: the definition in the prelude, used on parts, equals the fused kernel."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.ops.opdef import load_all
from meshdsl.placed.ir import Apply, walk
from tests.compiling import compile_text, run_text

CALLS = {
    "softmax": "softmax[d](x)",
    "log_softmax": "log_softmax[d](x)",
    "logsumexp": "logsumexp[d](x)",
    "argmax": "argmax[d](x)",
    "layer_norm": "layer_norm[d](x, g, b)",
    "rms_norm": "rms_norm[d](x, g)",
    "cross_entropy": "cross_entropy[d](x, ids)",
}
PROGRAM = """
dim a = 4, d = 8
mesh grid = {{ p: 2, q: 2 }}
layout whole {{ a -> p }}
layout parts {{ d -> (q, p) }}
program test(x[a, d], g[d], b[d], ids[a]: i32) {{
  y = {call}
  return y
}}
"""


def test_every_composite_is_tried():
    assert set(CALLS) == {name for name, op in load_all().items() if op.composite}


@pytest.mark.parametrize("name", CALLS)
def test_parts_equal_the_fused_kernel(name):
    text = PROGRAM.format(call=CALLS[name])
    rng = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"x": (4, 8), "g": (8,), "b": (8,)}
    floats = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    inputs = floats | {"ids": np.array([0, 7, 3, 4], np.int32)}
    fused, parts = (run_text(text, inputs, layout=layout)["y"] for layout in ("whole", "parts"))
    np.testing.assert_allclose(parts, fused, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_one_operator_only_where_its_dim_is_whole(name):
    text = PROGRAM.format(call=CALLS[name])
    for layout, fused in (("whole", True), ("parts", False)):
        body = compile_text(text, layout=layout)["placed"].body
        names = [n.op.name for n, _ in walk(body) if isinstance(n, Apply)]
        assert (name in names) is fused
