"""`stop_gradient` stops gradients of every program, whatever else that does."""

from __future__ import annotations

import pytest
import torch

from meshdsl.backends.engines.in_process import load
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source

TEXT = """
dim batch = 4
program net(x[batch]) {
  param w[]
  y = x * w
  loss = mean(y + stop_gradient(y))
  ASSIGNED
  return loss
  minimize loss with sgd(lr=1.0)
}"""
ASSIGNED = ("", "param s[] = zeros()\n  s := mean(y)", "param s[] = zeros()\n  s := mean(x)")


@pytest.mark.parametrize("assigned", ASSIGNED, ids=["nothing", "of y", "of x"])
def test_a_stopped_gradient_is_none(assigned: str) -> None:
    source = Source("net.mdsl", TEXT.replace("ASSIGNED", assigned))
    made = compile_source(source, Options(mesh="d:1", layout="batch:d"), Diagnostics())
    program = load(made.text)
    w, x = torch.tensor(3.0), torch.tensor([1.0, 2.0, 3.0, 6.0])
    params = {"w": w, **{n: torch.tensor(0.0) for n in program.PARAMS if n != "w"}}
    states = {name: torch.tensor(0, dtype=torch.int32) for name in program.STATES}
    with torch.inference_mode():
        found = program.device(0, {}, {"x": x}, params, states)
    assert found["loss"] == 18.0  # 2 * mean(x) * w
    assert params["w"] == 0.0  # w - mean(x): the stopped half moves nothing
    assert "detach" not in made.bare
