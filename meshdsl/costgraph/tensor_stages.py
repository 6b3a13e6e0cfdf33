"""Stages with data and tensor parallelism: Piper's program (Tarnawski et al. 2021).

A stage has consecutive layers, on t x d devices: each layer is computed by t devices together, and
d such groups share the micro-batches. Each layer of a stage is computed in one of its ways for t
devices, such as with its activations kept or computed again. The outer program is over down-sets,
devices, and the groups that the stages from there on have in all: of one stage ceil(groups / d)
micro-batches are in flight on a device. The inner one finds the ways of the layers of a stage that
take the least time and fit: exactly here, by a greedy rule in the published code.

Times are in seconds a micro-batch, sizes in bytes, bandwidths in bytes per second one way.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.costgraph.layer_graph import GraphTooLarge, LayerGraph, LayerWay, contracted, members
from meshdsl.costgraph.layer_partition import Costs, Seconds, flat
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

Truths: TypeAlias = "npt.NDArray[np.bool_]"

MOST_WORK = 2_000_000_000
"""Stages, times the devices and groups that later ones may have, that are looked at."""

MOST_STATES = 30_000_000
"""Down-sets, times the devices and groups of stages behind them, that are kept.

Of tables of stages, four times as many.
"""

MOST_CHOICES = 20_000
"""Combinations of ways, none better than another in both time and memory, that are kept."""


@dataclass(frozen=True, slots=True)
class TensorStage:
    """Layers and the ways of those that cost something, on `data` groups of `tensor` devices."""

    layers: tuple[int, ...]
    ways: tuple[LayerWay, ...]
    data: int
    tensor: int
    seconds: float
    memory: float


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Stages in order, the seconds between micro-batches, what these are not below, and work."""

    stages: tuple[TensorStage, ...]
    seconds: float
    bound: float
    work: int


