"""Evaluation under schedules that update on the way: the numbers of one device, on whole batches.

A micro-batch of such a training step is a batch of its own, so steps are accepted that no schedule
with a cut can take. Their forward passes, and those of other programs of the file, are too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.checks import check_source
from meshdsl.schedule.registry import schedules
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.covering import in_turn
from tests.pipelines.test_programs import hold_bytes, hold_to

__all__ = ["cli"]

ASYNCHRONOUS = [name for name, known in schedules().items() if known.asynchronous]

TEXT = """
dim batch = 16, model = 4, out = model, l = 4
mesh one = { pipe: 1 }
layout whole {}
program step(x[batch, model], t[batch, model]) {
  repeat l {
    param w[model, out] = normal(0.6)
    x = tanh(einsum(x, w -> [batch, out]))[out -> model]
    INSIDE
  }
  BEHIND
  loss = mean(square(x - t))
  return loss, NUMBER
  minimize loss with sgd(lr=0.1)
}
program other(x[batch, model], weight[batch]) {
  repeat l {
    param w[model, out] = normal(0.6)
    x = tanh(einsum(x, w -> [batch, out]))[out -> model]
    INSIDE
  }
  x = x * weight
  BEHIND
  return x, NUMBER
}
"""
BATCH_NORM = ("x = x - mean[batch](x)", "top = mean(square(x))", "top")
LARGEST = ("", "top = max(x)", "top")
PRODUCT = ("", "top = prod(x)", "top")
WEIGHTED = ("", "top = sum(x * x) / sum(abs(x))", "top")
TOTAL = ("", "top = sum(x)", "top")
PROGRAMS = {
    "batch norm": BATCH_NORM, "largest": LARGEST, "product": PRODUCT, "weighted": WEIGHTED,
    "total": TOTAL,
}  # fmt: skip
LAYOUTS = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "data:2,pipe:2": "l -> pipe, batch -> data",
    "pipe:2,data:2": "l -> pipe, x: batch -> data",
    "pipe:2,tp:2": "l -> pipe, model -> tp",
}
"""In one of them the inputs of a batch are on different devices, which cannot be cut (MD0331)."""


def text_of(name: str) -> str:
    text = TEXT
    for key, line in zip(("INSIDE", "BEHIND", "NUMBER"), PROGRAMS[name], strict=True):
        text = text.replace(key, line)
    return text


def laid_out(name: str, mesh: str, schedule: str) -> str:
    return f"{text_of(name)}\nlayout apart {{ {LAYOUTS[mesh]} }} with {schedule}[batch](4)\n"


def compiled(text: str, program: str, mesh: str, layout: str | None = None) -> Compilation:
    options = Options(program=program, mesh=mesh, layout=layout, dtype="f64")
    return Compilation(Source("p.mdsl", text), options)


@in_turn(mesh=LAYOUTS, name=PROGRAMS, schedule=ASYNCHRONOUS, program=("step", "other"))
def test_the_numbers_of_one_device(name: str, schedule: str, mesh: str, program: str) -> None:
    """And parameters are where the layout has them: by stage."""
    text = laid_out(name, mesh, schedule)
    made = compiled(text, program, mesh, "apart").checked().evaluation
    alone = compiled(text_of(name), program, "one").evaluation
    found, one = (run_local(c.text, seed=3) for c in (made, alone))
    assert not found.disagreements()
    hold_to(found.outputs, one.outputs, 1e-12)
    hold_bytes(found, made)
    (w,) = (v for v in made.device.params if v.value.name == "w")
    assert w.placement.axes_of("l") == ("pipe",)


@in_turn(name=PROGRAMS, schedule=ASYNCHRONOUS)
def test_what_can_be_cut_runs_in_stages(name: str, schedule: str) -> None:
    made = compiled(laid_out(name, "pipe:2", schedule), "step", "pipe:2", "apart")
    assert (made.evaluation.placed.pipe is not None) == (name in ("total", "weighted"))


@pytest.mark.parametrize(("name", "code"), [("batch norm", "MD0332"), ("largest", "MD0333")])
def test_schedules_that_drain_refuse_it_for_the_step_too(name: str, code: str) -> None:
    text = laid_out(name, "pipe:2", "one_f_one_b")
    for program in ("step", "other"):
        with pytest.raises(DiagnosticError) as caught:
            compiled(text, program, "pipe:2", "apart").checked()
        assert [d.code for d in caught.value.diagnostics] == [code]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_check_accepts_them(schedule: str) -> None:
    source = Source("p.mdsl", laid_out("batch norm", "pipe:2", schedule))
    found = Diagnostics()
    check_source(source, Options(mesh="pipe:2", layout="apart"), found)
    assert not found.errors


CUT = """
dim batch = 8, io = 6
mesh two = { pipe: 2 }
layout cut { h2: pipe = 1 } with pipedream[batch](2)
program net(x[batch, io], t[batch]) {
  param w[io]
  param v[io]
  h1 = tanh(x * w)
  h2 = tanh(h1 * v)
  loss = mean(square(sum[io](h2) - t))
  return loss
  minimize loss with sgd(0.1)
}
"""


def test_check_notes_what_devices_cannot_run() -> None:
    """The file is right: the reference engine trains it."""
    found = Diagnostics()
    check_source(Source("p.mdsl", CUT), Options(), found)
    assert [(d.code, d.severity) for d in found] == [("MD0335", "note")]


def outputs_of(found: Any) -> dict[str, Any]:
    return {name: np.asarray(found[name]) for name in found.keys()}


def _arrays(rows: int = 32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, 4)) for name in ("x", "t")}


@in_turn(schedule=ASYNCHRONOUS, name=("batch norm", "largest"))
def test_in_python(name: str, schedule: str, tmp_path: Path) -> None:
    """A trained plan is called, evaluated while it trains, and gives another program its parts."""
    (tmp_path / "p.mdsl").write_text(laid_out(name, "pipe:2", schedule), encoding="utf-8")
    data = _arrays()
    batch = {key: array[:16] for key, array in data.items()}
    step, other = (md.load(tmp_path / "p.mdsl", program=p) for p in ("step", "other"))
    plan = step.compile("pipe:2", "apart", dtype="f64")
    rest = {key: array[16:] for key, array in data.items()}
    done = plan.train(data, 3, eval_every=1, eval_data=rest, progress=False)
    one = step.compile("one", "whole", dtype="f64")
    one.params = plan.params
    hold_to(outputs_of(done.evaluated), outputs_of(one(**rest)), 1e-12)
    hold_to(outputs_of(plan(**batch)), outputs_of(one(**batch)), 1e-12)
    inputs = {"x": batch["x"], "weight": np.arange(16.0)}
    found: list[dict[str, Any]] = []
    for mesh, layout in (("pipe:2", "apart"), ("one", "whole")):
        seen = other.compile(mesh, layout, dtype="f64")
        seen.params = plan.params
        found.append(outputs_of(seen(**inputs)))
    hold_to(found[0], found[1], 1e-12)


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_on_the_command_line(schedule: str, tmp_path: Path, cli: Cli) -> None:
    """Averages over held-out batches are those of the reference engine."""
    (tmp_path / "p.mdsl").write_text(laid_out("batch norm", "pipe:2", schedule), encoding="utf-8")
    np.savez(tmp_path / "d.npz", **_arrays(64))
    words = ["p.mdsl", "--program", "step", "--mesh", "pipe:2", "--layout", "apart"]
    words += ["--dtype", "f64", "--data", "d.npz", "--steps", "2", "--eval-every", "1"]
    averages: list[Any] = []
    for engine in ("local", "reference"):
        done = cli("train", *words, "--engine", engine, "--eval-fraction", "0.5", "--log", engine)
        assert (done.code, done.codes) == (0, [])
        lines = map(json.loads, (tmp_path / engine).read_text(encoding="utf-8").splitlines())
        averages.append([line["eval_loss"] for line in lines if "eval_loss" in line])
    assert len(averages[0]) == 2
    np.testing.assert_allclose(averages[0], averages[1], rtol=1e-10)
    done = cli("run", "p.mdsl", "--program", "other", "--mesh", "pipe:2", "--layout", "apart")
    assert (done.code, done.codes) == (0, [])
