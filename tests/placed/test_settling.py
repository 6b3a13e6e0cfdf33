"""A rule says where a value settles, not how it is made: what large models send, and small ones."""

from __future__ import annotations

from typing import Any

import pytest

from meshdsl.placed.ir import EVERY, Reshard, walk
from meshdsl.placed.place import WALKS, cost
from meshdsl.report.explanation import explain
from tests.compiling import compile_text

GATED = """
dim batch = 4, seq = 64, model = 64, hidden = 128
mesh tp = { tp: 4 }
layout sp { seq -> tp, hidden -> tp, mlp: seq -> none }

def mlp(x[batch, seq, model]) -> [batch, seq, model] {
  param w1[model, hidden]
  param w3[model, hidden]
  param w2[hidden, model]
  h = silu(einsum(x, w1 -> [batch, seq, hidden])) * einsum(x, w3 -> [batch, seq, hidden])
  return einsum(h, w2 -> [batch, seq, model])
}

program p(x[batch, seq, model], y[batch, seq, model]) {
  param g[model] = ones()
  z = mlp(rms_norm[model](x, g))
  loss = mean(square(z - y))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""

LLAMA = """
dim batch = 16, seq = 8192, mem = seq, model = 4096, kv = 8, group = 4, key = 128
dim hidden = 14336, vocab = 128256, layers = 32
mesh tp = { tp: 8 }
layout everywhere { seq -> tp, kv -> tp, hidden -> tp, attend: seq -> none, mlp: seq -> none }
layout residual { kv -> tp, hidden -> tp, vocab -> tp, x: seq -> tp }

def attend(x[batch, seq, model]) -> [batch, seq, model] {
  param wq[model, kv, group, key] = normal(0.02)
  param wk[model, kv, key] = normal(0.02)
  param wv[model, kv, key] = normal(0.02)
  param wo[kv, group, key, model] = normal(0.02)
  q = einsum(x, wq -> [batch, kv, group, seq, key])
  k = einsum(x, wk -> [batch, kv, seq, key])
  v = einsum(x, wv -> [batch, kv, seq, key])
  o = attention[key, mem](q, k[seq -> mem], v[seq -> mem], iota[seq] >= iota[mem])
  return einsum(o, wo -> [batch, seq, model])
}

def mlp(x[batch, seq, model]) -> [batch, seq, model] {
  param w1[model, hidden] = normal(0.02)
  param w3[model, hidden] = normal(0.02)
  param w2[hidden, model] = normal(0.02)
  h = silu(einsum(x, w1 -> [batch, seq, hidden])) * einsum(x, w3 -> [batch, seq, hidden])
  return einsum(h, w2 -> [batch, seq, model])
}

program llama3(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model] = normal(0.02)
  param head[model, vocab] = normal(0.02)
  param g[model] = ones()
  x = embed[vocab = tokens]
  repeat layers {
    param g1[model] = ones()
    param g2[model] = ones()
    x = x + attend(rms_norm[model](x, g1))
    x = x + mlp(rms_norm[model](x, g2))
  }
  logits = einsum(rms_norm[model](x, g), head -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with adamw(lr=3e-4, clip=1.0)
}
"""

EXPERTS = """
dim batch = 4, experts = 8, slot = 16, model = 32, hidden = 24
mesh four = { data: 4 }
layout expert_parallel { batch -> data, work: experts -> data, work: batch -> none }

def work(inside[batch, experts, slot, model]) -> [batch, experts, slot, model] {
  param w1[experts, model, hidden]
  param w3[experts, model, hidden]
  param w2[experts, hidden, model]
  gate = silu(einsum(inside, w1 -> [batch, experts, slot, hidden]))
  h = gate * einsum(inside, w3 -> [batch, experts, slot, hidden])
  return einsum(h, w2 -> [batch, experts, slot, model])
}

