"""Attention is fused only where what is hidden has the weight 0 by its number."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.reference import run_reference
from meshdsl.named.ir import walk
from tests.compiling import compile_text, named, run_text

TEXT = """
dim s = 4, m = 4, k = 2
program p(q[s, k], key[m, k], v[m, k]) {
  scores = einsum(q, key -> [s, m])
  scores = where(iota[s] >= iota[m], scores, HIDDEN)
  o = einsum(softmax[m](scores), v -> [s, k])
  return o
}
"""
FUSED = {"-1e9": True, "-1e30": True, "-1.0": False, "0.0": False, "-30.0": False, "1.0": False}


@pytest.mark.parametrize("hidden", FUSED)
def test_a_mask_is_fused_where_its_number_hides(hidden: str) -> None:
    """A softmax over all of `m` by hand: what is masked with -1 has a weight."""
    rng = np.random.default_rng(5)
    given = {n: rng.normal(size=(4, 2)).astype("float32") for n in ("q", "key", "v")}
    scores = given["q"].astype(float) @ given["key"].T
    scores = np.where(np.tri(4, dtype=bool), scores, float(hidden))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights / weights.sum(1, keepdims=True) @ given["v"]
    text = TEXT.replace("HIDDEN", hidden)
    np.testing.assert_allclose(run_text(text, given)["o"], expected, rtol=1e-5, atol=1e-6)
    program = named(text, fused=False)
    np.testing.assert_allclose(run_reference(program, given, {})["o"], expected, rtol=1e-5)
    assert any(op.name == "attention" for op in walk(named(text).body)) == FUSED[hidden]


CACHE = """
dim heads = 2, m = 4, k = 2
program p(q[heads, k], new[heads, k], v[m, heads, k], pos[]: i32) {
  param cache[m, heads, k] = zeros()
  keys = put[m = pos](cache, new)
  scores = where(iota[m] <= pos, einsum(q, keys -> [heads, m]), -1e9)
  o = einsum(softmax[m](scores), v -> [heads, k])
  cache := keys
  return o
}
"""


@pytest.mark.parametrize("layout", ["heads -> a", "m -> a", "k -> a"])
def test_attention_up_to_a_number_reads_no_mask(layout: str) -> None:
    """On one device and with each dim split; where memory or keys are, a mask is written out."""
    rng = np.random.default_rng(6)
    given = {n: rng.normal(size=(2, 2)).astype("float32") for n in ("q", "new")}
    given |= {"v": rng.normal(size=(4, 2, 2)).astype("float32"), "pos": np.array(2, np.int32)}
    scores = np.zeros((2, 3))
    scores[:, 2] = (given["q"].astype(float) * given["new"]).sum(1)
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = np.einsum("hm,mhk->hk", weights, given["v"][:3])
    compilation = compile_text(CACHE, layout=layout, mesh="a:2")
    assert ("attention_up_to(" in compilation.emitted.text) == layout.startswith("heads")
    run = run_local(compilation.emitted.text, given, {"cache": np.zeros((4, 2, 2), "f4")})
    np.testing.assert_allclose(run.outputs["o"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(run.updated["cache"][2], given["new"])
    reference = run_reference(named(CACHE), given, {"cache": np.zeros((4, 2, 2), "f4")})
    np.testing.assert_allclose(reference["o"], expected, rtol=1e-5)
