"""Reports of a training step: gradients, states, updates, values that loops save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshdsl.cli.app import app
from meshdsl.columns import Wish, compile_columns
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.place import POLICIES
from meshdsl.report.comparison import compare
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation
from meshdsl.report.terminal import text

TEXT = """\
dim n = 3, a = 4, d = 8
mesh pair = { p: 2 }
layout parts { a -> p }
layout zero extends parts { state: d -> p }
program test(x[a, d]) {
  param w[n, d]
  param v[d]
  repeat n {
    h[a@p, d] = tanh(x * w)
    x = x + h
  }
  loss = mean(square(x * v))
  return loss
  minimize loss with adam(lr=0.1)
}
"""
SOURCE = Source("step.mdsl", TEXT)


def made(until: str = "device", **options: Any) -> Compilation:
    return compile_source(SOURCE, Options(reduce="deferred", **options), Diagnostics(), until)


def lines() -> list[str]:
    return text(explanation(explain(made().device), {SOURCE.name: SOURCE}), 100).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "step.mdsl"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


UNREAD = """
dim batch = 32, model = 6, hidden = 12, best = 4
mesh grid = { a: 3, b: 2 }
layout l { batch -> b, hidden -> a }
program net(x[batch, model]) {
  param w[model, hidden]
  recompute {
    t, i = top_k[hidden -> best](einsum(x, w -> [batch, hidden]))
    y = t * 2.0
  }
  loss = mean(sigmoid(y))
  return loss
  minimize loss with sgd(0.1)
}
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_result_that_nothing_reads_has_no_line(policy: str) -> None:
    source = Source("unread.mdsl", UNREAD)
    made = compile_source(source, Options(reduce=policy), Diagnostics())
    shown = {tensor["name"] for tensor in explain(made.device)["tensors"]}
    assert {"t", "y"} <= shown


# --- explain -----------------------------------------------------------------------------------


def test_states_stand_where_they_are_asked_for() -> None:
    found = lines()
    at = found.index("14 |   minimize loss with adam(lr=0.1)")
    assert [line.split()[0] for line in found[at + 1 : at + 6]] == [
        "step",
        "w.m",
        "w.v",
        "v.m",
        "v.v",
    ]


def test_what_a_loop_keeps_stands_with_it() -> None:
    found = lines()
    at = found.index(" 8 |   repeat n {")
    kept = [line.split()[0] for line in found[at + 1 : at + 6] if "kept from 3 iterations" in line]
    assert sorted(kept) == ["h", "x"]


# --- run ---------------------------------------------------------------------------------------


def test_a_run_tells_what_was_updated(file: str) -> None:
    shown = CliRunner().invoke(
        app, ["run", file, "--step", "--reduce", "deferred"], env={"COLUMNS": "120"}
    )
    assert shown.exit_code == 0, shown.output
    after = shown.output.partition("after one step")[2]
    rows = [line.split()[0] for line in after.splitlines() if line.strip()]
    assert rows == ["parameter", "w", "v", "5"]
    assert "of inputs, parameters and states" in shown.output


def test_a_run_tells_what_each_device_holds(file: str) -> None:
    """Of blocks of several sizes each its own; of what one stage has alone others nothing."""
    text = """
dim b = 8, d = 5
layout rows { b -> z, params: d -> z, state: d -> z }
layout cut { y: z = 1 } with gpipe[b](2)
program p(x[b, d], t[b, d]) {
  param w[d]
  param v[d]
  h = tanh(x * w)
  y = h * v
  loss = mean(square(y - t))
  return loss
  minimize loss with momentum(lr=0.1)
}
"""
    Path(file).write_text(text, encoding="utf-8")
    given, own = 2 * 4 * 4 * 5, 4 * 4  # two inputs of four rows, w and v with a state each
    for layout, held in (
        ("rows", (given + 3 * own, given + 2 * own)),
        ("cut", (2 * given + 40,) * 2),
    ):
        command = ["run", file, "--step", "--mesh", "z:2", "--layout", layout]
        shown = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
        for size in held:
            assert f"{size + 4:,} B of inputs" in shown.output, shown.output  # and the step


def test_a_run_without_training_updates_nothing(file: str) -> None:
    Path(file).write_text(TEXT.replace("  minimize loss with adam(lr=0.1)\n", ""), encoding="utf-8")
    shown = CliRunner().invoke(app, ["run", file])
    assert "after one step" not in shown.output
    assert "states" not in shown.output


def test_a_run_as_json_lists_the_updates(file: str) -> None:
    shown = CliRunner().invoke(app, ["run", file, "--step", "--json", "--layout", "zero"])
    updated = {u["name"]: u for u in json.loads(shown.stdout)["updated"]}
    assert set(updated) == {"step", "w", "w.m", "w.v", "v", "v.m", "v.v"}
    assert updated["w.m"]["local_shape"] == [3, 4]
    assert updated["w.m"]["role"] == "state"
    assert updated["w"]["local_shape"] == [3, 8]


# --- compare -----------------------------------------------------------------------------------


def compared() -> Any:
    asked = [Wish("layout", name, "deferred") for name in ("parts", "zero")]
    return compare(compile_columns(made("named"), asked), SOURCE)


def test_a_comparison_is_of_the_whole_step() -> None:
    found = compared()
    phases = [{r["phase"] for r in c["routes"] if r["wire_bytes"]} for c in found["columns"]]
    assert all("update" in p for p in phases)
    tensors = {t["name"] for t in found["columns"][0]["tensors"]}
    assert {"d_w", "w.m", "loss"} <= tensors


def test_tensors_of_one_collective_are_compared_one_by_one() -> None:
    for column in compared()["columns"]:
        routes = sum(r["wire_bytes"] for r in column["routes"])
        assert routes == column["totals"]["wire_bytes"]
        assert {"d_w", "d_v"} <= {r["tensor"] for r in column["routes"] if r["wire_bytes"]}


def test_what_is_written_is_counted_once() -> None:
    for column in compared()["columns"]:
        assert column["annotations"]["pins"] == 1
        assert column["annotations"]["signatures"] == 1
