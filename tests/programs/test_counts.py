"""Known counts and bytes: what good engineers send by hand, and what papers and books say is least.

Bytes are per device, f32. Every case is also run on small sizes by the other tests.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.programs.harness import Case, counts, explained

EXAMPLES = Path(__file__).parents[2] / "examples"


def report(program: str, mesh: str, layout: str, reduce: str = "deferred", **dims: int) -> Any:
    return explained(Case(program, mesh, layout, reduce, dims))


def example(name: str, mesh: str, layout: str, **dims: int) -> Any:
    return explained(Case(text_of(name), mesh, layout, dims=dims))


def text_of(name: str) -> str:
    return (EXAMPLES / f"{name}.mdsl").read_text()


def wire(found: dict[str, Any]) -> int:
    total: int = found["totals"]["wire_bytes"]
    return total


# --- the examples -----------------------------------------------------------------------------


def test_megatron_mlp_forward_reduces_y_once() -> None:
    (only,) = example("mlp", "model:4", "megatron")["collectives"]
    assert (only["kind"], only["tensor"], only["count"]) == ("all_reduce", "y", 1)
    assert only["payload_bytes"] == 64 * 512 * 4
    assert only["wire_bytes"] == 2 * 3 * 64 * 512 * 4 // 4
    assert "`hidden -> model`" in only["why"]


@pytest.mark.parametrize("layers", [1, 4])
def test_transformer_block_forward_reduces_twice_per_layer(layers: int) -> None:
    found = example("transformer", "data:2,tp:4", "megatron", layers=layers)
    body = [c for c in found["collectives"] if c["count"] == layers and c["payload_bytes"] > 10**5]
    inside = [c for c in body if c["tensor"] != "embed" and c["line"] >= 35 and c["line"] <= 37]
    states = 4 * 128 * 256 * 4  # batch / 2, seq, model
    if layers > 1:
        assert [(c["kind"], c["axes"], c["payload_bytes"]) for c in inside] == [
            ("all_reduce", ["tp"], states)
        ] * 2
    embedding, losses = 1, 3
    assert counts(found) == {"all_reduce": embedding + 2 * layers + losses}


def test_split_vocabulary_is_never_gathered() -> None:
    """The embedding costs one all_reduce, the cross-entropy three of one number per token."""
    found = example("transformer", "tp:4", "vocab:tp", layers=1)
    tokens = 8 * 128
    payloads = [(c["kind"], c["op"], c["payload_bytes"]) for c in found["collectives"]]
    assert payloads == [
        ("all_reduce", "sum", tokens * 256 * 4),
        ("all_reduce", "max", tokens * 4),
        ("all_reduce", "sum", tokens * 4),
        ("all_reduce", "sum", 4),  # the logit of the target, only after the mean
    ]
    immediate = report(text_of("transformer"), "tp:4", "vocab:tp", "immediate", layers=1)
    assert [c["payload_bytes"] for c in immediate["collectives"][1:]] == [tokens * 4] * 3


def test_contraction_split_matmul_is_one_all_reduce() -> None:
    (only,) = example("matmul", "a:2", "contraction", inner=16)["collectives"]
    assert (only["kind"], only["op"], only["count"]) == ("all_reduce", "sum", 1)
    assert only["wire_bytes"] == 4 * 8 * 4


@pytest.mark.parametrize(("name", "dim"), [("matmul", "rows"), ("transformer", "batch")])
def test_splitting_the_batch_sends_nothing(name: str, dim: str) -> None:
    found = example(name, "a:2,data:2", f"{dim}:data")
    sent = [c for c in found["collectives"] if c["tensor"] != "loss"]
    assert sent == []


# --- one tensor, placed twice -----------------------------------------------------------------


def test_split_to_split_of_one_tensor_is_one_all_to_all() -> None:
    text = """
    dim i = 8, j = 16
    program p(x[i@a, j]) {
      y[i, j@a] = x
      return y
    }"""
    (only,) = report(text, "a:4", "{ }")["collectives"]
    assert (only["kind"], only["axes"]) == ("all_to_all", ["a"])
    assert only["payload_bytes"] == 8 * 16
    assert only["wire_bytes"] == 3 * 8 * 16 // 4


BOOK = """
dim i = {i}, j = {j}, k = {k}
program p(a[{a}], b[{b}]) {{
  c[{c}] = einsum(a, b -> [i, k])
  return c
}}"""

# The four cases of "How to Scale Your Model" (Austin et al. 2025), at sizes where each is cheapest.
CASES = {
    "neither contracting dim is split": (
        {"i": 8, "j": 8, "k": 8, "a": "i@x, j", "b": "j, k@y", "c": "i@x, k@y"},
        [],
    ),
    "one is: gather it": (
        {"i": 8, "j": 4, "k": 64, "a": "i, j@x", "b": "j, k", "c": "i, k"},
        [("all_gather", "a", 3 * 8 * 4)],
    ),
    "both are: reduce the result": (
        {"i": 8, "j": 64, "k": 8, "a": "i, j@x", "b": "j@x, k", "c": "i, k"},
        [("all_reduce", "c", 2 * 3 * 8 * 8)],
    ),
    "both others are, over one axis: gather the smaller": (
        {"i": 64, "j": 8, "k": 4, "a": "i@x, j", "b": "j, k@x", "c": "i@x, k"},
        [("all_gather", "b", 3 * 8 * 4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sharded_matmuls_of_the_scaling_book(name: str) -> None:
    fields, expected = CASES[name]
    found = report(BOOK.format(**fields), "x:4,y:2", "{ }")
    sent = [(c["kind"], c["tensor"], c["wire_bytes"]) for c in found["collectives"]]
    assert sent == expected
    for c in found["collectives"]:
        next_best = re.search(r"the cheapest alternative sends ([\d,]+) B per device", c["why"])
        assert next_best, c["why"]
        assert int(next_best[1].replace(",", "")) > c["wire_bytes"]


def test_the_same_matmul_is_done_otherwise_where_that_is_cheaper() -> None:
    """The second case with a long contraction: slice `b`, which costs nothing, and reduce."""
    fields = {"i": 8, "j": 64, "k": 4, "a": "i, j@x", "b": "j, k", "c": "i, k"}
    found = report(BOOK.format(**fields), "x:4,y:2", "{ }")
    assert counts(found) == {"all_reduce": 1}
    assert wire(found) == 2 * 3 * 8 * 4


# --- when partial sums are reduced ------------------------------------------------------------

CHAIN = """
dim m = 256, a = 128, n = {n}, k = {k}
program p(u[m, a], v[a, n], w[n, k]) {{
  y = einsum(einsum(u, v -> [m, n]), w -> [m, k])
  return y
}}"""
SUM = """
dim m = 256, a = 128, k = 256
program p(a1[m, a], b1[a, k], c1[m, a], d1[a, k]) {
  y = einsum(a1, b1 -> [m, k]) + einsum(c1, d1 -> [m, k])
  return y
}"""
TOTAL = """
dim m = 256, a = 128, k = 256
program p(u[m, a], v[a, k]) {
  y = sum(einsum(u, v -> [m, k]))
  return y
}"""
ACCUMULATED = """
dim steps = 5, b = 8, m = 16, k = 32
program p(x[steps, b, m], g[steps, b, k]) {
  total = zeros[m, k]()
  repeat steps {
    total = total + einsum(x, g -> [m, k])
  }
  return total
}"""


def ring(elements: int, n: int = 4) -> int:
    """Bytes that an all_reduce of f32 sends per device."""
    return 2 * (n - 1) * elements * 4 // n


POLICIES = {
    "narrow product, immediate": (CHAIN.format(n=1024, k=16), "a:x", "immediate", 1_572_864),
    "narrow product, deferred": (CHAIN.format(n=1024, k=16), "a:x", "deferred", 24_576),
    "wide product, immediate": (CHAIN.format(n=64, k=256), "a:x", "immediate", 98_304),
    "wide product, deferred": (CHAIN.format(n=64, k=256), "a:x", "deferred", 393_216),
    "sum of products, immediate": (SUM, "a:x", "immediate", 786_432),
    "sum of products, deferred": (SUM, "a:x", "deferred", 393_216),
    "sum of all, immediate": (TOTAL, "a:x", "immediate", ring(256 * 256)),
    "sum of all, deferred": (TOTAL, "a:x", "deferred", ring(1)),
    "accumulated, immediate": (ACCUMULATED, "b:x", "immediate", 5 * ring(16 * 32)),
    "accumulated, deferred": (ACCUMULATED, "b:x", "deferred", ring(16 * 32)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_of_a_policy(name: str) -> None:
    text, layout, policy, expected = POLICIES[name]
    found = report(text, "x:4", layout, policy)
    assert wire(found) == expected
    assert set(counts(found)) == {"all_reduce"}


PARTIALS = """
dim m = 8, a = 8, k = 4, both = 2 * k
program p(x[m, k], u[m, a], v[a, k], r[m, a], s[a, k], t[m, a]) {{
  p = einsum(u, v -> [m, k])
  q = einsum(r, s -> [m, k])
  h = einsum(t, s -> [m, k])
  {}
}}"""

# What Mesh-TensorFlow needs 1, 2, 2, 2, 2, 1, 2 and 5 all_reduces for.
ALGEBRA = {
    "return p + q": 1,
    "return p - q": 1,
    "return 2.0 * p + 2.0 * q": 1,
    "return concat[(k, k) -> both](p, q)": 1,
    "return x + p + q": 1,
    "return p + q + x": 1,
    "return -p": 1,
    "return einsum(p -> [k, m]), relu(q)": 2,
    "a1 = relu(p)\n  a2 = relu(q)\n  a3 = relu(h)\n  return p + q, p + h, a1, a2, a3": 3,
    "return p * q": 2,
    "return where(iota[m] > 3, p, q)": 1,
    "return relu(p + q)": 1,
    "return relu(p) + relu(q)": 2,
}


@pytest.mark.parametrize("statements", ALGEBRA)
def test_what_partial_sums_pass_through(statements: str) -> None:
    found = report(PARTIALS.format(statements), "x:4", "a:x")
    assert counts(found) == Counter(all_reduce=ALGEBRA[statements])


def test_two_axes_are_reduced_at_once_whatever_their_order() -> None:
    text = """
    dim m = 8, a = 8, b = 8, k = 8
    program p(u[m, a, b], v[a, b, k], w[m, b, a], z[b, a, k]) {
      y = einsum(u, v -> [m, k]) + einsum(w, z -> [m, k])
      return y
    }"""
    (only,) = report(text, "x:2,y:2", "a:x,b:y")["collectives"]
    assert (only["kind"], only["axes"], only["group_size"]) == ("all_reduce", ["x", "y"], 4)


def test_a_reduction_to_a_split_result_is_a_reduce_scatter() -> None:
    text = """
    dim m = 8, a = 8, k = 8
    program p(u[m, a@x], v[a@x, k]) {
      y[m@x, k] = einsum(u, v -> [m, k])
      return y
    }"""
    (only,) = report(text, "x:4", "{ }")["collectives"]
    assert (only["kind"], only["wire_bytes"]) == ("reduce_scatter", 3 * 8 * 8 * 4 // 4)


def test_a_parameter_placed_by_hand_in_a_loop_is_used_as_it_is_stored() -> None:
    text = """
    dim a = 4, b = 4, l = 3
    program p(x[b]) {
      repeat l {
        param w[a@x, b]
        x = x + sum[a](w)
      }
      return x
    }"""
    assert set(counts(report(text, "x:2", "{ }"))) == {"all_reduce"}


# --- a transformer block ----------------------------------------------------------------------

BLOCK = """
dim batch = 8, seq = 128, mem = seq, model = 256, heads = 8, key = 32, hidden = 1024
layout two_d { batch -> dp, heads -> tp, hidden -> tp }
program block(x[batch, seq, model]) {
  param scale1[model] = ones()
  param scale2[model] = ones()
  param wq[model, heads, key]
  param wk[model, heads, key]
  param wv[model, heads, key]
  param wo[heads, key, model]
  param w1[model, hidden]
  param w2[hidden, model]
  n = layer_norm[model](x, scale1)
  q = einsum(n, wq -> [batch, heads, seq, key])
  k = einsum(n, wk -> [batch, heads, seq, key])[seq -> mem]
  v = einsum(n, wv -> [batch, heads, seq, key])[seq -> mem]
  s = softmax[mem](einsum(q, k -> [batch, heads, seq, mem]) / sqrt(key))
  o = einsum(s, v -> [batch, heads, seq, key])
  h = x + einsum(o, wo -> [batch, seq, model])
  g = gelu(einsum(layer_norm[model](h, scale2), w1 -> [batch, seq, hidden]))
  y = h + einsum(g, w2 -> [batch, seq, model])
  return y
}"""


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
def test_a_block_forward_in_two_dimensions_sends_a_mebibyte(policy: str) -> None:
    found = report(BLOCK, "dp:2,tp:2", "two_d", policy)
    assert wire(found) == 1_048_576
    assert counts(found) == {"all_reduce": 2}


def test_sequence_parallel_norms_replace_all_reduces_by_halves() -> None:
    """The residual stream split by `seq`: a gather and a reduce_scatter for each all_reduce."""
    stream = "{ batch -> dp, heads -> tp, hidden -> tp, x: seq -> tp, h: seq -> tp, y: seq -> tp }"
    found = report(BLOCK, "dp:2,tp:2", stream)
    assert counts(found) == {"all_gather": 2, "reduce_scatter": 2}
    assert wire(found) == 1_048_576
