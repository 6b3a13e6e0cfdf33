"""Cuts of layer graphs: against every cut of small ones, and PipeDream's published plans."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from meshdsl.cluster.profile import load
from meshdsl.costgraph import layer_graph, layer_partition
from meshdsl.costgraph.graph_file import layers_of, read_graph
from meshdsl.costgraph.layer_graph import GraphTooLarge, Layer, LayerGraph, contracted
from meshdsl.costgraph.layer_partition import (
    Costs,
    Cut,
    Levels,
    Links,
    Replicated,
    Stage,
    flat,
    levels_of,
    pace,
    time_of,
)

Stages = tuple[tuple[int, ...], ...]
"""The layers of each stage, in order."""

EXAMPLES = Path(__file__).parents[2] / "examples" / "search"


def cut(graph: LayerGraph, levels: Levels, single: bool = False, memory: float = math.inf) -> Cut:
    """The best stages, of which there are some."""
    found = layer_partition.cut(graph, levels, single, memory)
    assert found is not None
    return found


def random_graph(draw: random.Random, most: int = 6, free: float = 0.0) -> LayerGraph:
    """One to six layers; every pair in order may have an edge, and layers may cost nothing."""
    count = draw.randint(1, most)
    layers = tuple(
        Layer(f"n{i}", 0, 0, draw.choice([0, 5, 20]), 0)
        if draw.random() < free
        else Layer(
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
        found = cut(graph, flat(devices, 2))
        assert found.seconds == pytest.approx(min(spread))
        assert found.seconds == time_of(
            graph, flat(devices, 2), [(s.layers, s.devices) for s in found.stages]
        )
        assert sum(s.devices for s in found.stages) <= devices
        alone = cut(graph, flat(devices, 2), single=True)
        loads = [single(graph, stages) for stages in orders if len(stages) <= devices]
        assert alone.seconds == pytest.approx(min(loads))


def slow_graph(draw: random.Random) -> LayerGraph:
    """Layers that take longer than transfers, in chains with short cuts, and some for nothing."""
    count = draw.randint(3, 6)
    layers = tuple(
        Layer(f"n{i}", 0, 0, draw.choice([0, 8, 16, 24]), 0)
        if draw.random() < 0.5
        else Layer(f"n{i}", draw.randint(10, 30), 0, draw.choice([0, 8, 16, 24]), 0)
        for i in range(count)
    )
    pairs = itertools.combinations(range(count), 2)
    edges = tuple((a, b) for a, b in pairs if draw.random() < (0.8 if b == a + 1 else 0.25))
    return LayerGraph(layers, edges)


def test_layers_that_cost_nothing_change_no_answer() -> None:
    """They are contracted before stages are tried."""
    draw = random.Random(2)
    fewer = several = 0
    for _ in range(70):
        graph, devices = slow_graph(draw), draw.randint(2, 3)
        orders = [stages for stages in every_order(graph) if len(stages) <= devices]
        spread = [
            replicated(graph, stages, used)
            for stages in orders
            for used in itertools.product(range(1, devices + 1), repeat=len(stages))
            if sum(used) <= devices
        ]
        assert cut(graph, flat(devices, 2)).seconds == pytest.approx(min(spread))
        loads = [single(graph, stages) for stages in orders]
        found = cut(graph, flat(devices, 2), single=True)
        assert found.seconds == pytest.approx(min(loads))
        fewer += len(contracted(graph).graph.layers) < len(graph.layers)
        several += len(found.stages) > 1
    assert fewer > 30
    assert several > 20


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
    (Links(2, 1), Links(3, 40)),
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
        inside = any(isinstance(part, Replicated) for part in found.parts)
        assert inside == ("x(" in found.replicas)
        repeated += inside
    assert repeated or levels[0].bandwidth > levels[1].bandwidth


def test_a_device_more_never_hurts() -> None:
    draw = random.Random(1)
    for _ in range(20):
        graph = random_graph(draw)
        paces = [cut(graph, flat(n, 2)).seconds for n in range(1, 6)]
        assert paces == sorted(paces, reverse=True)


def grouped_graph(draw: random.Random) -> LayerGraph:
    """A forward pass, maybe in groups, and a backward pass of some of it, with memory."""
    count = draw.randint(2, 4)
    layers = [
        Layer(f"n{i}", 0, 0, draw.randint(0, 9), 0, 0, f"g{i}")
        if draw.random() < 0.3
        else Layer(
            f"n{i}", draw.randint(0, 30), 0, draw.randint(0, 9), 0, draw.randint(0, 6), f"g{i}"
        )
        for i in range(count)
    ]
    if draw.random() < 0.4:
        layers[-1] = replace(layers[-1], group=layers[draw.randrange(count - 1)].group)
    pairs = itertools.combinations(range(count), 2)
    edges = [pair for pair in pairs if draw.random() < 0.5]
    for i in reversed(range(draw.randint(0, count))):
        edges += [(j, len(layers)) for j in {i, len(layers) - 1} if draw.random() < 0.8]
        layers.append(
            replace(layers[i], name=f"b{i}", forward=draw.randint(0, 9), is_backward=True)
        )
    return LayerGraph(tuple(layers), tuple(edges))


def every_grouped(graph: LayerGraph, devices: int) -> Iterator[Stages]:
    """All stages on one device each, written out: groups whole, forward edges forwards."""
    groups = sorted({layer.group for layer in graph.layers})
    for places in itertools.product(range(devices), repeat=len(groups)):
        stage_of = [places[groups.index(layer.group)] for layer in graph.layers]
        forward = [
            (a, b)
            for a, b in graph.edges
            if not graph.layers[a].is_backward and not graph.layers[b].is_backward
        ]
        if all(stage_of[a] <= stage_of[b] for a, b in forward):
            yield tuple(
                tuple(i for i, s in enumerate(stage_of) if s == k) for k in sorted(set(places))
            )


def test_groups_backward_passes_and_memory() -> None:
    draw = random.Random(4)
    refused = backward = 0
    for _ in range(150):
        graph, devices, memory = grouped_graph(draw), draw.randint(1, 3), draw.randint(5, 18)
        loads = [
            single(graph, stages)
            for stages in every_grouped(graph, devices)
            if all(sum(graph.layers[i].memory for i in held) <= memory for held in stages)
        ]
        found = layer_partition.cut(graph, flat(devices, 2), single=True, memory=memory)
        assert (found is None) == (not loads)
        if found is not None:
            assert found.seconds == pytest.approx(min(loads))
            assert found.bound == found.seconds
        refused += not loads
        backward += any(layer.is_backward for layer in graph.layers)
    assert 10 < refused < 100
    assert backward > 50


def test_a_layer_of_a_group_is_not_merged() -> None:
    """It costs nothing and would be beside what it reads, but its gradients are where it is."""
    layers = (
        Layer("a", 30, 0, 100, 0),
        Layer("n", 0, 0, 1, 0, 0, "g"),
        Layer("dn", 30, 0, 1, 0, 0, "g", is_backward=True),
    )
    graph = LayerGraph(layers, ((0, 1), (1, 2)))
    assert cut(graph, flat(2, 2), single=True).seconds == 60


def test_with_too_many_down_sets_some_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)
    unproven = worse = 0
    for _ in range(30):
        graph, alone = random_graph(draw), draw.random() < 0.5
        best = cut(graph, flat(3, 2), single=alone)
        with monkeypatch.context() as patch:
            patch.setattr(layer_graph, "MOST_SETS", 3)
            some = cut(LayerGraph(graph.layers, graph.edges), flat(3, 2), single=alone)
        assert some.bound <= best.seconds * (1 + 1e-12)
        assert some.seconds >= best.seconds * (1 - 1e-12)
        unproven += some.bound < some.seconds
        worse += some.seconds > best.seconds * 1.01
    assert unproven > 10
    assert worse < 6


def test_four_branches_of_eight_layers() -> None:
    """6,561 down-sets a block, as in Inception: what is not proven is bounded."""
    layers, edges = [Layer("in", 1, 0, 1, 0)], []
    for block in range(3):
        start = len(layers) - 1
        for branch in range(4):
            for i in range(8):
                edges.append((start if i == 0 else len(layers) - 1, len(layers)))
                layers.append(Layer(f"{block} {branch} {i}", 1 + (i + branch) % 3, 0, 1, 0))
        ends = [len(layers) - 1 - 8 * k for k in range(4)]
        edges += [(end, len(layers)) for end in ends]
        layers.append(Layer(f"{block} join", 1, 0, 1, 0))
    found = cut(LayerGraph(tuple(layers), tuple(edges)), flat(4, 10), single=True)
    assert found.bound < found.seconds < 1.1 * found.bound


EXPERT = [15, 30, 50, 69, 83, 96]
"""The last nodes of each device of the experts' split of GNMT for inference, by their numbers.

