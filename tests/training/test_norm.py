"""The norm of the whole gradient in a training step: the same under every layout, and torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshdsl as md
from meshdsl.api.programs import read
from meshdsl.backends.engines.in_process import load, run_local
from meshdsl.backends.train.job import DataFiles, Job
from meshdsl.backends.train.training_run import planned, prepared, train
from meshdsl.diagnostics import Source

TEXT = """
dim b = 8, d = 4, h = 8, n = 2
mesh grid = {{ x: 2, y: 2 }}
layout data {{ b -> x }}
layout hidden {{ h -> y }}
layout both {{ b -> x, h -> y }}
layout zero {{ b -> (x, y), params: d -> x, grads: d -> x, state: d -> x }}
program net(x[b, d], target[b, d]) {{
  param bias[d] = normal(1.0)
  z = x + bias
  repeat n {{
    param w[d, h]
    param v[h, d]
    z = z + einsum(tanh(einsum(z, w -> [b, h])), v -> [b, d])
  }}
  loss = mean((z - target)^2)
  lr = mean(z)
  grad_norm = max(z)
  return {returned}
  minimize loss with {optimizer}
}}
"""

OPTIMIZERS = ("sgd(0.1)", "adam(clip=0.01)", "adamw(accumulate=2)")
RNG = np.random.default_rng(7)
PARAMS = {name: RNG.normal(size=shape) for name, shape in
          {"bias": (4,), "w": (2, 4, 8), "v": (2, 8, 4)}.items()}  # fmt: skip
INPUTS = {name: RNG.normal(size=(2, 8, 4)) for name in ("x", "target")}


def program(optimizer: str, returned: str = "loss") -> Any:
    return read(Source("net.mdsl", TEXT.format(optimizer=optimizer, returned=returned)), None, {})


def norm_of_torch(batches: int) -> float:
    """The norm, by autograd in float64; the gradient of several batches is their mean."""
    params = {n: torch.tensor(a, requires_grad=True) for n, a in PARAMS.items()}
    loss = torch.zeros((), dtype=torch.float64)
    for x, target in [*zip(*map(torch.tensor, INPUTS.values()), strict=True)][:batches]:
        z = x + params["bias"]
        for w, v in zip(params["w"], params["v"], strict=True):
            z = z + torch.tanh(z @ w) @ v
        loss = loss + ((z - target) ** 2).mean() / batches
    loss.backward()
    return float(torch.cat([p.grad.flatten() for p in params.values()]).norm())  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["hidden", "both", "zero"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_norm_is_that_of_the_whole_gradient(optimizer: str, layout: str) -> None:
    batches = 2 if "accumulate" in optimizer else 1
    made = program(optimizer).compile("grid", layout, dtype="f64")._made
    text = made.measured.text
    name = load(text).NORM
    given = INPUTS if batches == 2 else {n: a[0] for n, a in INPUTS.items()}
    measured, plain = run_local(text, given, PARAMS), run_local(made.text, given, PARAMS)
    assert name == "grad_norm"
    assert measured.outputs[name] == pytest.approx(norm_of_torch(batches), rel=1e-10)
    assert not hasattr(load(made.text), "NORM"), "it is computed on request alone"
    for param in PARAMS:
        np.testing.assert_allclose(measured.updated[param], plain.updated[param], rtol=1e-12)


def test_a_step_that_clips_has_the_norm_already() -> None:
    made = program("adam(clip=1.0)").compile("grid", "zero")._made
    plain, measured = (m.report["totals"] for m in (made, made.measured))
    assert measured["wire_bytes"] == plain["wire_bytes"]


def test_another_step_sends_one_number_more() -> None:
    made = program("adam(0.01)").compile("grid", "both")._made
    plain, measured = (m.report["totals"] for m in (made, made.measured))
    assert measured["collectives"] <= plain["collectives"] + 1
    assert measured["wire_bytes"] - plain["wire_bytes"] <= 2 * 4 * 2


def test_an_output_keeps_the_name_that_the_program_gives_it(tmp_path: Path) -> None:
    """In the log, too: the measured norm has another one there."""
    np.savez(tmp_path / "data.npz", **{n: a[0].astype(np.float32) for n, a in INPUTS.items()})
    made = program("sgd(0.1)", "loss, lr, grad_norm").compile("grid", "both")._made.measured
    job = Job(DataFiles(str(tmp_path / "data.npz")), 1, log=str(tmp_path / "log"))
    plan = planned(made, "local", evaluated=False)
    ending = train(plan.emitted, "local", prepared(plan, job, 0), lambda event: None)
    (record,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert set(ending.values) == {"loss", "lr", "grad_norm"}
    assert {name: record[name] for name in ending.values} == ending.values
    assert record["train_lr"] == 0.1
    assert record["train_grad_norm"] == ending.measured["grad_norm"] > 0
    assert record["memory"] > 1 << 20


def test_training_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    plan = program("sgd(linear(0.1, 10))").compile("grid", "both")
    plan.params = {n: a.astype(np.float32) for n, a in PARAMS.items()}
    done = plan.train({n: a[0].astype(np.float32) for n, a in INPUTS.items()}, 4)
    assert isinstance(plan, md.Plan)
    assert done.grad_norms[0] == pytest.approx(norm_of_torch(1), rel=1e-5)
    first = next(line for line in capsys.readouterr().err.splitlines() if "step 1/4" in line)
    assert f"lr 0.1, grad norm {done.grad_norms[0]:.4g}, memory " in first
    assert str(done) == repr(done)
    assert "\n" not in str(done)
    shown = done._repr_mimebundle_()
    assert shown["text/plain"] == str(done)
    assert "data:image/svg" in shown["text/html"]
