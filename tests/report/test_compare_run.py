"""Columns executed: how far apart they are, what fails, and nothing is called equal unseen."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.engines.compare_run import measure
from meshdsl.columns import Column, raise_if_none_works
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Options
from meshdsl.report.comparison import measured
from meshdsl.report.terminal import text
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.report.comparing import (
    columns_of,
    compared,
    of_example,
    text_of,
)
from tests.report.golden import broken, layouts, source

__all__ = ["cli"]

# --- columns that do not work ----------------------------------------------------------------


def _half_broken() -> list[Column]:
    return columns_of(broken("megatron"), Options(), "hybrid,megatron")


def test_a_broken_column_is_reported() -> None:
    columns = _half_broken()
    facts = compared(columns, broken("megatron"), measure(columns, 0))
    assert not facts["same"]
    assert facts["columns"][1]["diagnostics"][0]["code"] == "MD0302"
    assert all(e["cells"][1] is None for row in facts["rows"] for e in row["tensors"])
    assert [r["status"] for r in facts["run"]["runs"]] == ["ran", "broken"]
    text = text_of(facts, broken("megatron"))
    assert "B  layout megatron, --reduce deferred: MD0302 `x`" in text
    assert "mlp in 2 columns. 1 column could not be compiled." in text
    assert "B: not executed: it did not compile." in text


def test_where_no_column_works_all_is_raised() -> None:
    columns = columns_of(broken("hybrid", "megatron"), Options(), "hybrid,megatron")
    with pytest.raises(DiagnosticError) as caught:
        raise_if_none_works(columns)
    assert [d.code for d in caught.value.diagnostics] == ["MD0302", "MD0302"]


def test_a_column_that_is_too_large_is_not_run_and_says_so() -> None:
    columns = of_example("mlp", "hybrid,data_parallel")
    run = measure(columns, 0, budget=4 * 5_000_000)
    assert [r["status"] for r in run["runs"]] == ["ran", "refused"]
    assert not run["between"]
    assert "B: not executed: MD0703" in text(tuple(measured(run)))
    assert {d.severity for d in columns[1].diagnostics} == {"warning"}


FAILS = """dim n = 4, m = 4
mesh pair = { a: 2 }
layout l { n -> a }
program p(x[m], i[n]: i32) { return x[m = i + 4] }
"""


def test_a_column_that_fails_is_reported(cli: Cli) -> None:
    Path("p.mdsl").write_text(FAILS)
    done = cli("compare", "p.mdsl", "--layouts", "l")
    assert done.code == 3
    assert "A: failed: MD08" in done.out
    assert "error[MD08" in done.err


# --- what was measured -----------------------------------------------------------------------


@pytest.mark.parametrize("example", ["mlp", "matmul", "digits"])
def test_the_columns_agree_with_the_reference_and_each_other(example: str) -> None:
    columns = of_example(example, ",".join(layouts(example)[:3]))
    run = measure(columns, 3)
    assert [r["status"] for r in run["runs"]] == ["ran"] * len(columns)
    for entry, column in zip(run["runs"], columns, strict=True):
        assert column.made is not None
        assert entry["reference"]["ok"]
        assert entry["wire_bytes"] == column.made.report["totals"]["wire_bytes"]
    assert len(run["between"]) == len(columns) * (len(columns) - 1) // 2
    assert all(pair["ok"] for pair in run["between"])


def _spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> Any:
    """Three columns, of which the second to run has other outputs."""
    from meshdsl.backends.engines import execution as engines

    real, calls = engines.run, itertools.count()

    def run(stages: Any, engine: str, *rest: Any) -> Any:
        result = real(stages, engine, *rest)
        if engine == "local" and next(calls) == 1:
            result.outputs["y"] = spoil(result.outputs["y"])
        return result

    monkeypatch.setattr(engines, "run", run)
    columns = of_example("mlp", "hybrid")
    return compared(columns, source("mlp"), measure(columns, 0))


def test_columns_that_differ_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _spoilt(monkeypatch, lambda y: y + 0.5)
    (pair,) = facts["run"]["between"]
    assert pair["columns"] == ["A", "C"]
    assert pair["output"] == "y"
    assert pair["max_error"] == pytest.approx(0.5)
    assert not pair["ok"]
    lines = text(tuple(measured(facts["run"]))).splitlines()
    assert any(line.startswith("  A and C: NOT equal, by ") for line in lines)
    assert any(line.startswith("  C: NOT equal, by ") for line in lines)


def test_a_difference_without_a_number_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = _spoilt(monkeypatch, lambda y: y * float("nan"))
    assert facts["run"]["between"][0]["max_error"] is None
    json.dumps(facts, allow_nan=False)
    assert "A and C: NOT equal, `y` has other shapes, NaN" in text(tuple(measured(facts["run"])))


def test_nothing_is_called_equal_that_was_not_executed() -> None:
    text = text_of(compared(of_example("mlp", "hybrid"), source("mlp")), source("mlp"))
    assert text.endswith("Nothing was executed, so the values were not compared.")
    assert "equal," not in text
    assert "equal up" not in text


def test_a_program_shown_twice_is_executed_once() -> None:
    run = measure(of_example("mlp", "hybrid"), 0)
    assert run["executed"] == ["A", "C"]
    assert run["between"][0]["max_error"] == 0
    said = text(tuple(measured(run)))
    assert "B: the program of A, not executed again." in said
    assert "A and C: equal, bit for bit." in said


NARROW = """
dim batch = 12, model = 4
mesh two = { data: 2 }
layout plain { batch -> data }
layout narrow { batch -> data, grads: reduce = bf16 }
program net(x[batch, model], target[batch, model]) {
  param w[model]
  loss = mean(square(x * w - target))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_gradients_added_up_in_fewer_bits_are_equal_up_to_that() -> None:
    columns = columns_of(Source("net.mdsl", NARROW), Options(), "plain,narrow")
    run = measure(columns, 0)
    allowed = [entry["reference"]["tolerance"] for entry in run["runs"]]
    assert [entry["reference"]["ok"] for entry in run["runs"]] == [True, True]
    assert allowed[0] < 1e-4 < allowed[1] == run["between"][0]["tolerance"]
    assert run["between"][0]["ok"]
