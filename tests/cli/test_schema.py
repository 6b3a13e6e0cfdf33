"""What `--json` prints has the fields of the schema, no other ones, and of its types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshdsl.pipeline import Compilation, Options
from meshdsl.report import schedule_schema, schema
from meshdsl.report.advice_report import AdviceFacts
from meshdsl.simulate.against import AgainstFacts, against
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.trace import TraceFile, simulated_trace
from tests.cli.command import Cli
from tests.project import ROOT
from tests.report.golden import source

EXAMPLES = ROOT / "examples"
TRAINED = """dim batch = 8, io = 16, inner = 16, layers = 4
mesh line = { pipe: 2, data: 2 }
layout staged {
  layers -> pipe
  batch -> data
} with one_f_one_b[batch](4)
layout hosted {
  batch -> data
  state: memory = host
}
program net(x[batch, io]) {
  param w[layers, io, inner] = normal(0.1)
  param v[layers, inner, io] = normal(0.1)
  h = x
  repeat layers {
    h = tanh(einsum(h, w, v -> [batch, io]))
  }
  loss = mean(square(h))
  minimize loss with adam(0.01)
  return loss
}
"""
UNEVEN = """dim batch = 10, io = 4
mesh line = { data: 4 }
layout split { batch -> data }
program p(x[batch, io]) {
  y = square(x)
  return y
}
"""


def check(facts: Any, kind: Any) -> None:
    """Facts of a kind: a conversion leaves out the fields that it does not have."""
    plain = json.loads(json.dumps(facts, allow_nan=False))
    assert msgspec.to_builtins(msgspec.convert(plain, kind, strict=True)) == plain


TABLE = ("--stages", "4", "--micro", "8")
COMMANDS: dict[str, tuple[list[str], Any]] = {
    "explain": (["explain", "mlp.mdsl", "--layout", "hybrid"], schema.ReportFacts),
    "time": (["explain", "mlp.mdsl", "--cluster", "h100"], schema.ReportFacts),
    "stages": (["explain", "net.mdsl", "--cluster", "h100"], schema.ReportFacts),
    "uneven": (["explain", "uneven.mdsl"], schema.ReportFacts),
    "offload": (["explain", "net.mdsl", "--layout", "hosted"], schema.ReportFacts),
    "simulate": (["simulate", "mlp.mdsl", "--cluster", "h100"], schema.SimulationFacts),
    "stage": (["simulate", "net.mdsl", "--cluster", "h100"], schema.SimulationFacts),
    "run": (["run", "mlp.mdsl", "--verify"], schema.RanProgram),
    "schedule": (
        ["schedule", "interleaved", "--stages", "4", "--micro", "8"],
        schedule_schema.ScheduleFacts,
    ),
    "slices": (["schedule", "terapipe", *TABLE, "--tokens", "8"], schedule_schema.SlicingFacts),
    "schedules": (["schedule", "--list"], schedule_schema.KnownSchedules),
    "late": (
        ["schedule", "pipedream", "--stages", "4", "--micro", "8"],
        schedule_schema.ScheduleFacts,
    ),
    "rows": (["rows", "einsum"], schema.OperatorFacts),
    "all operators": (["rows"], schema.OperatorMeanings),
    "all rows": (["rows", "relu", "--all"], schema.OperatorFacts),
    "search": (
        ["search", "mlp.mdsl", "--front", "--certificate", "--devices", "4"],
        schema.SearchFacts,
    ),
    "advise": (["advise", "mlp.mdsl", "--cluster", "h100"], AdviceFacts),
    "start": (["search", "mlp.mdsl", "--from", "batch:rows"], schema.SearchFacts),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints(name: str, cli: Cli) -> None:
    Path("mlp.mdsl").write_text((EXAMPLES / "mlp.mdsl").read_text("utf-8"), "utf-8")
    Path("net.mdsl").write_text(TRAINED, "utf-8")
    Path("uneven.mdsl").write_text(UNEVEN, "utf-8")
    words, kind = COMMANDS[name]
    done = cli(*words, "--json")
    assert done.code == 0, done.out
    check(json.loads(done.out), kind)


@pytest.mark.parametrize("options", [[], ["--no-run", "--cluster", "h100"]])
def test_a_comparison_with_a_column_that_is_broken(options: list[str], cli: Cli) -> None:
    Path("uneven.mdsl").write_text(UNEVEN, "utf-8")
    layouts = "split,batch:data;io:data;batch:nowhere"
    done = cli("compare", "uneven.mdsl", "--layouts", layouts, "--json", *options)
    facts = json.loads(done.out)
    columns = facts.pop("columns")
    kinds = [schema.CompiledColumn if "totals" in c else schema.BrokenColumn for c in columns]
    assert {*kinds} == {schema.CompiledColumn, schema.BrokenColumn}
    for column, kind in zip(columns, kinds, strict=True):
        check(column, kind)
    check(facts.pop("rows"), list[schema.RowFacts])
    check(facts.pop("run"), schema.RunFacts)
    assert {*facts} == {"version", "program", "file", "same"}


def test_traces() -> None:
    made = Compilation(source("mlp"), Options(cluster="h100"))
    assert made.timing is not None
    trace = simulated_trace(simulate(made.device, made.timing))
    check(trace, TraceFile)
    check(against(trace, trace), AgainstFacts)
