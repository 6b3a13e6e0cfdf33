"""Graphs in JSON: every example solves by every method, and every mistake has its message."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshdsl.costgraph import exact
from meshdsl.costgraph.answers import PlacementAnswer
from meshdsl.costgraph.solve import METHODS, solved
from meshdsl.diagnostics import DiagnosticError
from meshdsl.search.request import SearchRequest as Request
from tests.costgraph.random_graphs import graphs
from tests.project import ROOT, tracked

GIVEN = {
    "placement": Request(),
    "stages": Request(devices=8, bandwidth=1e9),
    "devices": Request(devices=8, bandwidth=1e9),
    "transformer": Request(devices=8, cluster="a100-dgx"),
}
"""What each kind of graph needs to be told."""
NEEDS = {"bayesian": "optuna", "learned": "sklearn", "scotch": "pymetis", "mincut": "pymetis"}
"""The modules of the extra `search` that methods import."""
EXAMPLES = [ROOT / p for p in tracked() if p.match("examples/search/*.json")]

PLACEMENT: dict[str, Any] = {
    "kind": "placement",
    "nodes": [
        {"name": "a", "choices": ["x", "y"], "cost": [1, 2], "memory": [8, 4]},
        {"name": "b", "choices": ["x", "y", "z"], "cost": [3, 1, None]},
    ],
    "edges": [{"between": ["b", "a"], "cost": [[0, 5], [5, 0], [0, 0]]}],
}
STAGES: dict[str, Any] = {
    "kind": "stages",
    "layers": [
        {"name": "a", "forward": 1, "backward": 2, "output": 1e6, "parameters": 0},
        {"name": "b", "forward": 1, "backward": 2, "output": 1e6, "parameters": 1e6},
    ],
    "edges": [["a", "b"]],
    "micro_batches": 4,
}
DEVICES: dict[str, Any] = {
    "kind": "devices",
    "expert": {n: {"one": 0, "two": 1} for n in ("3", "8")},
    "operators": [
        {"name": "a", "group": "one", "seconds": 2, "output": 1e6},
        {"name": "b", "group": "two", "seconds": 2, "output": 1e6},
        {"name": "c", "group": "two", "seconds": 1, "output": 1e6, "reads": ["a", "b"]},
    ],
}
SIZES = {"layers": 4, "hidden": 64, "heads": 4, "seq": 16, "vocab": 100, "batch": 8}
TRANSFORMER: dict[str, Any] = {"kind": "transformer", **SIZES, "micro_batches": 4}
EXPERTS: dict[str, Any] = {**TRANSFORMER, "experts": {"count": 4, "group": 16}}
GRAPHS = {g["kind"]: g for g in (PLACEMENT, STAGES, DEVICES, TRANSFORMER)}


def written(tmp_path: Path, graph: object) -> Path:
    path = tmp_path / "graph.json"
    path.write_text(graph if isinstance(graph, str) else json.dumps(graph))
    return path


def changed(graph: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """A copy with one value in it replaced; `...` removes it."""
    made: dict[str, Any] = json.loads(json.dumps(graph))
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, name) for kind, names in METHODS.items() for name in names]
)
def test_every_method_answers(kind: str, method: str, tmp_path: Path) -> None:
    if method in NEEDS:
        pytest.importorskip(NEEDS[method])
    found = solved(written(tmp_path, GRAPHS[kind]), replace(GIVEN[kind], method=method))
    facts = found.facts()
    assert facts["method"] == method
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert found.lines()[0].startswith(str(tmp_path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_solved(path: Path) -> None:
    # With a limit of memory elimination only says how far from the least it is.
    graph = json.loads(path.read_text(encoding="utf-8"))
    given = replace(GIVEN[graph["kind"]], method="ilp" if "memory_limit" in graph else None)
    found = solved(path, replace(given, devices=3072) if "gpt" in path.stem else given).facts()
    assert found["proven"]
    assert found["source"]


def test_exact_methods_agree_on_written_graphs(tmp_path: Path) -> None:
    for graph in graphs(20, seed=6):
        nodes = [
            {"name": v.name, "choices": list(v.choices), "cost": [0] * len(v.choices)}
            for v in graph.variables
        ]
        edges = [
            {"between": [graph.variables[i].name for i in f.scope], "cost": nulls(f.cost.tolist())}
            for f in graph.factors
            if len(f.scope) > 1
        ]
        path = written(tmp_path, {"kind": "placement", "nodes": nodes, "edges": edges})
        costs = [cost_of(path, name) for name in ("elimination", "ilp", "branch", "exhaustive")]
        assert costs == pytest.approx([costs[0]] * 4)


def cost(path: Path, method: str) -> float:
    answer = solved(path, Request(method=method)).answer
    assert isinstance(answer, PlacementAnswer)
    return answer.cost


def cost_of(path: Path, method: str) -> float:
    """The least cost; infinite where everything is forbidden."""
    try:
        return cost(path, method)
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics}
    return math.inf if codes == {"MD0664"} else math.nan


def nulls(table: Any) -> Any:
    """A table with null for what is forbidden."""
    if isinstance(table, list):
        return [nulls(row) for row in table]
    return None if math.isinf(table) else table


WRONG = [
    ("MD0660", "{", "not JSON"),
    ("MD0660", "[]", "object"),
    ("MD0660", {"kind": "stage"}, "`stages`"),
    ("MD0660", changed(PLACEMENT, ("nodes",), ...), "`nodes`"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "name"), 3), "nodes[0].name"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "choices"), []), "nothing to choose"),
    ("MD0660", changed(PLACEMENT, ("nodes",), []), "no node"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "choices"), ["p", "p"]), "two choices `p`"),
    ("MD0660", '{"kind": "placement", "kind": "stages", "nodes": []}', "`kind` is written twice"),
    (
        "MD0660",
        '{"kind": "placement", "nodes": [{"name": "a", "cost": [1], "cost": [2]}]}',
        "`nodes[0]`: the field `cost` is written twice",
    ),
    ("MD0660", "[" * 100_000, "no graph"),
    ("MD0660", f'{{"kind": {"9" * 9999}}}', "no graph"),
    (
        "MD0662",
        '{"kind": "placement", "nodes": [{"name": "a", "choices": ["p"], "cost": [1e400]}]}',
        "inf is not a cost",
    ),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "cost"), [1]), "1 values for 2"),
    ("MD0660", changed(PLACEMENT, ("nodes", 1, "name"), "a"), "two nodes `a`"),
    ("MD0660", changed(PLACEMENT, ("edges", 0, "between"), ["a"]), "two nodes or more"),
    ("MD0660", changed(PLACEMENT, ("edges", 0, "between"), ["a", "aa"]), "no node `aa`"),
    ("MD0660", changed(PLACEMENT, ("edges", 0, "cost", 1), [1, "x"]), "edges[0].cost[1][1]"),
    ("MD0660", changed(STAGES, ("layers",), []), "no layer"),
    ("MD0660", changed(STAGES, ("edges",), [["a", "b", "a"]]), "one layer to another"),
    ("MD0660", changed(STAGES, ("layers", 0, "forward"), True), "a number"),
    ("MD0660", changed(TRANSFORMER, ("layers",), 0), "whole number"),
    ("MD0660", changed(TRANSFORMER, ("heads",), 3), "3 heads"),
    ("MD0660", changed(DEVICES, ("operators",), []), "no operator"),
    ("MD0660", changed(DEVICES, ("operators", 0, "reads"), ["c"]), "no node `c`"),
    ("MD0660", changed(DEVICES, ("operators", 1, "name"), "a"), "two operators"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "memory"), [None, 4]), "nodes[0].memory[0]"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "memroy"), [8, 4]), "`memory`"),
    ("MD0660", changed(PLACEMENT, ("node",), []), "`nodes`"),
    ("MD0660", changed(PLACEMENT, ("edges", 0, "costs"), []), "`cost`"),
    ("MD0660", changed(STAGES, ("edges",), ...), 'write `"edges": …`'),
    ("MD0660", changed(PLACEMENT, ("version",), 2), "version 2"),
    ("MD0660", changed(PLACEMENT, ("nodes", 0, "memory"), ...) | {"memory_limit": 3}, "no node"),
    ("MD0660", changed(STAGES, ("layers", 0, "params"), 1), "no field `params`"),
    ("MD0660", changed(DEVICES, ("operators", 0, "read"), []), "`reads`"),
    ("MD0660", changed(TRANSFORMER, ("sequence",), 3), "no field `sequence`"),
    ("MD0661", changed(STAGES, ("edges",), [["a", "b"], ["b", "a"]]), "a -> b -> a"),
    ("MD0662", changed(PLACEMENT, ("nodes", 0, "cost"), [1, -2]), "nodes[0].cost[1]"),
    ("MD0662", changed(STAGES, ("layers", 1, "output"), -1), "layers[1].output"),
    ("MD0660", changed(STAGES, ("layers", 0, "pass"), "backwards"), "forward or backward"),
    ("MD0660", changed(STAGES, ("layers", 0, "pass"), "backward"), 'write its `"group"`'),
    ("MD0662", changed(STAGES, ("layers", 0, "memory"), -1), "layers[0].memory"),
    ("MD0660", changed(STAGES, ("layers", 0, "ways"), [{"tensor": 0}]), "ways[0].tensor"),
    ("MD0660", changed(STAGES, ("layers", 0, "ways"), [{"second": 0}]), "`seconds`"),
    ("MD0664", changed(PLACEMENT, ("nodes", 1, "cost"), [None] * 3), "forbidden"),
    (
        "MD0664",
        {"kind": "placement", "nodes": [{"name": "a", "choices": ["x"], "cost": [None]}]},
        "forbidden",
    ),
    ("MD0664", {**PLACEMENT, "memory_limit": 3}, "the least is 4 B"),
    ("MD0660", changed(EXPERTS, ("experts",), 4), "an object"),
    ("MD0660", changed(EXPERTS, ("experts", "count"), ...), "`count`"),
    ("MD0660", changed(EXPERTS, ("experts", "topk"), 2), "`top_k`"),
    ("MD0660", changed(EXPERTS, ("experts", "every"), 0), "experts.every"),
    ("MD0660", changed(EXPERTS, ("optimizer",), "adamfactor"), "`adafactor`"),
    ("MD0660", changed(EXPERTS, ("mlp",), 2.5), "`mlp`"),
    ("MD0660", changed(TRANSFORMER, ("batch",), 10**12), "at most 4,294,967,296"),
    ("MD0660", changed(EXPERTS, ("experts", "count"), 1 << 33), "experts.count"),
    ("MD0666", changed(EXPERTS, ("experts", "top_k"), 5), "5 of 4 experts"),
    ("MD0666", changed(EXPERTS, ("experts", "capacity"), 0.1), "experts.capacity"),
    ("MD0666", changed(EXPERTS, ("experts", "group"), 1), "experts.group"),
    ("MD0666", changed(EXPERTS, ("experts", "group"), 24), "do not divide the 128"),
    (
        "MD0666",
        changed(EXPERTS, ("experts", "group"), 128) | {"heads": 1, "layers": 1},
        "whole groups",
    ),
    ("MD0666", changed(TRANSFORMER, ("heads",), 1) | {"batch": 7, "layers": 5}, "no division"),
]


def given(graph: object) -> Request:
    """What the kind of a graph needs, if it has one."""
    kind = graph.get("kind") if isinstance(graph, dict) else None
    return GIVEN.get(str(kind), Request())


@pytest.mark.parametrize(("code", "graph", "said"), WRONG)
def test_mistakes_have_their_message(code: str, graph: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        solved(written(tmp_path, graph), given(graph))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"
    assert found.span is not None


def trained() -> dict[str, Any]:
    """Two layers of 8 and 4 bytes, and the backward pass of the second one as a third."""
    first, second = STAGES["layers"]
    layers = [
        {**first, "backward": 0, "memory": 8},
        {**second, "backward": 0, "memory": 4, "group": "b"},
        {**second, "backward": 0, "memory": 0, "group": "b", "name": "db", "pass": "backward"},
    ]
    return {**STAGES, "layers": layers, "edges": [["a", "b"], ["b", "db"]]}


def test_layers_with_memory_groups_and_a_backward_pass(tmp_path: Path) -> None:
    path = written(tmp_path, trained())
    asked = replace(GIVEN["stages"], method="throughput", memory=8)
    facts = solved(path, asked).facts()
    assert [stage["layers"] for stage in facts["stages"]] == [["a"], ["b", "db"]]  # type: ignore[attr-defined]
    for request, code, said in (
        (replace(asked, memory=7), "MD0664", "the largest layer or group holds 8 B"),
        (replace(asked, method="pipedream"), "MD0665", "write `--method throughput`"),
    ):
        with pytest.raises(DiagnosticError) as caught:
            solved(path, request)
        (found,) = caught.value.diagnostics
        assert found.code == code
        assert said in f"{found.message} {found.help}"


def test_layers_that_several_devices_compute(tmp_path: Path) -> None:
    """Two devices compute the second layer in half the time, and hold half of it."""
    ways = [
        {"name": "alone", "tensor": 1, "seconds": 3, "parameters": 0, "memory": 8},
        {"name": "both", "tensor": 2, "seconds": 1.5, "parameters": 0, "memory": 4},
    ]
    layers = [{**layer, "parameters": 0, "ways": ways} for layer in STAGES["layers"]]
    path = written(tmp_path, {**STAGES, "layers": layers, "micro_batches": 1})
    asked = Request(method="piper", devices=2, bandwidth=1e12, memory=8)
    facts = solved(path, asked).facts()
    assert facts["proven"]
    assert json.loads(json.dumps(facts["stages"]))[0] == {
        "layers": ["a", "b"],
        "data": 1,
        "tensor": 2,
        "seconds": 3.0,
        "memory": 8.0,
        "ways": {"both": 2},
    }
    for request, code, said in (
        (replace(asked, memory=3), "MD0664", "no stages on 2 devices fit in 3 B a device"),
        (replace(asked, bandwidth=None), "MD0665", "`--devices` and `--bandwidth`"),
        (replace(asked, cluster="h100"), "MD0665", "leave out `--cluster`"),
    ):
        with pytest.raises(DiagnosticError) as caught:
            solved(path, request)
        (found,) = caught.value.diagnostics
        assert found.code == code
        assert said in f"{found.message} {found.help}"
    missing = written(tmp_path, changed(STAGES, ("micro_batches",), ...))
    with pytest.raises(DiagnosticError, match="micro_batches"):
        solved(missing, replace(asked, memory=None))


def test_layers_on_a_cluster_with_levels(tmp_path: Path) -> None:
    found = solved(written(tmp_path, STAGES), Request(devices=16, cluster="v100-p3"))
    facts = found.facts()
    assert facts["levels"] == [
        {"units": 8, "bandwidth": 120e9},
        {"units": 2, "bandwidth": 3e9},
    ]
    assert facts["bandwidth"] is None
    assert "on 16 x v100-p3: " in found.lines()[0]


@pytest.mark.parametrize(
    ("sizes", "code", "said"),
    [
        (
            {"heads": 1, "layers": 1, "experts": {"count": 4, "group": 32}},
            "MD0666",
            "whole groups of tokens",
        ),
        ({"layers": 4096}, "MD0663", "fewer `groups`"),
    ],
)
def test_a_pipeline_that_is_not_tried(
    sizes: dict[str, Any], code: str, said: str, tmp_path: Path
) -> None:
    """No submesh is not a lack of memory; and what would take hours is not begun."""
    with pytest.raises(DiagnosticError) as caught:
        solved(written(tmp_path, TRANSFORMER | sizes), replace(GIVEN["transformer"], method="alpa"))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"


def test_what_takes_no_time_is_no_faster_on_several_devices(tmp_path: Path) -> None:
    layers = [{**layer, "forward": 0, "backward": 0, "output": 0} for layer in STAGES["layers"]]
    nothing = {**STAGES, "layers": [{**layer, "parameters": 0} for layer in layers]}
    for method in METHODS["stages"]:
        found = solved(written(tmp_path, nothing), replace(GIVEN["stages"], method=method))
        assert found.facts()["seconds"] == 0
        assert "1 times one device" in found.lines()[0]


@pytest.mark.parametrize("method", METHODS["placement"])
def test_every_method_says_what_no_plan_can_meet(method: str, tmp_path: Path) -> None:
    """A method that proves nothing says so, too, where a limit or the edges leave no plan."""
    if method in NEEDS:
        pytest.importorskip(NEEDS[method])
    forbidden = changed(PLACEMENT, ("nodes", 1, "cost"), [None] * 3)
    for graph, said in (
        ({**PLACEMENT, "memory_limit": 3}, "write `--memory 4B`"),
        (forbidden, "forbidden"),
    ):
        with pytest.raises(DiagnosticError) as caught:
            solved(written(tmp_path, graph), Request(method=method))
        (found,) = caught.value.diagnostics
        assert found.code == "MD0664"
        assert said in f"{found.message} {found.help}"


@pytest.mark.parametrize(("method", "code"), [("greedy", "MD0663"), ("branch", "MD0664")])
def test_no_plan_of_a_graph_too_large_to_know_why(
    method: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is sent to a sample by a sample, and what is proven is said."""
    monkeypatch.setattr(exact, "MOST_COEFFICIENTS", 1)
    with pytest.raises(DiagnosticError) as caught:
        solved(written(tmp_path, {**PLACEMENT, "memory_limit": 3}), Request(method=method))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert "mcmc" not in (found.help or "")