msr-fiddle/dnn-partitioning at b207b6a, human-experts/gnmt_inference_expert.json; node 3, 40 and 41
are with those up to 50, and all others go by their number. Its graph is PipeDream's profile of
GNMT-16 without backward passes, in ms, with bytes / 2^31 as the cost of a transfer.
"""


def test_experts_split_of_gnmt_for_inference() -> None:
    trained = layers_of(read_graph(EXAMPLES / "pipedream_gnmt16.json"))
    layers = tuple(replace(layer, backward=0, parameters=0) for layer in trained.layers)
    graph, speed = LayerGraph(layers, trained.edges), 2**31 * 1e3
    found = cut(graph, flat(6, speed), single=True)
    assert found.bound == found.seconds
    stages: list[list[int]] = [[] for _ in EXPERT]
    for i, layer in enumerate(layers):
        number = int(layer.name.split()[0])
        stages[next(k for k, last in enumerate(EXPERT) if number <= last)].append(i)
    costs = Costs(graph, flat(6, speed), single=True)
    expert = pace(costs, tuple(Stage(tuple(held), 1, 0) for held in stages))
    assert expert / found.seconds == pytest.approx(1.404, abs=1e-3)


def test_too_many_devices_are_refused() -> None:
    layers = tuple(Layer(f"n{i}", 1, 1, 1, 1) for i in range(3))
    with pytest.raises(GraphTooLarge):
        cut(LayerGraph(layers, ()), flat(100_000, 1))


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
    found = cut(graph, levels)
    assert found.replicas == "4-4-8"
    # Their plan takes a fifth more time there.
    theirs = [(s.layers, s.devices) for s in cut(graph, flat(16, TWENTY_FIVE)).stages]
    assert time_of(graph, levels, theirs) / found.seconds == pytest.approx(1.2, abs=0.01)
