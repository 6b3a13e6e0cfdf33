"""Experts in stages: inside a micro-batch the batch is exchanged for experts, and back.

A micro-batch has a block of every device. That its blocks are no neighbours in the whole batch is
all the same but to operators for which the index of a sample counts.
"""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.report.explanation import explain
from tests.covering import in_turn
from tests.pipelines.test_programs import compiled, hold, hold_in_turn

TEXT = """
dim group = 8, token = 8, model = 8, experts = 4, slot = 4, inner = 8, layers = 4
def expert(inside[experts, group, slot, model]) -> [experts, group, slot, model] {
  param wi[experts, model, inner]
  param wo[experts, inner, model]
  h = relu(einsum(inside, wi -> [experts, group, slot, inner]))
  INSIDE
  return einsum(h, wo -> [experts, group, slot, model])
}
program net(x[group, token, model], t[group, token, model]) {
  repeat layers {
    param wg[model, experts]
    param bias[experts] = zeros()
    gates = einsum(x, wg -> [group, token, experts]) + stop_gradient(bias)
    load = mean[group](mean[token](softmax[experts](gates)))
    bias := bias + 0.01 * sign(1 / experts - load)
    combine, dispatch, balance = top2_gating[token, experts, slot](gates)
    out = expert(einsum(dispatch, x -> [experts, group, slot, model]))
    x = x + einsum(combine, out -> [group, token, model])
  }
  loss = mean((x - t)^2)
  return loss, x
  minimize loss with adamw(lr=1e-3, clip=1.0)
}
"""
PLAIN = TEXT.replace("  INSIDE\n", "")
EXPERTS = "layers -> pipe, expert: experts -> e"
LAYOUTS = {
    "pipe:2,e:2": f"{EXPERTS}, group -> e",
    "pipe:2,data:2,e:2": f"{EXPERTS}, group -> (data, e)",
    "pipe:2,e:2,data:2": f"{EXPERTS}, group -> (e, data)",
    "pipe:2,e:2,tp:2": f"{EXPERTS}, group -> e, inner -> tp",
    "pipe:2,data:2,e:2,tp:2": f"{EXPERTS}, group -> (data, e), inner -> tp, state: model -> data",
}
SCHEDULES = (
    "one_f_one_b[group](2)", "gpipe[group](2)", "interleaved[group](2, chunks=2)",
    "zb_h1[group](2)", "zb_v[group](2)", "chimera[group](2)",
    "one_f_one_b[group](2, recompute=stage)", "one_f_one_b[group](2, reduce=each)",
)  # fmt: skip


@in_turn(mesh=LAYOUTS, use=SCHEDULES)
def test_the_numbers_of_one_device(mesh: str, use: str) -> None:
    made = compiled(PLAIN, mesh, LAYOUTS[mesh], f"with {use}")
    hold_in_turn(SCHEDULES.index(use), made, PLAIN)


def test_nothing_is_gathered() -> None:
    """All that goes over the axis of the experts is exchanged, or a sum of a step."""
    for use in ("gpipe[group](2)", "gpipe[group](4)"):
        made = compiled(PLAIN, "pipe:2,e:2", LAYOUTS["pipe:2,e:2"], f"with {use}")
        kinds = explain(made.device)["totals"]["by_kind"]
        assert kinds["all_to_all"] == 8_192  # as much in two micro-batches as in four
        assert {"all_gather", "reduce_scatter"}.isdisjoint(kinds)


IN_ORDER = {
    "dropout": "h = dropout(h, 0.5)",
    "a dropout of samples": "h = dropout[group](h, 0.5)",
    "a parameter of the samples": "param g[group]\n  h = h * g",
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_needs_the_order_of_the_batch_is_refused(name: str) -> None:
    text = TEXT.replace("INSIDE", IN_ORDER[name])
    mesh, use = "pipe:2,e:2", "with gpipe[group](2)"
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, mesh, LAYOUTS[mesh], use).checked()
    assert {d.code for d in caught.value.diagnostics} == {"MD0331"}
    assert "order" in caught.value.diagnostics[0].message
    if name == "dropout":  # Each way out that the message names is one.
        hold(compiled(text, mesh, LAYOUTS[mesh], "with gpipe[group](1)"), text)
        hold(compiled(text, mesh, "layers -> pipe, group -> e", use), text)


def test_what_does_not_differ_by_sample_needs_no_order() -> None:
    text = TEXT.replace("INSIDE", "h = h * broadcast[group](0.5 * ones[inner]())")
    mesh = "pipe:2,e:2"
    hold(compiled(text, mesh, LAYOUTS[mesh], "with gpipe[group](2)"), text)
