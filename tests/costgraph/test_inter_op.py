"""Pipelines over submeshes: against every cut of small ones, and Alpa's published plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from meshdsl.cluster.profile import load
from meshdsl.costgraph.inter_op import (
    Way,
    Ways,
    best_pipeline,
    pipeline_time,
    submeshes,
    transformer_ways,
)
from meshdsl.costgraph.transformer import Transformer


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


P3 = load("v100-p3")
LIMIT = 15.3e9
"""Bytes of a V100's 16 GB that a program can have."""

ALPA = [
    ("760M", 2, 24, 1536, 16, 128, 6, [(3, 1, "(1, 1)")] * 2, 0.07),
    ("1.3B", 4, 24, 2048, 32, 128, 6, [(3, 2, "(2, 1)")] * 2, 0.0),
    ("2.6B", 8, 32, 2560, 32, 128, 8, [(2, 2, "(2, 1)")] * 2 + [(4, 4, "(4, 1)")], 0.07),
    ("6.7B", 16, 32, 4096, 32, 64, 8, [(4, 8, "(2, 4)")] * 2, 0.07),
    ("15B", 32, 48, 5120, 40, 128, 16, [(4, 8, "(2, 4)")] * 4, 0.07),
    ("39B", 64, 48, 8192, 64, 1024, 16, [(1, 4, "(1, 4)")] * 16, 0.0),
]
"""Alpa's plans: alpa-projects/alpa at 14ad84b, benchmark/alpa/suite_auto_gpt.py, perf_test_suite.

Devices, layers, width, heads, micro-batches of a batch of 1,024, groups of layers; then groups,
devices and logical mesh of each stage. The last column is how much slower than ours the plan is by
the profile, at most (0: the same plan).
"""


@pytest.mark.parametrize(
    ("devices", "layers", "hidden", "heads", "micros", "groups", "stages", "above"),
    [case[1:] for case in ALPA],
    ids=[case[0] for case in ALPA],
)
def test_published_plans_of_alpa(
    devices: int,
    layers: int,
    hidden: int,
    heads: int,
    micros: int,
    groups: int,
    stages: list[tuple[int, int, str]],
    above: float,
) -> None:
    model = Transformer(layers, hidden, heads, 1024, 51200, 1024)
    ways = transformer_ways(model, P3, groups, 1024 // micros, devices)
    starts = [0, *itertools.accumulate(count for count, _, _ in stages)]
    theirs = tuple(
        next(w for w in ways(a, b) if (w.devices, w.name) == (size, name))
        for (a, b), (_, size, name) in zip(itertools.pairwise(starts), stages, strict=True)
    )
    ours = best_pipeline(groups, devices, micros, LIMIT, ways)
    assert ours is not None
    assert fits(theirs, LIMIT)
    seconds = pipeline_time(theirs, micros)
    assert ours.seconds <= seconds <= ours.seconds * (1 + above)
    if not above:
        assert ours.ways == theirs
