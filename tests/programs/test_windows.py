"""Operators that read beyond a block of their own dim: halos in every policy, nothing gathered."""

from __future__ import annotations

import pytest

from meshdsl.placed.place import POLICIES
from tests.programs.harness import Case, run_case

MOVED = """
dim seq = 8, model = 3, wide = seq + 4, part = seq / 2, all = wide + part

program moved(x[seq, model]) {
  param w[seq, model]
  u = x * w
  a = shift[seq](u, 2)
  b = roll[seq](a, -3) * reverse[seq](u)
  c = pad[seq -> wide](b, 1, 3, 0.5)
  d = u[seq = 1:part + 1 -> part]
  e = concat[(wide, part) -> all](c, d)
  loss = sum(e * e)
  dw, dx = grad(loss, w, x)
  return loss, e, dw, dx
}
"""
LINE = ("r:4", "{ seq -> r, wide -> r, part -> r, all -> r }")
BOTH = ("r:2,c:2", "{ seq -> (c, r), wide -> (c, r), part -> (c, r), all -> (c, r) }")


@pytest.mark.parametrize(
    ("mesh", "layout", "policy"), [*((*LINE, policy) for policy in POLICIES), (*BOTH, "deferred")]
)
def test_windows_are_sent_and_nothing_is_gathered(mesh: str, layout: str, policy: str) -> None:
    found = run_case(Case(MOVED, mesh, layout, policy))
    assert found.report["totals"]["by_kind"].keys() == {"halo", "all_reduce"}
