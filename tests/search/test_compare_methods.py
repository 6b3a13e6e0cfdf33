"""`search --compare-methods`: one table of all methods, in which none is below what is proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.costgraph.solve import METHODS as GRAPH_METHODS
from meshdsl.report.method_comparison import MethodsFacts
from meshdsl.search.methods import METHODS
from tests.cli.command import Cli, write
from tests.cli.conftest import cli
from tests.cli.test_schema import check
from tests.costgraph.test_graph_file import GRAPHS
from tests.covering import some

from .problems import LOOKUP, NET

__all__ = ["cli"]

MLP = """
dim batch = 16, io = 8, wide = 32, narrow = 4
program mlp(x[batch, io], target[batch, io]) {
  param w[io, wide]
  param v[wide, narrow]
  param u[narrow, io]
  h = relu(einsum(relu(einsum(x, w -> [batch, wide])), v -> [batch, narrow]))
  y = einsum(h, u -> [batch, io])
  loss = mean((y - target)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""

EXACT = {"layouts", "exhaustive"}
"""The methods that prove what they find where they are done."""

QUESTIONS = [
    (NET, "x:2,y:2", []),
    (LOOKUP, "x:2", ["--no-storage"]),
    (MLP, "x:2", ["--cluster", "h100"]),
]
"""Three programs, by bytes and by time."""

TOLD = {
    "placement": [],
    "stages": ["--devices", "8", "--bandwidth", "1GB/s"],
    "devices": ["--devices", "3", "--bandwidth", "1GB/s"],
    "transformer": ["--devices", "8", "--cluster", "a100-dgx"],
}
"""What each kind of graph needs to be told."""


def without_seconds(facts: dict[str, Any]) -> dict[str, Any]:
    """All that is the same in every run."""
    return {**facts, "methods": [{**m, "seconds": 0} for m in facts["methods"]]}


@pytest.mark.parametrize(("text", "mesh", "options"), some(QUESTIONS, of=3))
def test_no_method_is_below_what_is_proven(
    text: str, mesh: str, options: list[str], cli: Cli
) -> None:
    words = ["search", write(text), "--mesh", mesh, "--compare-methods", "--json", *options]
    facts = json.loads(cli(*words).out)
    check(facts, MethodsFacts)
    rows = {row["method"]: row for row in facts["methods"]}
    assert [*rows] == [*METHODS]
    assert {name for name, row in rows.items() if row["proven"]} == EXACT
    least = rows["exhaustive"]["cost"]
    assert rows["layouts"]["cost"] == least
    answered = [row for row in rows.values() if row["refused"] is None]
    assert len(answered) > len(EXACT)
    for row in answered:
        assert row["cost"] >= least
        assert row["steps"] >= row["placed"] >= 1
        assert row["bound"] is None or row["bound"] <= row["cost"]


def test_the_table_is_the_same_again_but_for_the_seconds(cli: Cli) -> None:
    words = ["search", write(NET), "--mesh", "x:2", "--compare-methods", "--no-storage"]
    first = json.loads(cli(*words, "--json").out)
    compared = md.load(words[1]).compare_methods({"x": 2}, storage=False)
    assert without_seconds(compared.json) == without_seconds(first)  # type: ignore[arg-type]
    said = str(compared).splitlines()
    assert said[0] == f"net on {{ x: 2 }}: {len(METHODS)} methods by bytes"
    for row in first["methods"]:
        (shown,) = [line.split() for line in said if line.split()[0].rstrip(":") == row["method"]]
        assert row["refused"] or f"{row['steps']:,}" in shown


@pytest.mark.parametrize("kind", GRAPH_METHODS)
def test_the_methods_of_a_graph(kind: str, cli: Cli) -> None:
    Path("graph.json").write_text(json.dumps(GRAPHS[kind]), "utf-8")
    words = ["search", "graph.json", "--graph", "--compare-methods", *TOLD[kind]]
    facts = json.loads(cli(*words, "--json").out)
    rows = facts["methods"]
    assert [row["method"] for row in rows] == [*GRAPH_METHODS[kind]]
    least = {row["cost"] for row in rows if row["proven"]}
    if kind in ("placement", "devices"):  # there all methods search the same plans
        assert len(least) == 1
        assert all(row["cost"] >= max(least) for row in rows)
    lines = cli(*words).out.splitlines()
    assert lines[0].startswith(f"graph.json: {len(rows)} methods by ")
    assert {row["method"] for row in rows} <= {line.split()[0] for line in lines if line.split()}


@pytest.mark.parametrize("option", ["--method ilp", "--write best", "--front", "--from io:x"])
def test_what_is_about_one_result_is_refused(option: str, cli: Cli) -> None:
    done = cli("search", write(NET), "--mesh", "x:2", "--compare-methods", *option.split())
    assert done.codes == ["error[MD0601]"]
    assert f"leave out `{option.split()[0]}`" in done.err


def test_where_no_method_has_an_answer_the_first_says_why(cli: Cli) -> None:
    path = write(NET)
    words = ["search", path, "--mesh", "x:2", "--compare-methods", "--fix", "io -> y"]
    (code,) = cli(*words).codes
    with pytest.raises(md.ProgramError) as caught:
        md.load(path).compare_methods({"x": 2}, fix="io -> y")
    assert code in str(caught.value)
