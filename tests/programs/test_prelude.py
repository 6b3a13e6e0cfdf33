"""Composite operators: the definition in the prelude, used on parts, equals the fused kernel."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.ops.opdef import load_all
from meshdsl.placed.ir import Apply, Reshard, walk
from meshdsl.prove.sample_values import signature
from tests.compiling import compile_text, run_text

ATTENTION = "attention[k, d](c[a -> k, d -> f], c[a -> k], x)"
BATCH_NORM = "(x - mean[d](x)) * rsqrt(mean[d](square(x - mean[d](x))) + 0.001) * e + e"
CALLS = {
    "attention": ATTENTION,
    "softmax": "softmax[d](x)",
    "log_softmax": "log_softmax[d](x)",
    "logsumexp": "logsumexp[d](x)",
    "argmax": "argmax[d](x)",
    "layer_norm": "layer_norm[d](x, g, b)",
    "rms_norm": "rms_norm[d](x, g)",
    "cross_entropy": "cross_entropy[d](x, ids)",
    # Of those that no program can call, the gradient that is made of them.
    "attention_lse": f"grad(sum(square({ATTENTION})), c)",
    "attention_grad": f"grad(sum(square({ATTENTION})), c)",
    "batch_norm_stats": BATCH_NORM,
    "batch_norm_grad": f"grad(sum(({BATCH_NORM}) * c), x)",
    "softmax_grad": "grad(sum(softmax[d](x) * c), x)",
    "log_softmax_grad": "grad(sum(log_softmax[d](x) * c), x)",
    "layer_norm_grad": "grad(sum(layer_norm[d](x, g, b) * c), x)",
    "rms_norm_grad": "grad(sum(rms_norm[d](x, g) * c), x)",
    "cross_entropy_grad": "grad(sum(cross_entropy[d](x, ids) * e), x)",
}
"""An expression for every composite."""
RUNNING = {
    "cumsum": "cumsum[d](x)",
    "its gradient": "grad(sum(cumsum[d](x) * c), x)",
    "without the element": "cumsum[d](x, exclusive=1)",
    "from the end": "cumsum[d](x, reverse=1)",
    "both": "cumsum[d](x, 1, 1)",
}
"""The same of what is computed in blocks where its dim is split."""
PROGRAM = """
dim a = 4, d = 8, k = a, f = d
mesh grid = {{ p: 2, q: 2 }}
layout whole {{ a -> p }}
layout parts {{ d -> (q, p) }}
program test(x[a, d], c[a, d], e[a], g[d], b[d], ids[a]: i32) {{
  y = {call}
  return y
}}
"""


def test_every_composite_is_tried():
    composites = {name: op for name, op in load_all().items() if op.composite}
    assert set(CALLS) == {name for name, op in composites.items() if not is_split_along_all(op)}


def is_split_along_all(op):
    """Whether all dims of an operator are in loops, so that it is one operator under any split."""
    sig = signature(op, op.samples[0])
    loops = {name for loop in op.factors(sig).loops for name in (*loop.ins, *loop.outs)}
    return loops.issuperset(n for t in (*sig.ins, *sig.outs) for n in t.names)


SEVERAL = ["argmax(x)", "argmax[d, a](x)", "logsumexp(x)", "grad(logsumexp[d, a](x * c), x)"]
"""Calls over several dims, some of which are split."""


@pytest.mark.parametrize("call", [*CALLS.values(), *RUNNING.values(), *SEVERAL])
def test_parts_equal_the_fused_kernel(call):
    text = PROGRAM.format(call=call)
    rng = np.random.default_rng(1)
    shapes = {"x": (4, 8), "c": (4, 8), "e": (4,), "g": (8,), "b": (8,)}
    floats = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    inputs = floats | {"ids": np.array([0, 7, 3, 4], np.int32)}
    fused, parts = (run_text(text, inputs, layout=layout)["y"] for layout in ("whole", "parts"))
    np.testing.assert_allclose(parts, fused, rtol=2e-6, atol=1e-6)


def test_the_index_over_several_dims_is_row_major_in_the_order_of_the_call():
    x = np.random.default_rng(3).integers(-2, 3, (4, 8)).astype(np.float32)
    calls = {"argmax[a, d](x)": x, "argmax(x)": x, "argmax[d, a](x)": x.T}
    for call, array in calls.items():
        for layout in ("whole", "parts"):
            text = PROGRAM.replace("g[d], b[d], ids[a]: i32", "q[a]").format(call=call)
            inputs = {"x": x, "c": x, "e": x[:, 0], "q": x[:, 0]}
            assert run_text(text, inputs, layout=layout)["y"] == array.argmax()


@pytest.mark.parametrize("name", CALLS)
def test_it_is_one_operator_only_where_its_dim_is_whole(name):
    text = PROGRAM.format(call=CALLS[name])
    for layout, fused in (("whole", True), ("parts", False)):
        body = compile_text(text, layout=layout).placed.body
        names = [n.name for n, _ in walk(body) if isinstance(n, Apply)]
        assert (name in names) is fused


@pytest.mark.parametrize("call", RUNNING.values())
def test_running_sums_exchange_a_number_for_each_block(call):
    text = PROGRAM.format(call=call)
    body = compile_text(text, layout="parts", reduce="deferred").placed.body
    sent = [n.source.value.type.names for n, _ in walk(body) if isinstance(n, Reshard)]
    assert ("a", "d") not in sent
    assert ("a", "d.blocks") in sent


@pytest.mark.parametrize("name", sorted({*CALLS} - {"batch_norm_grad"}))
def test_what_it_is_made_of_belongs_to_its_phase(name):
    """The gradient of a batch norm is made of what yields its results alone."""
    body = compile_text(PROGRAM.format(call=CALLS[name]), layout="parts").placed.body
    phases = {n.phase for n, _ in walk(body) if isinstance(n, Apply) and name in made_in(n)}
    assert phases == {"backward" if name.endswith("_grad") else "forward"}


def made_in(node):
    """The calls that the results of an operator come from."""
    return node.outs[0].value.functions
