"""A batch cut into micro-batches: the numbers of the whole batch, or a refusal before it runs."""

from __future__ import annotations

from fractions import Fraction

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.microbatching import _Cutting
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.place import POLICIES
from meshdsl.report.document import Grid, Picture
from meshdsl.report.explanation import explain
from meshdsl.report.pipeline_facts import by_stage
from tests.covering import in_turn
from tests.pipelines.test_numbers import PROGRAMS
from tests.pipelines.test_programs import hold_to

SUMMED = """
dim batch = 8, model = 6, layers = 4, out = model
program net(x[batch, model], target[batch, model]) {
  param scale[model] = ones()
  repeat layers {
    param w[model, out]
    x = tanh(einsum(x * scale, w -> [batch, out])[out -> model])
  }
  loss = sum(square(x - target)) / 7 + 0.01 * sum(square(scale))
  return loss
  minimize loss with OPTIMIZER
}
"""

CUT = {"summed": SUMMED} | {n: p.replace("batch = 4", "batch = 8") for n, p in PROGRAMS.items()}
OPTIMIZER = "adamw(lr=0.01, clip=0.5)"


def step(
    text: str, mesh: str, rules: str, schedule: str, dtype: str | None = None
) -> dict[str, Array]:
    """What one training step returns and updates."""
    text = f"{text}\nlayout chosen {{ {rules} }} {schedule}\n"
    options = Options(mesh=mesh, layout="chosen", dtype=dtype)
    done = run_local(Compilation(Source("net.mdsl", text), options).text, seed=5)
    assert not done.disagreements()
    return {**done.outputs, **done.updated}


MESHES = {
    "pipe:2": "layers -> pipe",
    "pipe:4": "layers -> pipe",
    "data:2,pipe:2": "layers -> pipe, batch -> data",
    "pipe:2,tp:2": "layers -> pipe, model -> tp",
    "pipe:2,data:2,tp:2": "layers -> pipe, batch -> data, model -> tp, state: model -> data",
}


@in_turn(
    name=CUT,
    mesh=MESHES,
    schedule=(
        "gpipe[batch](4)",
        "one_f_one_b[batch](2)",
        "eager[batch](4)",
        "chimera[batch](4)",
        "one_f_one_b[batch](4, backward=split)",
    ),
)
def test_the_numbers_of_the_whole_batch(name: str, mesh: str, schedule: str) -> None:
    """Of any two of a program, mesh and schedule: `test_pairs.py`."""
    text = CUT[name].replace("OPTIMIZER", OPTIMIZER)
    alone = step(text, "pipe:1", "layers -> pipe", "with gpipe[batch](1)")
    piped = step(text, mesh, MESHES[mesh], f"with {schedule}")
    hold_to(piped, alone, 2e-5)


NORMED = SUMMED.replace("out -> model])", "out -> model])\n    x = x - mean[batch](x)")


