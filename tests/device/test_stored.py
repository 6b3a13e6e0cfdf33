"""What a step stores has memory of its own: it keeps nothing alive but itself."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from tests.device.alone import tables_of

TEXT = """
dim b = 8, d = 6, l = 4
program p(x[b, d], t[b, d]) {
  param w[d]
  param old[d] = zeros()
  param avg[d] = zeros()
  param seen[l, d] = zeros()
  old := w
  avg := 0.5 * avg + 0.5 * w
  repeat l {
    param v[d]
    seen := 0.5 * seen + 0.5 * v
    x = tanh(x * v)
  }
  loss = mean(square(x * w - t))
  return loss
  minimize loss with OPT
}
"""


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "adamw(lr=0.1, clip=0.5)"])
@pytest.mark.parametrize(
    "rules", ["", "params: d -> z", "grads: d -> z", "params: l -> z", "d -> z"]
)
def test_it_is_no_part_of_a_larger_tensor(rules: str, optimizer: str) -> None:
    text = TEXT.replace("OPT", optimizer) + f"layout chosen {{ {rules} }}\n"
    made = Compilation(Source("p.mdsl", text), Options(mesh="z:2", layout="chosen"))
    (_, params, states), run = tables_of(made)
    run()
    for name, tensor in {**params, **states}.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
