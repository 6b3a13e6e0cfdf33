"""Which iterations lie on which stage is told without a list of them, where they lie in order."""

from __future__ import annotations

import tracemalloc
from itertools import chain

import pytest

from tests.compiling import compile_text

TEXT = """
dim batch = 16, model = 8, layers = SIZE, out = model
mesh stages = { pipe: 2 }
layout staged { layers -> pipe } with USE
program net(x[batch, model], target[batch, model]) {
  repeat layers {
    param w[model, out]
    x = tanh(einsum(x, w -> [batch, out])[out -> model])
  }
  loss = mean(square(x - target))
  return loss
  minimize loss with sgd(lr=0.01)
}
"""


def lying(size: int, use: str) -> list[dict[str, list[list[int]]]]:
    """Which layers lie where, of each stack of parameters."""
    text = TEXT.replace("SIZE", f"{size}").replace("USE", use)
    placed = compile_text(text, layout="staged", mesh="stages").placed
    tracemalloc.start()
    try:
        found = [placed.blocks(p.tensor.value.type, p.tensor.placement) for p in placed.params]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert found
    return found


@pytest.mark.parametrize("size", [2, 8, 1_000_000])
def test_in_order_there_is_nothing_to_tell(size: int) -> None:
    assert lying(size, "one_f_one_b[batch](4)") == [{}]


def test_in_turn_each_has_its_own() -> None:
    (found,) = lying(8, "interleaved[batch](4, chunks=2)")
    assert [*chain(*found["layers"])] == [0, 1, 4, 5, 2, 3, 6, 7]
