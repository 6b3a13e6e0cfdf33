"""Cuts of layer graphs: against every cut of small ones, and PipeDream's published plans."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshdsl.cluster.profile import load
from meshdsl.costgraph.graph_file import layers_of, read_graph
from meshdsl.costgraph.layer_graph import GraphTooLarge, Layer, LayerGraph, contracted
from meshdsl.costgraph.layer_partition import (
    Levels,
    Links,
    Replicated,
    cut,
    flat,
    levels_of,
    time_of,
)

Stages = tuple[tuple[int, ...], ...]
"""The layers of each stage, in order."""

EXAMPLES = Path(__file__).parents[2] / "examples" / "search"


def random_graph(draw: random.Random, most: int = 6, free: float = 0.0) -> LayerGraph:
    """One to six layers; every pair in order may have an edge, and layers may cost nothing."""
    count = draw.randint(1, most)
    layers = tuple(
        Layer(f"n{i}", 0, 0, draw.choice([0, 5, 20]), 0)
        if draw.random() < free
        else Layer(f"n{i}", *(draw.randint(0, most) for most in (9, 9, 40, 40)))
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
        found = cut(graph, flat(devices, 2))
        assert found.seconds == pytest.approx(min(spread))
        assert found.seconds == time_of(
            graph, flat(devices, 2), [(s.layers, s.devices) for s in found.stages]
        )
        assert sum(s.devices for s in found.stages) <= devices
        alone = cut(graph, flat(devices, 2), single=True)
        loads = [single(graph, stages) for stages in orders if len(stages) <= devices]
        assert alone.seconds == pytest.approx(min(loads))


def test_layers_that_cost_nothing_change_no_answer() -> None:
    """They are contracted before stages are tried."""
    draw = random.Random(2)
    fewer = 0
    for _ in range(50):
        graph, devices = random_graph(draw, free=0.6), draw.randint(1, 3)
        orders = [stages for stages in every_order(graph) if len(stages) <= devices]
        spread = [
            replicated(graph, stages, used)
            for stages in orders
            for used in itertools.product(range(1, devices + 1), repeat=len(stages))
            if sum(used) <= devices
        ]
        assert cut(graph, flat(devices, 2)).seconds == pytest.approx(min(spread))
        loads = [single(graph, stages) for stages in orders]
        assert cut(graph, flat(devices, 2), single=True).seconds == pytest.approx(min(loads))
        fewer += len(contracted(graph).graph.layers) < len(graph.layers)
    assert fewer > 20


@dataclass(frozen=True)
class Oracle:
    """Plans of a cluster with levels, written out: all ways to put stages on devices."""

    graph: LayerGraph
    levels: Levels

    def unit(self, level: int, device: int) -> int:
        """The unit of a level (0: a device) that a device is in."""
        return device // math.prod(k.units for k in self.levels[:level])

    def reduced(self, layers: Iterable[int], devices: range) -> float:
        """Seconds to reduce the gradients of layers, each level after the other."""
        parameters = sum(self.graph.layers[i].parameters for i in layers)
        seconds = 0.0
        for k, level in enumerate(self.levels):
            parts = {(self.unit(k + 1, d), self.unit(k, d)) for d in devices}
            most = max(Counter(whole for whole, _ in parts).values())
            seconds += 4 * (most - 1) / most * parameters / level.bandwidth
        return seconds

    def link(self, done: frozenset[int], front: int | None, devices: range, inner: int) -> float:
        """Seconds for activations and their gradients into devices, on levels from `inner` on."""
        sent = {a for a, b in self.graph.edges if a in done and b not in done}
        activations = 2 * sum(self.graph.layers[i].output for i in sent)
        slowest = 0.0
        for k, level in enumerate(self.levels):
            receiving = {self.unit(k, d) for d in devices}
            apart = front is not None and self.unit(k, front) != self.unit(k, devices[-1])
            if front is not None and k >= inner and (k == 0 or apart):
                slowest = max(slowest, activations / (level.bandwidth * len(receiving)))
        return slowest

    def paces(
        self,
        stages: Stages,
        done: frozenset[int],
        inside: int,
        used: int = 0,
        front: int | None = None,
    ) -> Iterator[float]:
        """The paces of stages on devices of one unit, after `used` ones; `front` has the last.

        Each is on the next devices; or several are a pipeline inside a smaller unit, repeated.
        """
        if not stages:
            yield 0.0
            return
        size = math.prod(k.units for k in self.levels[:inside])
        first = [(1, 0, n, n) for n in range(1, size - used + 1)]
        for inner in range(1, inside):
            unit = math.prod(k.units for k in self.levels[:inner])
            copies = [m for m in range(2, self.levels[inner].units + 1) if used % unit == 0]
            first += [(n, inner, m, m * unit) for m in copies for n in range(1, len(stages) + 1)]
        for count, inner, shared, taken in first:
            devices = range(used, used + taken)
            if devices[-1] >= size:
                continue
            if inner and self.unit(inner + 1, used) != self.unit(inner + 1, devices[-1]):
                continue
            held = [i for stage in stages[:count] for i in stage]
            if inner:
                alone = min(self.paces(stages[:count], done, inner), default=math.inf)
                one_each = range(0, devices[-1] + 1 - used, taken // shared)
                seconds = alone + self.reduced(held, one_each)
            else:
                seconds = sum(self.graph.layers[i].seconds for i in held)
                seconds += self.reduced(held, devices)
            here = max(seconds / shared, self.link(done, front, devices, inner))
            after = done.union(held)
            for rest in self.paces(stages[count:], after, inside, used + taken, used):
                yield max(here, rest)


CLUSTERS = [
    (Links(2, 4), Links(2, 1)),
    (Links(3, 9), Links(2, 2)),
    (Links(2, 1), Links(2, 40)),
    (Links(2, 9), Links(2, 3), Links(2, 1)),
]


@pytest.mark.parametrize("levels", CLUSTERS)
def test_no_plan_of_a_cluster_with_levels_is_faster(levels: Levels) -> None:
    draw = random.Random(3)
    repeated = 0
    for _ in range(20):
        graph = random_graph(draw, most=4 if len(levels) == 2 else 3, free=0.2)
        paces = [
            pace
            for stages in every_order(graph)
            for pace in Oracle(graph, levels).paces(stages, frozenset(), len(levels))
        ]
        found = cut(graph, levels)
        assert found.seconds == pytest.approx(min(paces))
        assert sorted(i for s in found.stages for i in s.layers) == list(range(len(graph.layers)))
        repeated += any(isinstance(part, Replicated) for part in found.parts)
    assert repeated or levels[0].bandwidth > levels[1].bandwidth


def test_a_device_more_never_hurts() -> None:
    draw = random.Random(1)
    for _ in range(20):
        graph = random_graph(draw)
        paces = [cut(graph, flat(n, 2)).seconds for n in range(1, 6)]
        assert paces == sorted(paces, reverse=True)


def test_a_graph_that_branches_too_much_is_refused() -> None:
    layers = tuple(Layer(f"n{i}", 1, 1, 1, 1) for i in range(14))
    with pytest.raises(GraphTooLarge):
        cut(LayerGraph(layers, ()), flat(2, 1))


TEN, TWENTY_FIVE = 1.25e9, 3.125e9
"""Bytes a second of 10 and 25 Gb/s."""

PUBLISHED = [
    ("vgg16", 4, TEN, "3-1", "19 Conv2d 256-512", 0.0),
    ("vgg16", 4, TWENTY_FIVE, "3-1", "19 Conv2d 256-512", 0.0),
    ("vgg16", 16, TWENTY_FIVE, "15-1", "33 Size", 0.074),
    ("vgg16", 16, TEN, "15-1", "33 Size", 0.025),
    ("vgg16", 16, "v100-p3", "15-1", "33 Size", 0.062),
    ("alexnet", 4, TEN, "3-1", "15 Size", 0.0),
    ("alexnet", 16, TEN, "15-1", "15 Size", 0.0),
    ("alexnet", 16, "v100-p3", "15-1", "15 Size", 0.433),
    ("resnet50", 16, "v100-p3", "16", "", 0.0),
]
"""PipeDream's plans: msr-fiddle/pipedream, runtime/image_classification/models/*/gpus=*/.

