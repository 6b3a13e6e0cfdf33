"""Layers on a pipeline of submeshes: Alpa's inter-operator program (Zheng et al. 2022, §5).

Consecutive groups of layers go to stages, each on a submesh of its own; the slowest stage sets the
pace. T = Σ t_i + (B - 1) · max t_i is least over all cuts, submeshes and what a stage does on its
submesh, with what stage s from the end keeps in flight, s micro-batches, within memory. For each
bound on the slowest stage the least sum is a dynamic program over stages, groups and devices.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from meshdsl.cluster.profile import Cluster
from meshdsl.cluster.timing import Timing, parts_of
from meshdsl.costgraph.transformer import LayerStage, Transformer
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass

CLOSE = 1e-4
"""Bounds on the slowest stage that are closer than this share are not told apart (as in Alpa)."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute consecutive groups: on `devices`, in `seconds` a micro-batch.

    Bytes a device: `held` whatever is in flight, and `kept` for each micro-batch. `mesh`: devices
    by data, by tensor and, where there are experts, those that share them.
    """

    devices: int
    seconds: float
    held: float
    kept: float
    name: str
    mesh: tuple[int, ...] = ()


Ways = Callable[[int, int], Sequence[Way]]
"""The ways to compute the groups from one to another, exclusive."""


@dataclass(frozen=True, slots=True)
class InterOpPlan:
    """Stages in order: where each begins, and its way. `seconds` of all micro-batches."""

    starts: tuple[int, ...]
    ways: tuple[Way, ...]
    seconds: float
    work: int


def pipeline_time(ways: Sequence[Way], micro_batches: int) -> float:
    """Seconds of all micro-batches: each stage once, and the slowest for all others."""
    times = [way.seconds for way in ways]
    return sum(times) + (micro_batches - 1) * max(times)


def best_pipeline(
    groups: int, devices: int, micro_batches: int, memory: float, ways: Ways
) -> InterOpPlan | None:
    """The fastest pipeline on all the devices; None where none fits in `memory`."""
    cut = _Cut(groups, devices, memory, ways)
    bounds = cut.bounds()
    # Whether anything fits only grows with the bound: the first that does is found by halving.
    first = bisect.bisect_left(bounds, True, key=lambda bound: cut.least(bound) is not None)
    best: InterOpPlan | None = None
    last = 0.0
    for bound in bounds[first:]:
        if best is not None and (micro_batches - 1) * bound >= best.seconds:
            break
        if bound <= last * (1 + CLOSE):
            continue
        last = bound
        division = cut.least(bound)
        assert division is not None
        seconds = pipeline_time(division[1], micro_batches)
        if best is None or seconds < best.seconds:
            best = InterOpPlan(*division, seconds, cut.work)
    return best


def divides(groups: int, devices: int, ways: Ways) -> bool:
    """Whether there is a pipeline on all the devices, whatever it holds."""
    return _Cut(groups, devices, math.inf, ways).least(math.inf) is not None


class _Cut:
    """The dynamic program under a bound on the slowest stage."""

    def __init__(self, groups: int, devices: int, memory: float, ways: Ways) -> None:
        self.groups, self.devices, self.memory = groups, devices, memory
        self.ways = {
            (i, j): [w for w in ways(i, j) if w.held + w.kept <= memory]
            for i in range(groups)
            for j in range(i + 1, groups + 1)
        }
        self.work = 0

    def bounds(self) -> list[float]:
        """The seconds that a slowest stage can take, ascending."""
        return sorted({way.seconds for ways in self.ways.values() for way in ways})

    def least(self, bound: float) -> tuple[tuple[int, ...], tuple[Way, ...]] | None:
        """The stages of least sum of seconds, each within the bound, on all devices."""
        most = min(self.groups, self.devices)
        # sums[s][k][d]: groups from k on, in s stages, on d devices.
        sums = np.full((most + 1, self.groups + 1, self.devices + 1), np.inf)
        sums[0, self.groups, 0] = 0.0
        choices: dict[tuple[int, int, int], tuple[int, Way]] = {}
        for stages in range(1, most + 1):
            for start, end, way in self._within(bound, stages):
                self.work += 1
                here = sums[stages, start, way.devices :]
                then = way.seconds + sums[stages - 1, end, : self.devices + 1 - way.devices]
                for at in np.flatnonzero(then < here):
                    choices[stages, start, int(at) + way.devices] = end, way
                np.minimum(here, then, out=here)
        ends = sums[:, 0, self.devices]
        if np.isinf(ends.min()):
            return None
        return self._stages(choices, int(ends.argmin()))

    def _within(self, bound: float, stages: int) -> Iterator[tuple[int, int, Way]]:
        """The stages that may stand `stages` from the end: as many micro-batches are in flight."""
        for (start, end), ways in self.ways.items():
            for way in ways:
                if way.seconds <= bound and way.held + stages * way.kept <= self.memory:
                    yield start, end, way

    def _stages(
        self, made: dict[tuple[int, int, int], tuple[int, Way]], stages: int
    ) -> tuple[tuple[int, ...], tuple[Way, ...]]:
        starts, ways, start, devices = [], [], 0, self.devices
        while stages:
            end, way = made[stages, start, devices]
            starts.append(start)
            ways.append(way)
            stages, start, devices = stages - 1, end, devices - way.devices
        return tuple(starts), tuple(ways)


def submeshes(cluster: Cluster, devices: int) -> Iterator[int]:
    """Devices of a submesh: 1, 2, 4 … within a node, a node, and several whole nodes.

    Each size within a node divides the next, so that submeshes of as many devices as there are
    always have room beside each other (Zheng et al. 2022, theorem 1).
    """
    node, size = cluster.levels[0].size, 1
    while size <= min(devices, node):
        if node % size:
            break
        yield size
        size *= 2
    if size // 2 < node <= devices:
        yield node
    yield from range(2 * node, devices + 1, node)


def submesh_shape(cluster: Cluster, devices: int) -> tuple[int, int]:
    """The nodes of a submesh, and the devices in each."""
    node = cluster.levels[0].size
    return (devices // node, node) if devices > node else (1, devices)


def transformer_ways(
    model: Transformer,
    cluster: Cluster,
    groups: int,
    micro: int,
    devices: int,
    sends: bool = True,
) -> Ways:
    """The ways to compute groups of layers on submeshes: data, tensor and expert parallel.

    `micro` is the batch of a micro-batch. The state of the optimizer is split over the data
    parallel devices, as Alpa does with `prefer_reduce_scatter`. What is done once a step, reducing
    gradients and the update, counts for each micro-batch in equal parts. A stage waits until it has
    sent its results on, and its gradients back; Alpa's program leaves these `sends` out.
    """
    per_group, micros = model.layers // groups, model.batch // micro
    meshes = [*_logical_meshes(model, cluster, micro, devices)]

    def ways(start: int, end: int) -> list[Way]:
        group_ways = []
        routed = model.expert_layers(start * per_group, end * per_group)
        for size, data, tensor, timing in meshes:
            for shared in model.expert_splits(data) if routed else (1,):
                stage = LayerStage(
                    model,
                    timing,
                    (end - start) * per_group,
                    micro // data,
                    start == 0,
                    end == groups,
                    split_state=True,
                    routed=routed,
                    shared=shared,
                )
                held = stage.held() + stage.working()
                axes = (data, tensor, shared) if model.experts else (data, tensor)
                sent = (start > 0) + (end < groups) if sends else 0
                seconds = stage.seconds() + sent * stage.sending() + stage.once() / micros
                group_ways.append(Way(size, seconds, held, stage.kept(), str(axes), axes))
        return group_ways

    return ways


def _logical_meshes(
    model: Transformer, cluster: Cluster, micro: int, devices: int
) -> Iterator[tuple[int, int, int, Timing]]:
    """Devices of a submesh by data and by tensor parallelism, and how long things take there."""
    for size in submeshes(cluster, devices):
        for tensor in range(1, min(size, model.heads) + 1):
            data = size // tensor
            if (
                size % tensor
                or micro % data
                or model.heads % tensor
                or not model.routable(micro // data)
            ):
                continue
            # What is sent on goes as far as if all stages were as large, on a few devices more
            # where a node would be cut; in a cluster without these, it is not counted.
            few = -(-devices // size)
            for stages in (*range(few, 2 * few + 1), 1):
                if parts_of(cluster, [stages, data, tensor]) is not None:
                    axes = (("pipe", stages), ("data", data), ("tensor", tensor))
                    yield size, data, tensor, Timing(cluster, Mesh("submesh", axes))
                    break
