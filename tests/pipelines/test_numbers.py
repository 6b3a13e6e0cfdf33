"""Training steps of pipelines equal those of one device, on threads.

Where the sums of a step have the same order, they are the same bits: with one device that
accumulates as many batches. A parameter of several stages has a sum on each, and a norm the sum
over stages: there up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from tests.covering import in_turn
from tests.project import ROOT

MLP = """
dim batch = 4, model = 6, layers = 4, out = model
program net(x[batch, model], target[batch, model]) {
  repeat layers {
    param w[model, out]
    param b[model] = zeros()
    x = tanh(einsum(x, w -> [batch, out])[out -> model] + b)
  }
  loss = mean(square(x - target))
  return loss
  minimize loss with OPTIMIZER
}
"""

HEADED = """
dim batch = 4, seq = 6, model = 8, hidden = 12, layers = 4, vocab = 16, heads = 2
program net(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model]
  param place[seq, model]
  param head[model, vocab]
  x = embed[vocab = tokens] + place
  mask = where(tokens > 3, 1.0, 0.5)
  repeat layers {
    param a[model, hidden]
    param c[hidden, model]
    x = x + mask * einsum(gelu(einsum(x, a -> [batch, seq, hidden])), c -> [batch, seq, model])
  }
  logits = einsum(rms_norm[model](x), head -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  largest = mean(max[vocab](logits))
  return loss, largest
  minimize loss with OPTIMIZER
}
"""

TIED = HEADED.replace("  param head[model, vocab]\n", "").replace("head ->", "embed ->")

RECOMPUTED = MLP.replace("    x = tanh", "    recompute {\n    x = tanh").replace(
    "+ b)\n  }", "+ b)\n    }\n  }"
)

PROGRAMS = {"mlp": MLP, "headed": HEADED, "tied": TIED, "recomputed": RECOMPUTED}
ADAM = "adamw(lr=0.01, accumulate=4)"
CLIPPED = "adamw(lr=0.01, clip=0.05, accumulate=3)"
NARROW = "adamw(lr=0.01, accumulate=4, compute=bf16)"

ONE_SUM = ("mlp", "headed", "recomputed")
"""Programs none of whose parameters are read on two stages."""


@dataclass(frozen=True)
class Run:
    """One step of a program: its results, the bytes that each device sent, and those predicted."""

    made: LocalRun
    predicted: int

    @property
    def arrays(self) -> dict[str, Array]:
        """What the step returns and updates."""
        return {**self.made.outputs, **self.made.updated}


def run(program: str, optimizer: str, mesh: str, rules: str, policy: str = "optimal") -> Run:
    """One training step of a program of `PROGRAMS`."""
    text = PROGRAMS[program].replace("OPTIMIZER", optimizer)
    text += f"\nlayout chosen {{ {rules} }}\n"
    source = Source(f"{program}.mdsl", text)
    made = Compilation(source, Options(mesh=mesh, layout="chosen", reduce=policy))
    emitted = made.emitted
    done = run_local(emitted.text, seed=3, lines=emitted.places)
    return Run(done, explain(made.device)["totals"]["wire_bytes"])


def worst(found: Run, expected: Run) -> float:
    """The largest difference of any result, relative to the largest value of it."""
    return max(
        float(np.abs(array.astype("f8") - expected.arrays[name]).max(initial=0))
        / max(float(np.abs(expected.arrays[name]).max(initial=0)), 1e-30)
        for name, array in found.arrays.items()
    )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("program", ONE_SUM)
def test_the_bits_of_one_device(program: str, stages: int) -> None:
    alone = run(program, ADAM, "pipe:1", "layers -> pipe")
    piped = run(program, ADAM, f"pipe:{stages}", "layers -> pipe")
    for name, array in alone.arrays.items():
        np.testing.assert_array_equal(piped.arrays[name], array, name)
    assert not piped.made.disagreements()


LAYOUTS = {
    "pipe:2": "layers -> pipe",
    "data:2,pipe:2": "layers -> pipe, batch -> data",
    "pipe:2,tp:2": "layers -> pipe, model -> tp",
    "data:2,pipe:4": "layers -> pipe, batch -> data, state: model -> data",
    "data:2,pipe:2,tp:2": "layers -> pipe, batch -> data, model -> tp, grads: model -> data",
    "pipe:4,data:2": "layers -> pipe, batch -> data, params: model -> data",
}


@in_turn(mesh=LAYOUTS, program=PROGRAMS, policy=("optimal", "immediate", "deferred"))
def test_numbers_of_one_device_with_the_bytes_that_were_said(
    program: str, mesh: str, policy: str
) -> None:
    alone = run(program, CLIPPED, "pipe:1", "layers -> pipe")
    piped = run(program, CLIPPED, mesh, LAYOUTS[mesh], policy)
    assert worst(piped, alone) < 2e-5
    assert not piped.made.disagreements()
    sent = [piped.made.wire_bytes(rank) for rank in range(len(piped.made.sent))]
    assert max(sent) == piped.predicted


@pytest.mark.parametrize("mesh", ["pipe:2", "data:2,pipe:2", "pipe:2,tp:2"])
def test_narrow_numbers(mesh: str) -> None:
    alone = run("headed", NARROW, "pipe:1", "layers -> pipe")
    piped = run("headed", NARROW, mesh, LAYOUTS[mesh])
    assert abs(piped.arrays["loss"] - alone.arrays["loss"]) < 0.02


def test_the_example_goes_on_under_any_layout(tmp_path: Path) -> None:
    """Stages of one layer and of two, then Megatron's layout, then one device: the same losses."""
    sizes, folder = {"batch": 4, "seq": 16, "vocab": 32}, str(tmp_path / "run")
    program = md.load(ROOT / "examples" / "lm.mdsl", program="lm", dims=sizes)
    rng = np.random.default_rng(3)
    data = {n: rng.integers(0, 32, (64, 16), dtype=np.int32) for n in ("tokens", "targets")}
    schedule = md.scheduled("one_f_one_b", "batch", micro=2, layers=(1, 2))
    staged = md.layout(["batch -> data", "layers -> pipe"], schedule=schedule)
    plans = (
        program.compile({"data": 2, "pipe": 2}, staged),
        program.compile({"data": 2, "tp": 2}, "megatron"),
        program.compile({"data": 1}, "data_parallel"),
    )
    losses: list[float] = []
    for steps, plan in zip((4, 8, 12), plans, strict=True):
        done = plan.train(data, steps, checkpoint=folder, resume=steps > 4, progress=False)
        losses += done.losses
    alone = program.compile({"data": 1}, "data_parallel").train(data, 12, progress=False)
    np.testing.assert_allclose(losses, alone.losses, rtol=2e-5)
