"""Pipelines over submeshes: against every cut of small ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshdsl.cluster.profile import load
from meshdsl.costgraph.inter_op import (
    CLOSE,
    Way,
    Ways,
    best_pipeline,
    pipeline_time,
    submeshes,
    transformer_ways,
)
from meshdsl.costgraph.transformer import Experts, Transformer


def every_pipeline(
    ways: dict[tuple[int, int], list[Way]], start: int, groups: int
) -> list[tuple[Way, ...]]:
    """Every sequence of stages from a group on."""
    if start == groups:
        return [()]
    return [
        (way, *rest)
        for end in range(start + 1, groups + 1)
        for way in ways[start, end]
        for rest in every_pipeline(ways, end, groups)
    ]


def of(ways: dict[tuple[int, int], list[Way]]) -> Ways:
    return lambda i, j: ways[i, j]


def random_way(draw: random.Random) -> Way:
    bytes_ = draw.randint(0, 9), draw.randint(0, 4)
    return Way(draw.randint(1, 3), draw.randint(1, 20), *bytes_, "")


def fits(stages: tuple[Way, ...], memory: float) -> bool:
    flights = range(len(stages), 0, -1)
    return all(w.held + n * w.kept <= memory for w, n in zip(stages, flights, strict=True))


def test_no_pipeline_is_faster() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(200):
        groups, devices = draw.randint(1, 4), draw.randint(1, 5)
        ends = itertools.combinations(range(groups + 1), 2)
        ways = {pair: [random_way(draw) for _ in range(draw.randint(0, 3))] for pair in ends}
        micro_batches, memory = draw.randint(1, 8), draw.randint(5, 20)
        possible = [
            pipeline_time(stages, micro_batches)
            for stages in every_pipeline(ways, 0, groups)
            if sum(w.devices for w in stages) == devices and fits(stages, memory)
        ]
        best = best_pipeline(groups, devices, micro_batches, memory, of(ways))
        assert (best is None) == (not possible)
        if best is not None:
            assert best.seconds == min(possible)
            assert fits(best.ways, memory)
            assert best.seconds == pipeline_time(best.ways, micro_batches)
            found += 1
    assert found > 50


def test_twelve_devices_are_a_node_and_half_of_one() -> None:
    model = Transformer(6, 1024, 8, 1024, 32000, 48)
    ways = transformer_ways(model, load("v100-p3"), 6, 8, 12)
    best = best_pipeline(6, 12, 6, 15.3e9, ways)
    assert best is not None
    assert sum(way.devices for way in best.ways) == 12
    assert {way.devices for way in ways(0, 6)} == {1, 2, 4, 8}


@pytest.mark.parametrize("memory", [1e6, 5e6, 6e6, 1e7])
def test_no_pipeline_with_experts_is_faster(memory: float) -> None:
    """Of all cuts of four groups over submeshes of four devices, with every parallel size."""
    model = Transformer(8, 64, 8, 32, 128, 16, experts=Experts(4, 2, 2, 64))
    ways = transformer_ways(model, load("v100-p3"), 4, 8, 4)
    every = {pair: [*ways(*pair)] for pair in itertools.combinations(range(5), 2)}
    possible = [
        pipeline_time(stages, 2)
        for stages in every_pipeline(every, 0, 4)
        if sum(w.devices for w in stages) == 4 and fits(stages, memory)
    ]
    best = best_pipeline(4, 4, 2, memory, ways)
    assert (best is None) == (not possible) == (memory == 1e6)
    if best is not None:
        assert min(possible) <= best.seconds <= min(possible) * (1 + CLOSE)


@pytest.mark.parametrize(("cluster", "node"), [("v100-p3", 8), ("cpu", 6), ("cpu", 12)])
def test_submeshes_have_room_beside_each_other(cluster: str, node: int) -> None:
    """Alpa's theorem 1, by trying: sizes that add up to all devices never straddle a node."""
    machine = load(cluster)
    levels = (replace(machine.levels[0], size=node), *machine.levels[1:])
    sizes = [*submeshes(replace(machine, levels=levels), 2 * node)]
    assert {1, 2, node, 2 * node} <= {*sizes}
    for count in range(1, 5):
        for several in itertools.combinations_with_replacement(sizes[::-1], count):
            if sum(several) == 2 * node:
                starts = itertools.accumulate((0, *several[:-1]))
                for start, size in zip(starts, several, strict=True):
                    assert start % min(size, node) == 0
