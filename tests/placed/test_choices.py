"""What the walks choose for an operator, and the cost by which the programs are compared."""

from __future__ import annotations

import pytest

from meshdsl.placed.place import WALKS, cost
from meshdsl.placed.reshard import Price
from meshdsl.report.explanation import explain
from tests.compiling import compile_text

TWO_VERSIONS = """
dim f = 16, a = 16, c = 4, g = 2
layout both { x: f -> d, y: a -> d, k: c -> d }
program p(x[f, a], u[g], k[a, c]) {
  y = einsum(x, u -> [f, a, g])
  z = einsum(x, k -> [f, c])
  return y, z
}
"""


def test_an_operand_is_read_in_any_of_its_versions() -> None:
    """`x` is there by `f` and by `a`: to keep it by `f` and gather the small `k` sends least."""
    made = compile_text(TWO_VERSIONS, layout="both", mesh="d:4", reduce="deferred")
    found = {c["tensor"]: c["kind"] for c in explain(made.device)["collectives"]}
    assert found == {"x": "all_to_all", "k": "all_gather", "z": "all_gather"}


IN_A_LOOP = """
dim n = 4, m = 16, o = m, l = 4
layout parts { w: m -> d, e: n -> d }
program p(x[n, m], e[n, m]) {
  y = e * x
  repeat l {
    param w[m, o]
    x = einsum(relu(x), w -> [n, o])[o -> m] + y
  }
  return x, sum(y)
}
"""


@pytest.mark.parametrize("reduce", [*WALKS, "optimal"])
def test_what_is_compared_is_what_the_report_counts(reduce: str) -> None:
    """Bytes, and collectives as often as their loop runs."""
    made = compile_text(IN_A_LOOP, layout="parts", mesh="d:4", reduce=reduce)
    totals = explain(made.device)["totals"]
    sent, collectives, _ = cost(made.placed, Price())
    assert (sent, collectives) == (totals["wire_bytes"], totals["collectives"])
    assert collectives > 4
