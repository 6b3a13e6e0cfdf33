"""Plans of least cost with blocks of several sizes: no walk is cheaper, and nothing is proven."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.place import POLICIES, cost
from meshdsl.placed.reshard import Price

TEXT = """
dim b = 3, m = M, h = H, layers = 4
mesh three = { pipe: 3 }
layout chosen { h -> pipe, grads: m -> pipe }
program p(x[m, b], target[m, b]) {
  param w2[m]
  y = x * w2
  repeat layers {
    param w5[m, h]
    param w6[h, m]
    u = relu(einsum(x, w5 -> [b, h]))
    x = x + einsum(u, w6 -> [m, b])
    x = x + 0.1 * y
  }
  loss = 0.1 * sum(square(x - target))
  return loss
  minimize loss with momentum(lr=0.02)
}
"""


@pytest.mark.parametrize(("m", "h"), [(4, 1), (6, 1), (4, 3), (6, 3), (5, 7)])
def test_no_walk_is_cheaper(m: int, h: int) -> None:
    """A search leaves rows with uneven blocks out, of which walks may take some."""
    text = TEXT.replace("= M", f"= {m}").replace("= H", f"= {h}")
    costs = {}
    for policy in POLICIES:
        options = Options(layout="chosen", reduce=policy, message_bytes=0, cache=False)
        made = Compilation(Source("net.mdsl", text), options).placed
        costs[policy] = cost(made, Price(0))[0]
        if policy == "optimal" and (m % 3 or h % 3):
            assert made.plan is not None
            assert not made.plan.least
    assert costs["optimal"] == min(costs.values())
