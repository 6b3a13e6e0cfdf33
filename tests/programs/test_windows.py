"""Operators that read beyond a block of their own dim: halos in every policy, nothing gathered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.placed.place import POLICIES
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.covering import covered
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


@covered(size=(1, 2, 3, 5), stride=(1, 2, 3), layout=("", "h:r,ho:r", "w:r,wo:r"))
def test_means_of_elements_alone_are_those_of_torch(size: int, stride: int, layout: str) -> None:
    """And so are their gradients; that padding is left out sends nothing more."""
    h, w, pad = 7, 10, size // 2
    ho, wo = ((n + 2 * pad - size) // stride + 1 for n in (h, w))
    call = f"avg_pool[h by {size} -> ho, w by {size} -> wo](x, stride={stride}, pad={pad}"
    made = [
        compile_text(
            f"dim h = {h}, w = {w}, ho = {ho}, wo = {wo}\nprogram p(x[h, w], v[ho, wo]) {{\n"
            f"  y = {call}, pad_counts={counts})\n  dx = grad(sum(y * v), x)\n  return y, dx\n}}\n",
            mesh="r:3",
            layout=layout,
        )
        for counts in (0, 1)
    ]
    totals = [explain(m.device)["totals"] for m in made]
    assert totals[0]["by_kind"] == totals[1]["by_kind"]
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(h, w)), "v": rng.normal(size=(ho, wo))}
    found = run_local(made[0].text, inputs).outputs
    x, v = (torch.tensor(inputs[n], dtype=torch.float32) for n in ("x", "v"))
    x.requires_grad_()
    y = torch.nn.functional.avg_pool2d(x[None], size, stride, pad, count_include_pad=False)[0]
    (y * v).sum().backward()
    assert x.grad is not None
    for name, expected in (("y", y.detach()), ("dx", x.grad)):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