program p(x[batch, experts, slot, model], y[batch, experts, slot, model]) {
  param g[model] = ones()
  inside = x * g
  o = work(inside)
  loss = mean(square(o - y))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""

JOINED = """
dim b = 2, d = 4, g6 = 8
mesh two = { x: 2 }
layout l { d -> x, g6 -> x }
program p(u[b, d], ids[b, d]: i32) {
  t5[b@x, d] = cast(ids, f32)
  t10 = relu(u)
  t = concat[(d, d) -> g6](t10, t5)
  return t
}
"""


def kinds(text: str, **options: Any) -> list[str]:
    """The kinds of all collectives, each as often as it runs."""
    placed = compile_text(text, cache=False, **options).placed
    moves = ((n, k) for n, k in walk(placed.body) if isinstance(n, Reshard))
    return [s.kind for n, k in moves for s in n.route.steps if s.moves for _ in range(k)]


def test_cotangents_are_added_before_they_are_scattered() -> None:
    """Two gathers and two reduce_scatters of the activations; the norm's gain, and the loss."""
    made = compile_text(GATED, layout="sp", cache=False)
    sent = explain(made.device)["totals"]["wire_bytes"]
    assert sent == 4 * (4 * 64 * 64 * 4) * 3 // 4 + 2 * 64 * 4 * 3 // 4 + 6
    for policy in ("deferred", "optimal"):
        assert kinds(GATED, layout="sp", reduce=policy).count("reduce_scatter") == 2


@pytest.mark.parametrize("layout", ["everywhere", "residual"])
def test_sequence_parallelism_sends_what_megatron_does(layout: str) -> None:
    """Two gathers and two reduce_scatters in a layer and pass, of 1 GiB each over 8 devices."""
    made = compile_text(LLAMA, layout=layout, dtype="bf16", cache=False)
    plan, totals = made.placed.plan, explain(made.device)["totals"]
    assert plan is not None
    assert plan.least
    assert totals["collectives"] <= 265
    assert totals["wire_bytes"] <= 227.5 * 2**30
    every = kinds(LLAMA, layout=layout, dtype="bf16")
    # Beside those of activations, a few of gradients.
    assert all(128 <= every.count(kind) < 136 for kind in ("all_gather", "reduce_scatter"))


def test_cotangents_of_experts_are_added_before_they_are_exchanged() -> None:
    """Tokens go to their experts and back, and so do cotangents."""
    assert kinds(EXPERTS, layout="expert_parallel").count("all_to_all") == 4


def test_rules_that_contradict_each_other_leave_every_row() -> None:
    """Of a concat of split dims no row suits the rules: a policy took one that was not searched."""
    made = compile_text(JOINED, layout="l", cache=False)
    plan = made.placed.plan
    assert plan is not None
    assert plan.searched == EVERY
    price = made.options.search().price
    for policy in WALKS:
        walked = compile_text(JOINED, layout="l", reduce=policy).placed
        assert cost(made.placed, price) <= cost(walked, price), policy


OWN = """
dim batch = 4, model = 4, hidden = 8
mesh m = { a: 2 }
layout split { hidden -> a, h: batch -> a }
layout other { batch -> a, h: hidden -> a }
layout whole { hidden -> a, h: hidden -> none }
layout pinned { hidden -> a }
program p(x[batch, model]) {
  param w[model, hidden]
  param v[hidden, model]
  h = relu(einsum(x, w -> [batch, hidden]))
  return einsum(h, v -> [batch, model])
}
"""
PINNED = OWN.replace("h = relu", "h[batch@a, hidden] = relu")


@pytest.mark.parametrize("reduce", ["optimal", "deferred", "immediate"])
@pytest.mark.parametrize(
    ("text", "layout", "splits"),
    [
        (OWN, "split", "S(batch)"),
        (OWN, "other", "S(hidden)"),
        (OWN, "whole", "B"),
        (PINNED, "pinned", "S(batch)"),
    ],
)
def test_a_rule_of_its_own_is_followed_though_a_linear_reader_would_pass_the_value_on(
    text: str, layout: str, splits: str, reduce: Any
) -> None:
    tensors = explain(compile_text(text, layout=layout, reduce=reduce, cache=False).device)[
        "tensors"
    ]
    (h,) = (t for t in tensors if t["name"] == "h")
    assert h["placement"] == {"a": splits}