def test_a_heuristic_that_misses_the_only_plan(tmp_path: Path) -> None:
    """It takes the cheap choice of `a`, which forbids the only choice of `b`."""
    nodes = [
        {"name": "a", "choices": ["x", "y"], "cost": [0, 0]},
        {"name": "b", "choices": ["x", "y"], "cost": [None, 0]},
    ]
    edges = [{"between": ["a", "b"], "cost": [[0, None], [5, 5]]}]
    path = written(tmp_path, {"kind": "placement", "nodes": nodes, "edges": edges})
    assert cost(path, "elimination") == 5
    with pytest.raises(DiagnosticError) as caught:
        solved(path, Request(method="greedy"))
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("MD0663", "greedy found no plan, but there is one")
    assert "`--method elimination`" in (found.help or "")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nodes of 320 choices: 614,400 coefficients, 32,768,000 entries or combinations."""
    names = ["a", "b", "c"]
    choices = [f"p{i}" for i in range(320)]
    nodes = [{"name": name, "choices": choices, "cost": [0] * 320} for name in names]
    table = [[1 + (i * j + i + j) % 7 for j in range(320)] for i in range(320)]
    edges = [{"between": pair, "cost": table} for pair in (["a", "b"], ["b", "c"], ["a", "c"])]
    graph = {"kind": "placement", "nodes": nodes, "edges": edges}
    return written(tmp_path_factory.mktemp("large"), graph)


@pytest.mark.parametrize("method", ["ilp", "elimination", "exhaustive"])
def test_a_graph_too_large_for_a_method_is_refused(method: str, large: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        solved(large, Request(method=method))
    (found,) = caught.value.diagnostics
    assert found.code == "MD0663", found.message
    assert "`mcmc`" in (found.help or "")


def test_the_method_that_is_named_instead_has_an_answer(large: Path) -> None:
    assert cost(large, "mcmc") >= 0


@pytest.mark.parametrize(
    ("kind", "asked", "code", "said"),
    [
        ("placement", Request(method="ipl"), "MD0665", "`--method ilp`"),
        ("placement", Request(method="pipedream"), "MD0665", "elimination"),
        ("stages", Request(devices=2), "MD0665", "--bandwidth"),
        ("devices", Request(devices=2), "MD0665", "--bandwidth"),
        ("stages", Request(devices=2, bandwidth=1.0, stages=9), "MD0665", "leave out `--stages`"),
        (
            "transformer",
            Request(method="alpa", devices=2, cluster="a100-dgx", stages=9),
            "MD0665",
            "grid",
        ),
        ("transformer", Request(devices=2), "MD0665", "--cluster"),
        ("placement", Request(devices=2), "MD0665", "leave out `--devices`"),
        (
            "stages",
            Request(devices=2, bandwidth=1.0, cluster="h100"),
            "MD0665",
            "leave out `--bandwidth`",
        ),
        (
            "stages",
            Request(method="throughput", devices=2, cluster="h100"),
            "MD0665",
            "leave out `--cluster`",
        ),
        (
            "stages",
            Request(devices=12, cluster="h100"),
            "MD0666",
            "write `--devices 8` or `--devices 16`",
        ),
        ("stages", Request(devices=2, cluster="h10"), "MD0320", "h100"),
        (
            "stages",
            Request(devices=2, bandwidth=1.0, memory=9),
            "MD0665",
            "leave out `--memory`",
        ),
        (
            "devices",
            Request(devices=2, bandwidth=1.0, memory=9),
            "MD0665",
            "leave out `--memory`",
        ),
        (
            "transformer",
            Request(devices=2, bandwidth=1.0, cluster="h100"),
            "MD0665",
            "leave out `--bandwidth`",
        ),
        ("stages", Request(devices=100_000, bandwidth=1.0), "MD0663", "fewer devices"),
        (
            "stages",
            Request(method="piper", devices=10_000_000, bandwidth=1.0),
            "MD0663",
            "fewer devices",
        ),
        ("transformer", Request(devices=2, cluster="a100-dg"), "MD0320", "a100-dgx"),
        (
            "transformer",
            Request(devices=3, cluster="a100-dgx", stages=3),
            "MD0666",
            "2 and 4",
        ),
        (
            "transformer",
            Request(devices=2, cluster="a100-dgx", memory=1),
            "MD0664",
            "the least",
        ),
        (
            "transformer",
            Request(method="alpa", devices=2, cluster="a100-dgx", memory=1),
            "MD0664",
            "more devices",
        ),
    ],
)
def test_what_is_asked_has_to_fit_the_graph(
    kind: str, asked: Request, code: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        solved(written(tmp_path, GRAPHS[kind]), asked)
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"


def test_a_limit_needs_nodes_that_take_memory(tmp_path: Path) -> None:
    graph = changed(PLACEMENT, ("nodes", 0, "memory"), ...)
    with pytest.raises(DiagnosticError, match="MD0665") as caught:
        solved(written(tmp_path, graph), Request(memory=9))
    (found,) = caught.value.diagnostics
    assert found.help == 'leave out `--memory`; or write `"memory": […]` in the nodes'
