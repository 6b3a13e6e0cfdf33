"""Plans of pipelines: inside a stage no more is sent than without stages."""

from __future__ import annotations

from meshdsl.report.explanation import explain
from tests.pipelines.test_programs import compiled, hold

SEQUENCE = """
dim batch = 4, seq = 8, mem = seq, model = 8, heads = 2, key = 4, hidden = 16, layers = 4

def attend(x[batch, seq, model]) -> [batch, seq, model] {
  param wq[model, heads, key]
  param wk[model, heads, key]
  param wv[model, heads, key]
  param wo[heads, key, model]
  q = einsum(x, wq -> [batch, heads, seq, key])
  k = einsum(x, wk -> [batch, heads, seq, key])[seq -> mem]
  v = einsum(x, wv -> [batch, heads, seq, key])[seq -> mem]
  s = softmax[mem](einsum(q, k -> [batch, heads, seq, mem]))
  return einsum(einsum(s, v -> [batch, heads, seq, key]), wo -> [batch, seq, model])
}

def mlp(x[batch, seq, model]) -> [batch, seq, model] {
  param w1[model, hidden]
  param w2[hidden, model]
  return einsum(gelu(einsum(x, w1 -> [batch, seq, hidden])), w2 -> [batch, seq, model])
}

program t(x[batch, seq, model], target[batch, seq, model]) {
  repeat layers {
    x = x + attend(rms_norm[model](x))
    x = x + mlp(rms_norm[model](x))
  }
  loss = mean(square(x - target))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
RULES = "heads -> tp, hidden -> tp, x: seq -> tp"
PIECE = 4 * 8 * 8 * 4 // 2
"""What a device sends of the activations in a gather, or a scattered reduction, of one layer."""


def test_tensor_and_sequence_parallelism_in_stages_send_four_collectives_a_layer_and_pass() -> None:
    """Each of the two stages has two layers, with two gathers and two reductions a pass."""
    made = compiled(SEQUENCE, "pipe:2,tp:2", f"layers -> pipe, {RULES}", "with gpipe[batch](2)")
    by_kind = explain(made.device)["totals"]["by_kind"]
    assert by_kind["all_gather"] == by_kind["reduce_scatter"] == 2 * 2 * 2 * PIECE
    assert "all_to_all" not in by_kind
    hold(made, SEQUENCE)
