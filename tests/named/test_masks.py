"""Attention is fused only where what is hidden has the weight 0 by its number."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.reference import run_reference
from meshdsl.named.ir import walk
from tests.compiling import named, run_text

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
