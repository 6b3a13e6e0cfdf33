"""Cuts of layer graphs: against every cut of small ones, and PipeDream's published plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshdsl.costgraph.graph_file import layers_of, read_graph
from meshdsl.costgraph.layer_partition import GraphTooLarge, Layer, LayerGraph, cut, time_of

Stages = tuple[tuple[int, ...], ...]
"""The layers of each stage, in order."""

EXAMPLES = Path(__file__).parents[2] / "examples" / "search"


def random_graph(draw: random.Random) -> LayerGraph:
    """One to six layers; every pair in order may have an edge."""
    count = draw.randint(1, 6)
    layers = tuple(
        Layer(
            f"n{i}",
            draw.randint(0, 9),
            draw.randint(0, 9),
            draw.randint(0, 40),
            draw.randint(0, 40),
        )
        for i in range(count)
    )
    pairs = itertools.combinations(range(count), 2)
    return LayerGraph(layers, tuple(p for p in pairs if draw.random() < 0.4))


def every_order(graph: LayerGraph) -> Iterator[Stages]:
    """Every way to cut the layers into stages that only read earlier ones, or their own."""
    count = len(graph.layers)
    for stages in range(1, count + 1):
        for stage_of in itertools.product(range(stages), repeat=count):
            forward = all(stage_of[a] <= stage_of[b] for a, b in graph.edges)
            if forward and set(stage_of) == set(range(stages)):
                yield tuple(
                    tuple(i for i in range(count) if stage_of[i] == s) for s in range(stages)
                )


def replicated(graph: LayerGraph, stages: Stages, used: tuple[int, ...]) -> float:
    """The pace of PipeDream's stages, written out: bandwidth 2."""
    slowest = 0.0
    for k, (held, n) in enumerate(zip(stages, used, strict=True)):
        seconds = sum(graph.layers[i].seconds for i in held)
        parameters = sum(graph.layers[i].parameters for i in held)
        slowest = max(slowest, (seconds + 4 * (n - 1) * parameters / (2 * n)) / n)
        before = {i for s in stages[:k] for i in s}
        sent = {a for a, b in graph.edges if a in before and b not in before}
        slowest = max(slowest, 2 * sum(graph.layers[i].output for i in sent) / (2 * n))
    return slowest


def single(graph: LayerGraph, stages: Stages) -> float:
    """The greatest load of a device, written out: bandwidth 2."""
    loads = []
    for held in stages:
        taken = {a for a, b in graph.edges if a not in held and b in held}
        given = {a for a, b in graph.edges if a in held and b not in held}
        moved = sum(graph.layers[i].output for i in (*taken, *given))
        loads.append(sum(graph.layers[i].seconds for i in held) + moved / 2)
    return max(loads)


def test_no_cut_is_faster() -> None:
    draw = random.Random(0)
    for _ in range(60):
        graph, devices = random_graph(draw), draw.randint(1, 4)
        orders = list(every_order(graph))
        spread = [
            replicated(graph, stages, used)
            for stages in orders
            if len(stages) <= devices
            for used in itertools.product(range(1, devices + 1), repeat=len(stages))
            if sum(used) <= devices
        ]
        found = cut(graph, devices, 2)
        assert found.seconds == pytest.approx(min(spread))
        assert found.seconds == time_of(graph, 2, [(s.layers, s.devices) for s in found.stages])
        assert sum(s.devices for s in found.stages) <= devices
        alone = cut(graph, devices, 2, single=True)
        loads = [single(graph, stages) for stages in orders if len(stages) <= devices]
        assert alone.seconds == pytest.approx(min(loads))


def test_a_device_more_never_hurts() -> None:
    draw = random.Random(1)
    for _ in range(20):
        graph = random_graph(draw)
        paces = [cut(graph, n, 2).seconds for n in range(1, 6)]
        assert paces == sorted(paces, reverse=True)


def test_a_graph_that_branches_too_much_is_refused() -> None:
    layers = tuple(Layer(f"n{i}", 1, 1, 1, 1) for i in range(14))
    with pytest.raises(GraphTooLarge):
        cut(LayerGraph(layers, ()), 2, 1)


GIGABIT = 1e9 / 8

PUBLISHED = [
    ("vgg16", 4, 10, "3-1", "19 Conv2d 256-512", 0.0),
    ("vgg16", 4, 25, "3-1", "19 Conv2d 256-512", 0.0),
    ("vgg16", 16, 25, "15-1", "33 Size", 0.074),
    ("vgg16", 16, 10, "15-1", "33 Size", 0.025),
    ("alexnet", 4, 10, "3-1", "15 Size", 0.0),
    ("alexnet", 16, 10, "15-1", "15 Size", 0.0),
]
"""PipeDream's plans: msr-fiddle/pipedream, runtime/image_classification/models/*/gpus=*/.

The replicas are `stage_to_rank_map` of hybrid_conf.json; the boundary is the first layer of
stage1.py. The last column is how much slower than ours the plan is by the profile, at most.
"""


@pytest.mark.parametrize(("name", "devices", "gigabits", "replicas", "second", "above"), PUBLISHED)
def test_published_plans_of_pipedream(
    name: str, devices: int, gigabits: int, replicas: str, second: str, above: float
) -> None:
    graph = layers_of(read_graph(EXAMPLES / f"pipedream_{name}.json"))
    bandwidth = gigabits * GIGABIT
    found = cut(graph, devices, bandwidth)
    at = next(i for i, layer in enumerate(graph.layers) if layer.name == second)
    first, last = (int(n) for n in replicas.split("-"))
    plan = [(range(at), first), (range(at, len(graph.layers)), last)]
    theirs = time_of(graph, bandwidth, plan)
    assert found.seconds <= theirs
    assert theirs <= found.seconds * (1 + above)
    if not above:
        assert found.replicas == replicas
        assert found.stages[1].layers[0] == at
    assert math.isfinite(theirs)