The replicas are `stage_to_rank_map` of hybrid_conf.json; the boundary is the first layer of
stage1.py. The last column is how much slower than ours the plan is by the profile, at most. Two
p3.16xlarge with 25 Gb/s are the second cluster of the paper.
"""


@pytest.mark.parametrize(("name", "devices", "links", "replicas", "second", "above"), PUBLISHED)
def test_published_plans_of_pipedream(
    name: str, devices: int, links: float | str, replicas: str, second: str, above: float
) -> None:
    graph = layers_of(read_graph(EXAMPLES / f"pipedream_{name}.json"))
    levels = levels_of(load(links), devices) if isinstance(links, str) else flat(devices, links)
    assert levels is not None
    found = cut(graph, levels)
    starts = [0, *(i for i, layer in enumerate(graph.layers) if layer.name == second)]
    ends = [*starts[1:], len(graph.layers)]
    plan = [
        (range(start, end), int(n))
        for start, end, n in zip(starts, ends, replicas.split("-"), strict=True)
    ]
    theirs = time_of(graph, levels, plan)
    assert found.seconds <= theirs
    assert theirs <= found.seconds * (1 + above)
    if not above:
        assert found.replicas == replicas
        assert [s.layers[0] for s in found.stages] == starts
    if links == "v100-p3" and name != "alexnet":
        assert found.replicas == replicas
    assert math.isfinite(theirs)


def test_published_replicas_of_gnmt() -> None:
    """GNMT-16: runtime/translation/models/gnmt_large, gpus=4/mp_conf.json, 16/hybrid_conf.json."""
    graph = layers_of(read_graph(EXAMPLES / "pipedream_gnmt16.json"))
    assert cut(graph, flat(4, TEN)).replicas == "1-1-1-1"
    assert cut(graph, flat(16, TWENTY_FIVE)).replicas == "-".join(["1"] * 12 + ["3", "1"])
    levels = levels_of(load("v100-p3"), 16)
    assert levels is not None
    assert cut(graph, levels).replicas == "4-4-8"
