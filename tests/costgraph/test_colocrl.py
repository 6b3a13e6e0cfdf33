"""ColocRL's table (Mirhoseini et al. 2017) for its recurrent language model, and its baselines."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshdsl.costgraph.answers import DevicesAnswer
from meshdsl.costgraph.device_placement import Devices, GraphOperator, exhaustive, reinforce
from meshdsl.costgraph.graph_comparison import compared_on
from meshdsl.costgraph.graph_file import operators_of, read_graph
from meshdsl.costgraph.partitioning import partitioned, sent_between, single
from meshdsl.costgraph.solve import solved
from meshdsl.diagnostics import DiagnosticError
from meshdsl.search.request import SearchRequest as Request
from tests.project import ROOT

from .test_device_placement import (
    EXPERT,
    LAYERS,
    ONE_DEVICE,
    language_model,
    overhead,
    random_model,
)
from .test_graph_file import DEVICES, changed, written

RNNLM = ROOT / "examples/search/colocrl_rnnlm.json"
TWO = Request(devices=2, bandwidth=12e9)
PARTITIONS = {"scotch": True, "mincut": False}


def seconds(method: str, request: Request = TWO) -> float:
    answer = solved(RNNLM, replace(request, method=method)).answer
    assert isinstance(answer, DevicesAnswer)
    return answer.seconds


def test_the_file_is_the_model() -> None:
    top = read_graph(RNNLM)
    groups, operators = operators_of(top)
    assert groups == LAYERS
    for read, made in zip(operators, language_model(), strict=True):
        assert replace(read, seconds=made.seconds) == made
        assert read.seconds == pytest.approx(made.seconds)
    assert top.field("transfer").cost() == pytest.approx(overhead(), rel=1e-5)


def test_the_columns_are_in_the_published_order_with_the_overhead_of_2016() -> None:
    """On two K80: one device, which is what was learned, before the expert's placement."""
    published = json.loads(RNNLM.read_text("utf-8"))["published"]["2"]
    assert published == {
        "single": ONE_DEVICE,
        "scotch": None,
        "mincut": None,
        "expert": EXPERT,
        "rl": ONE_DEVICE,
    }
    found = {name: seconds(name) for name in ("single", "expert", "exhaustive", "critical-path")}
    found["rl"] = reinforce(language_model(), Devices(2, overhead(), 12e9), samples=200).seconds
    for name, figure in published.items():
        if figure is not None:
            assert found[name] == pytest.approx(figure, abs=5e-3), name
    for name in ("rl", "critical-path", "single"):
        assert found[name] == pytest.approx(found["exhaustive"])
    assert found["single"] < found["expert"]
    four = Devices(4, overhead(), 12e9)
    assert reinforce(language_model(), four, samples=400).seconds == pytest.approx(ONE_DEVICE)


@pytest.mark.parametrize("devices", [2, 4])
def test_partitions_take_longer_than_one_device(devices: int) -> None:
    pytest.importorskip("pymetis")
    for name in PARTITIONS:
        request = replace(TWO, devices=devices)
        assert seconds(name, request) > seconds("single", request)


def test_the_table_has_the_published_figures_beside_ours(tmp_path: Path) -> None:
    graph = {**DEVICES, "published": {"3": {"single": 5, "scotch": None}}}
    found = compared_on(written(tmp_path, graph), Request(devices=3, bandwidth=1e9))
    head, *rows = [line.split() for line in list(found.lines())[1:]]
    assert head[:3] == ["method", "cost", "published"]
    by_name = {row[0]: row for row in rows}
    assert by_name["single"][1:3] == ["5", "5"]
    if "scotch" in by_name:
        assert by_name["scotch"][2:4] == ["not", "found"]
    assert found.facts()["published"] == {"single": 5, "scotch": None}
    assert "published" not in compared_on(written(tmp_path, DEVICES), TWO).facts()


@pytest.mark.parametrize(
    ("path", "value", "code", "said"),
    [
        (("expert",), ..., "MD0665", '"expert": {"3": {"one": 0'),
        (("expert", "3"), ..., "MD0665", "on 3 devices"),
        (("expert", "3", "two"), ..., "MD0660", "`two` is missing"),
        (("expert", "3", "two"), 3, "MD0660", "from 0 to 2"),
        (("expert", "3", "tow"), 1, "MD0660", "`two`"),
    ],
)
def test_mistakes_in_an_experts_placement(
    path: tuple[str, ...], value: Any, code: str, said: str, tmp_path: Path
) -> None:
    graph = written(tmp_path, changed(DEVICES, path, value))
    with pytest.raises(DiagnosticError) as caught:
        solved(graph, Request(devices=3, bandwidth=1e9, method="expert"))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert said in f"{found.message} {found.help}"


@pytest.mark.parametrize(
    ("figures", "said"),
    [({"8": {"scoch": 1}}, "`scotch`"), ({"8": 3}, "seconds by method"), (3, "an object")],
)
def test_mistakes_in_published_figures(figures: Any, said: str, tmp_path: Path) -> None:
    graph = written(tmp_path, {**DEVICES, "published": figures})
    with pytest.raises(DiagnosticError) as caught:
        compared_on(graph, Request(devices=8, bandwidth=1e9))
    (found,) = caught.value.diagnostics
    assert found.code == "MD0660"
    assert said in f"{found.message} {found.help}"


# --- partitions ----------------------------------------------------------------------------------


def test_bytes_between_groups_count_each_reader_once() -> None:
    model = [
        GraphOperator(0, 1, 8.0, ()),
        GraphOperator(1, 1, 4.0, (0,)),
        GraphOperator(1, 1, 2.0, (0, 1)),
        GraphOperator(2, 1, 1.0, (0, 2)),
        GraphOperator(0, 1, 0.0, (3,)),
    ]
    assert sent_between(model) == {(0, 1): 8.0, (0, 2): 8.0 + 1.0, (1, 2): 2.0}


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_cuts_where_little_is_sent(name: str) -> None:
    """Two groups of three that send each other much, joined by one thin edge."""
    pytest.importorskip("pymetis")
    model = list[GraphOperator]()
    for group in range(6):
        reads = tuple(i for i in range(group) if i // 3 == group // 3)
        model.append(GraphOperator(group, 1.0, 100.0, reads))
    model.append(GraphOperator(2, 0.0, 1.0, ()))
    model.append(GraphOperator(3, 0.0, 0.0, (6,)))
    devices = partitioned(name, PARTITIONS[name])(model, Devices(2, 0, 1e9)).devices
    assert len({*devices[:3]}) == len({*devices[3:]}) == 1
    assert devices[0] != devices[3]


def test_no_baseline_is_better_than_every_placement() -> None:
    pytest.importorskip("pymetis")
    draw = random.Random(7)
    for _ in range(10):
        model, devices = random_model(draw), Devices(3, 1, 2)
        least = exhaustive(model, devices).seconds
        for place in (single, *(partitioned(name, r) for name, r in PARTITIONS.items())):
            found = place(model, devices)
            assert found.seconds >= least
            assert {*found.devices} <= {0, 1, 2}
