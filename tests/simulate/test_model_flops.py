"""The FLOPs that a model needs: of experts, those of the tokens that they get."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Options, compile_source
from meshdsl.simulate.model import model_flops

EXAMPLE = Path("examples/moe.mdsl")
BY_INDEX = """
dim token = 16, model = 64, hidden = 6, experts = 4, choice = 2, slot = 16
dim pairs = token * choice, slots = experts * slot, all = slots + 1

def expert(x[experts, slot, model]) -> [experts, slot, model] {
  param w1[experts, model, hidden]
  param w2[experts, hidden, model]
  return einsum(relu(einsum(x, w1 -> [experts, slot, hidden])), w2 -> [experts, slot, model])
}

program routed(x[token, model]) {
  param gate[model, experts]
  logits = einsum(x, gate -> [token, experts])
  part, to, from, full, aux = top_k_routing[token, experts, choice, slot, pairs, slots, all](logits)
  o = expert((x[token = from] * full)[slots -> (experts, slot)])
  o = o[(experts, slot) -> slots]
  loss = sum(square(sum[choice](part * o[slots = to])))
  return loss
  minimize loss with sgd(lr=1.0)
}
"""


def named(source: Source, **sizes: int) -> NamedProgram:
    """A program on named dims, with sizes of its own."""
    options = Options(mesh="d:1", layout="model:d", set_dims=sizes)
    return compile_source(source, options, Diagnostics()).placed.named


@pytest.mark.parametrize("slot", [16, 24, 64])
def test_slots_that_stay_empty_need_nothing(slot: int) -> None:
    """GShard's products with one-hot tensors, with room for all tokens and far more."""
    source = Source(str(EXAMPLE), EXAMPLE.read_text())
    exact = sum(model_flops(named(source, slot=8)).values())
    assert sum(model_flops(named(source, slot=slot)).values()) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("slot", [8, 16, 64])
def test_experts_compute_on_the_tokens_that_are_routed_to_them(slot: int) -> None:
    """By indices: products of `token * choice` rows, and their gradients but that of the tokens."""
    source = Source("routed.mdsl", BY_INDEX)
    wide, narrow = (
        sum(model_flops(named(source, slot=slot, hidden=hidden)).values()) for hidden in (1006, 6)
    )
    rows = 16 * 2
    products = 5 * 2 * rows * 64 * 1000
    assert wide - narrow == pytest.approx(products, rel=0.1)
    assert wide - narrow >= products