@dataclass(frozen=True, eq=False)
class TensorCosts:
    """What stages with data and tensor parallelism cost and hold.

    A batch has `micro_batches`; a number of groups has to divide it. No device holds more than
    `memory`.
    """

    graph: LayerGraph
    devices: int
    bandwidth: float
    micro_batches: int
    memory: float = math.inf

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of devices by which layers can be computed together."""
        sizes = {way.tensor for layer in self.graph.layers for way in layer.all_ways}
        return tuple(sorted(size for size in sizes if size <= self.devices))

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The devices of a group and the groups that a stage may have."""
        return tuple(
            (tensor, data)
            for tensor in self.degrees
            for data in range(1, min(self.devices // tensor, self.micro_batches) + 1)
            if self.micro_batches % data == 0
        )

    @property
    def most_groups(self) -> int:
        """The most groups of all stages: each has a micro-batch of its own to begin with."""
        return min(self.devices, self.micro_batches)

    def way(self, way: LayerWay, data: int) -> float:
        """Seconds of a layer in a stage of `data` groups: its part, and of a batch's reduction."""
        reduced = 4 * (data - 1) / data * way.parameters / self.micro_batches
        return way.seconds / data + reduced / self.bandwidth

    def moved(self, sent: float, tensor: int, data: int) -> float:
        """Seconds for bytes into and out of a stage, and as many of gradients.

        Where several devices compute together they have to be split or gathered, too.
        """
        return 2 * sent * (1 if tensor == 1 else 2) / (self.bandwidth * data)

    def stage(self, held: int, tensor: int, data: int, groups: int) -> TensorStage | None:
        """The fastest ways of layers that fit, where all stages from here on have `groups`."""
        others = self.graph.every_layer & ~held
        sent = self.graph.crossing(others, held) + self.graph.crossing(held, others)
        options = self._options(held, tensor, data, -(-groups // data))
        picks = None if options is None else cheapest(options, self.memory)
        if options is None or picks is None:
            return None
        layers = tuple(members(held))
        ways = tuple(self.ways(i, tensor)[pick] for i, pick in zip(layers, picks, strict=True))
        chosen = [row[pick] for row, pick in zip(options, picks, strict=True)]
        seconds = math.fsum(time for time, _ in chosen) + self.moved(sent, tensor, data)
        return TensorStage(layers, ways, data, tensor, seconds, math.fsum(m for _, m in chosen))

    def ways(self, layer: int, tensor: int) -> list[LayerWay]:
        """The ways to compute a layer on so many devices together."""
        here = self.graph.layers[layer]
        if here.is_free:
            return [LayerWay("", tensor, 0.0, 0.0, 0.0, 0.0)]
        return [way for way in here.all_ways if way.tensor == tensor]

    def _options(self, held: int, tensor: int, data: int, flight: int) -> Options | None:
        """Seconds and bytes of the ways of each layer; None where a layer has none."""
        every = self.options(tensor, data, flight)
        rows = tuple(every[i] for i in members(held))
        return rows if all(rows) else None

    def options(self, tensor: int, data: int, flight: int) -> Options:
        """Seconds and bytes of the ways of all layers with so many micro-batches in flight."""
        if (tensor, data, flight) not in self._rows:
            self._rows[tensor, data, flight] = tuple(
                tuple(
                    (self.way(way, data), way.memory + flight * way.in_flight)
                    for way in self.ways(i, tensor)
                )
                for i in range(len(self.graph.layers))
            )
        return self._rows[tensor, data, flight]

    @cached_property
    def _rows(self) -> dict[tuple[int, int, int], Options]:
        """The options of all layers, by the shape of a stage and what is in flight."""
        return {}


Options: TypeAlias = tuple[tuple[tuple[float, float], ...], ...]
"""For each layer its ways: seconds and bytes."""


Combination: TypeAlias = tuple[float, float, tuple[int, ...]]
"""Seconds, bytes, and the choice of each layer."""


def cheapest(options: Options, memory: float) -> tuple[int, ...] | None:
    """The choice of each layer with the least sum of seconds within `memory`; None for none.

    Layers with the same ways are alike. Raises GraphTooLarge.
    """
    kinds = sorted(Counter(options).items())
    best = _cheapest(tuple(kinds), memory)
    if best is None:
        return None
    picks = iter(best[2])
    by_kind = {row: [next(picks) for _ in range(count)] for row, count in kinds}
    return tuple(by_kind[row].pop() for row in options)


@functools.lru_cache(maxsize=50_000)
def _cheapest(
    kinds: tuple[tuple[tuple[tuple[float, float], ...], int], ...], memory: float
) -> Combination | None:
    """The best choices of layers of some kinds, one kind after the other."""
    limit = memory * (1 + 1e-12)  # sums in another order may differ in the last bits
    left = math.fsum(count * min(m for _, m in row) for row, count in kinds)
    combinations: list[Combination] = [(0.0, 0.0, ())]
    for row, count in kinds:
        left -= count * min(m for _, m in row)
        combinations = _unbeaten(combinations, _of_one_kind(row, count), limit - left)
    return combinations[0] if combinations else None


@functools.lru_cache(maxsize=50_000)
def _of_one_kind(row: tuple[tuple[float, float], ...], count: int) -> list[Combination]:
    """The combinations of equal layers that none beats in both seconds and bytes."""
    one: list[Combination] = [(time, held, (k,)) for k, (time, held) in enumerate(row)]
    if count == 1:
        return _unbeaten([(0.0, 0.0, ())], one, math.inf)
    return _unbeaten(_of_one_kind(row, count - 1), one, math.inf)


def _unbeaten(
    some: list[Combination], others: list[Combination], limit: float
) -> list[Combination]:
    """The sums within a limit of bytes that none beats in both, the fastest first."""
    grown = sorted(
        (time + t, held + m, (*picks, *more))
        for time, held, picks in some
        for t, m, more in others
        if held + m <= limit
    )
    unbeaten, lowest = list[Combination](), math.inf
    for choice in grown:
        if choice[1] < lowest:
            lowest = choice[1]
            unbeaten.append(choice)
    if len(unbeaten) > MOST_CHOICES:
        raise GraphTooLarge("the layers have too many combinations of ways to compute them")
    return unbeaten


def cut_with_tensors(
    graph: LayerGraph, devices: int, bandwidth: float, micro_batches: int, memory: float = math.inf
) -> TensorCut | None:
    """The stages on at most all devices with the shortest time between micro-batches.

    Of equal ones, those on the fewest devices. None where nothing fits. Raises GraphTooLarge.
    """
    small = contracted(graph)
    costs = TensorCosts(small.graph, devices, bandwidth, micro_batches, memory)
    plain = Costs(small.graph, flat(devices, bandwidth), single=True)
    search = _TensorSearch(costs, plain)
    sets = len(plain.sets)
    work = sets**2 // 2 * len(costs.shapes) * devices * costs.most_groups
    flights = sum(-(-costs.most_groups // data) for _, data in costs.shapes)
    states = sets * max(devices * costs.most_groups, sets * flights // 4)
    if work > MOST_WORK or states > MOST_STATES:
        raise GraphTooLarge(f"{sets:,} down-sets on {devices:,} devices are too many to try")
    stages = search.stages()
    if stages is None:
        if not plain.is_exact:
            raise GraphTooLarge(
                "the stages that were tried do not fit, and all are too many to try"
            )
        return None
    seconds = max(stage.seconds for stage in stages)
    held = small.expanded([stage.layers for stage in stages])
    stages = tuple(replace(stage, layers=h) for stage, h in zip(stages, held, strict=True))
    fastest = (min(w.seconds * w.tensor for w in layer.all_ways) for layer in graph.layers)
    bound = seconds if plain.is_exact else min(seconds, math.fsum(fastest) / devices)
    return TensorCut(stages, seconds, bound, work)


@dataclass(frozen=True, eq=False)
class _TensorSearch:
    """The recurrence, from the last stage to the first."""

    costs: TensorCosts
    plain: Costs

    def stages(self) -> tuple[TensorStage, ...] | None:
        """The best stages; None where nothing fits."""
        paces = self._paces
        least = float(paces[0].min())
        if math.isinf(least):
            return None
        at, (left, groups) = 0, _first(paces[0] == least)
        stages = []
        while at != len(paces) - 1:
            at_next, tensor, data = self._step(at, left, groups)
            held = self.plain.sets[at_next] & ~self.plain.sets[at]
            stage = self.costs.stage(held, tensor, data, groups)
            assert stage is not None
            stages.append(stage)
            at, left, groups = at_next, left - tensor * data, groups - data
        return tuple(stages)

    def _step(self, at: int, left: int, groups: int) -> tuple[int, int, int]:
        """The next down-set, and the stage before it, of the least pace of a state."""
        for tensor, data in self.costs.shapes:
            if tensor * data <= left and data <= groups:
                seconds = self._seconds(tensor, data)[-(-groups // data) - 1][at]
                later = self._paces[:, left - tensor * data, groups - data]
                reached = np.flatnonzero(
                    np.maximum(seconds, later) == self._paces[at, left, groups]
                )
                if len(reached) and np.isfinite(seconds[reached[0]]):
                    return int(reached[0]), tensor, data
        raise AssertionError("a state without a stage")

    @cached_property
    def _paces(self) -> Seconds:
        """By down-set, devices and groups at most: the least pace of all that is behind it."""
        costs, sets = self.costs, len(self.plain.sets)
        most = costs.most_groups
        paces = np.full((sets, costs.devices + 1, most + 1), np.inf)
        paces[-1] = 0.0
        for at in range(sets - 2, -1, -1):
            for tensor, data in costs.shapes:
                devices = tensor * data
                tables = self._seconds(tensor, data)
                flights = [-(-groups // data) - 1 for groups in range(data, most + 1)]
                seconds = np.stack([tables[k][at, at + 1 :] for k in flights], axis=-1)
                open_ = np.flatnonzero(np.isfinite(seconds).any(axis=1))
                if len(open_):
                    later = paces[at + 1 + open_, : costs.devices + 1 - devices, : most + 1 - data]
                    slowest = np.maximum(seconds[open_, None, :], later).min(axis=0)
                    here = paces[at, devices:, data:]
                    np.minimum(here, slowest, out=here)
        return paces

    @cached_property
    def _tables(self) -> dict[tuple[int, int], list[Seconds]]:
        return {}

    def _seconds(self, tensor: int, data: int) -> list[Seconds]:
        """For 1 and more micro-batches in flight: seconds by the down-sets around a stage."""
        if (tensor, data) not in self._tables:
            most = -(-self.costs.most_groups // data)
            self._tables[tensor, data] = list(self._shaped(tensor, data, most))
        return self._tables[tensor, data]

    def _shaped(self, tensor: int, data: int, most: int) -> Iterator[Seconds]:
        costs = self.costs
        ways = [costs.ways(i, tensor) for i in range(len(costs.graph.layers))]
        fastest = [min(row, key=lambda w: costs.way(w, data), default=None) for row in ways]
        between = self._between([0.0 if row else 1.0 for row in ways])
        outside = self._outside | (between > 0)
        sent = costs.moved(1.0, tensor, data) * self._sent
        seconds = self._between([costs.way(w, data) if w else 0.0 for w in fastest]) + sent
        limit = costs.memory * (1 + 1e-12)
        for flight in range(1, most + 1):
            here = np.where(outside, np.inf, seconds)
            if math.isfinite(limit):
                quick = [w.memory + flight * w.in_flight if w else 0.0 for w in fastest]
                full = ~outside & (self._between(quick) > limit)
                here[full] = np.inf
                options = costs.options(tensor, data, flight)
                least = [min((m for _, m in row), default=0.0) for row in options]
                kinds = sorted(set(options))
                each = self._held @ np.array([[row == kind for kind in kinds] for row in options])
                for a, b in np.argwhere(full & (self._between(least) <= limit)):
                    counts = (each[b] - each[a]).tolist()
                    some = [(k, int(n)) for k, n in zip(kinds, counts, strict=True) if n]
                    best = _cheapest(tuple(some), costs.memory)
                    here[a, b] = math.inf if best is None else best[0] + sent[a, b]
            yield here

    def _between(self, numbers: Sequence[float]) -> Seconds:
        """The sums of numbers of layers in each stage, by its two down-sets."""
        sums = self._held @ np.array(numbers)
        between: Seconds = sums[None] - sums[:, None]
        return between

    @cached_property
    def _held(self) -> Seconds:
        count = len(self.costs.graph.layers)
        return np.array([[s >> i & 1 for i in range(count)] for s in self.plain.sets], dtype=float)

    @cached_property
    def _outside(self) -> Truths:
        """Whether two down-sets have no stage between them."""
        outside: Truths = np.isinf(self.plain.tables.seconds)
        return outside

    @cached_property
    def _sent(self) -> Seconds:
        return self.plain.sent(self._held)


def _first(where: Truths) -> tuple[int, int]:
    """The first place in a table that is true."""
    devices, groups = np.argwhere(where)[0]
    return int(devices), int(groups)