@pytest.mark.parametrize(
    ("text", "schedule", "code"),
    [
        pytest.param(NORMED, "gpipe[batch](4)", "MD0332", id="batch norm"),
        pytest.param(SUMMED, "gpipe[batch](3)", "MD0534", id="does not divide"),
        pytest.param(SUMMED, "gpipe[layers](2)", "MD0534", id="the dim of the loop"),
        pytest.param(SUMMED.replace("return loss", "return max(x)"), "gpipe[batch](4)", "MD0333"),
        pytest.param(SUMMED, "chimera[batch](1)", "MD0529", id="half a pair"),
        pytest.param(SUMMED, "interleaved[batch](4, chunks=3)", "MD0334", id="six stages"),
        pytest.param(SUMMED, "pipedream[batch](4)", "MD0337", id="clipped on the way"),
    ],
)
def test_refused_before_it_runs(text: str, schedule: str, code: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        step(text.replace("OPTIMIZER", OPTIMIZER), "pipe:2", "layers -> pipe", f"with {schedule}")
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_updates_on_the_way_of_one_stage_are_refused() -> None:
    """They would be ordinary steps, as many as there are micro-batches; nothing is left out."""
    with pytest.raises(DiagnosticError, match="gives one") as caught:
        step(
            SUMMED.replace("OPTIMIZER", OPTIMIZER),
            "pipe:1",
            "layers -> pipe",
            "with pipedream[batch](4)",
        )
    assert [d.code for d in caught.value.diagnostics] == ["MD0335"]


BOTH_WAYS = {
    "pipe:2": "layers -> pipe",
    "pipe:4": "layers -> pipe",
    "pipe:8": "layers -> pipe",
    "data:2,pipe:4": "layers -> pipe, batch -> data, state: model -> data",
    "pipe:4,tp:2": "layers -> pipe, model -> tp",
}


@in_turn(mesh=BOTH_WAYS, name=CUT, dtype=("f64", "f32"))
def test_gradients_where_micro_batches_go_both_ways(name: str, mesh: str, dtype: str) -> None:
    """With `sgd(lr=1)` a parameter changes by its gradient; two sums of it become one."""
    part = {"f64": 1e-12, "f32": 1e-6}[dtype]
    text = CUT[name].replace("OPTIMIZER", "sgd(lr=1.0)").replace("layers = 4", "layers = 8")
    text = text.replace("batch = 8", "batch = 16")
    alone = step(text, "pipe:1", "layers -> pipe", "with gpipe[batch](8)", dtype)
    piped = step(text, mesh, BOTH_WAYS[mesh], "with chimera[batch](8)", dtype)
    hold_to(piped, alone, part)


def test_the_report_has_the_stages_of_each_device() -> None:
    """Half of the micro-batches go down, half go up; a block each way for both of these."""
    text = CUT["mlp"].replace("OPTIMIZER", OPTIMIZER)
    text += "\nlayout chosen { layers -> pipe } with chimera[batch](8)\n"
    made = Compilation(Source("net.mdsl", text), Options(mesh="pipe:4", layout="chosen"))
    report = explain(made.device)
    pipeline, block = report["pipeline"], 4 * (6 * 6 + 6)
    assert pipeline["held"] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert pipeline["in_flight"] == [3, 4, 4, 3]
    assert report["totals"]["by_kind"]["exchange"] == 2 * block
    *_, grid = by_stage(report)
    assert isinstance(grid, Grid)
    assert grid.head == ("device", "stages", "in flight", "memory")
    assert [row[:3] for row in grid.lines] == [
        ("0", "0 3", "3"), ("1", "1 2", "4"), ("2", "1 2", "4"), ("3", "0 3", "3"),
    ]  # fmt: skip
    (picture,) = [found for found in by_stage(report) if isinstance(found, Picture)]
    assert "device 3" in str(picture.draw())


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro", [2, 4, 8])
def test_the_report_has_the_laws_of_the_schedule(stages: int, micro: int) -> None:
    text = CUT["mlp"].replace("OPTIMIZER", OPTIMIZER)
    reports = {}
    for schedule in ("gpipe", "one_f_one_b", "one_f_one_b split"):
        schedule_name, split = schedule.split()[0], ", backward=split" * schedule.endswith("split")
        use = f"with {schedule_name}[batch]({micro}{split})"
        rules = f"layout chosen {{ layers -> pipe }} {use}\n"
        options = Options(mesh=f"pipe:{stages}", layout="chosen")
        made = Compilation(Source("net.mdsl", f"{text}\n{rules}"), options)
        reports[schedule] = explain(made.device)
        assert ("kept_weights" in made.text, "_kept = []" in made.text) == (False, bool(split))
        # F = I = W = 1 for each layer: the stage before waits for all but W, of the last layer
        # or of all of them.
        layers = 4 // stages
        waits = 2 * layers if split else 3 * layers - 1
        idle = waits * (stages - 1)
        bubble = Fraction(idle, 3 * layers * micro + idle)
        assert Fraction(reports[schedule]["pipeline"]["bubble"]) == bubble
    flying = {name: report["pipeline"]["in_flight"] for name, report in reports.items()}
    assert flying["gpipe"] == [micro] * stages
    assert flying["one_f_one_b"] == [min(micro, stages - s) for s in range(stages)]
    peaks = {name: report["memory"]["peak"] for name, report in reports.items()}
    assert peaks["one_f_one_b"] <= peaks["gpipe"]


def test_the_picture_has_a_row_for_each_stage() -> None:
    """Of equal passes, or with a cluster of those that are predicted; large tables have none."""
    text = CUT["mlp"].replace("OPTIMIZER", OPTIMIZER)
    text += "\nlayout chosen { layers -> pipe } with zb_h1[batch](4)\n"
    made = Compilation(Source("net.mdsl", text), Options(mesh="pipe:2", layout="chosen"))
    timing = Timing(load("h100"), made.device.mesh)
    for report in (explain(made.device), explain(made.device, (), timing)):
        (picture,) = [block for block in by_stage(report) if isinstance(block, Picture)]
        drawn = str(picture.draw())
        assert [f"stage {n}" in drawn for n in range(3)] == [True, True, False]
        assert "µs" in drawn if "time" in report else "µs" not in drawn
        report["pipeline"]["rows"] = None
        assert not any(isinstance(block, Picture) for block in by_stage(report))


SENT_ON = """
dim batch = 8, io = 5, layers = 2, kept = 5, io_b = io
program net(x[batch, io], weight[batch]) {
  param s[kept, io]
  repeat layers {
    param w[io, io_b]
    x = einsum(x, w -> [batch, io_b])[io_b -> io]
  }
  logits = einsum(x, s -> [batch, kept])
  loss = mean(log_softmax[kept](logits) * square(weight))
  return loss
  minimize loss with sgd(lr=0.1)
}
layout chosen { layers -> pipe, io_b -> tp, io -> data } with one_f_one_b[batch](8)
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_no_route_goes_through_blocks_that_cannot_be_cut(policy: str) -> None:
    """One sample a micro-batch is on no two devices, whatever is cheapest for all of the batch."""
    split, alone = (
        Compilation(Source("net.mdsl", SENT_ON), Options(mesh=mesh, layout="chosen", reduce=policy))
        for mesh in ("tp:2,data:2,pipe:2", "tp:1,data:1,pipe:1")
    )
    one, other = (run_local(made.text, seed=5) for made in (split, alone))
    hold_to({**one.outputs, **one.updated}, {**other.outputs, **other.updated})


def test_a_program_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing tries whether it can be cut, and the device stage goes on with that."""
    cut, real = [], _Cutting.program

    def program(self: _Cutting) -> DeviceProgram:
        cut.append(self)
        return real(self)

    monkeypatch.setattr(_Cutting, "program", program)
    text = f"{SUMMED}\nlayout chosen {{ layers -> pipe }} with gpipe[batch](4)\n"
    options = Options(mesh="pipe:2", layout="chosen")
    Compilation(Source("net.mdsl", text.replace("OPTIMIZER", OPTIMIZER)), options).checked()
    assert len(cut) == 1
