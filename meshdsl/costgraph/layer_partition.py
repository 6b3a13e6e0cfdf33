"""Cutting a graph of layers into stages: for chains, and for graphs that branch.

A stage is what one down-set of the graph has beyond a smaller one, so that values only flow
forward. Two published problems are solved by one recurrence over down-sets and devices:

- `replicated`: PipeDream's (Harlap et al. 2018; Narayanan et al. 2019). Every stage may be on
  several devices, which share its micro-batches and reduce its gradients; transfers overlap with
  computation, so the slowest stage or link sets the pace. A cluster has levels of links, such as
  machines and a network between them. A stage is on consecutive devices, or a pipeline inside one
  unit of a level is repeated on several units: the term T^k(i -> j, m) of Narayanan et al., §3.1.
- `single`: the throughput problem of Tarnawski et al. (2020). A stage is on one device, whose load
  is its computation and what it receives and sends, each value once a side.

Times are in seconds a micro-batch, sizes in bytes, bandwidths in bytes per second one way.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.cluster.profile import Cluster
from meshdsl.costgraph.layer_graph import GraphTooLarge, LayerGraph, contracted, members
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

Seconds: TypeAlias = "npt.NDArray[np.float64]"
Places: TypeAlias = "npt.NDArray[np.intp]"

MOST_WORK = 2_000_000_000
"""Stages on some devices, behind others, that are looked at."""

MOST_STEPS = 400_000
"""Numbers of devices of a stage, and of those in front of it, that are looked at."""


@dataclass(frozen=True, slots=True)
class Links:
    """One level of a cluster: so many units, each with a link of this many bytes a second.

    The units of the innermost level are devices, those of another one the groups of the level
    before: machines of eight devices, and a network of four machines.
    """

    units: int
    bandwidth: float


Levels = tuple[Links, ...]
"""The levels of a cluster, inside out."""


def levels_of(cluster: Cluster, devices: int) -> Levels | None:
    """The levels that so many devices fill; None where a unit of one is left in part.

    The link of a unit is that of its devices together. On a ring or a torus it is one link.
    """
    levels, inner = [], 1
    for level in cluster.levels:
        units = min(level.size, devices // inner)
        if devices % (inner * units):
            return None
        levels.append(Links(units, level.bandwidth * max(1.0, inner / level.shared_by)))
        inner *= units
        if inner == devices:
            return tuple(levels)
    return None


def flat(devices: int, bandwidth: float) -> Levels:
    """One level: every device has a link of its own."""
    return (Links(devices, bandwidth),)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers, on how many devices, and the seconds that a micro-batch takes there."""

    layers: tuple[int, ...]
    devices: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Replicated:
    """A pipeline inside one unit of a level, on several units that share the micro-batches."""

    copies: int
    level: int
    parts: tuple[Stage | Replicated, ...]
    seconds: float


Parts = tuple[Stage | Replicated, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages in order, and the seconds between two micro-batches, which the slowest part sets.

    No stages take less than `bound`. `work` counts the stages that were added to a down-set and
    devices.
    """

    parts: Parts
    seconds: float
    bound: float
    work: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order, each with all its devices."""
        return tuple(_flattened(self.parts, 1))

    @property
    def replicas(self) -> str:
        """The devices of the stages, as PipeDream writes them: 3-1; 4x(3-1) on four machines."""
        return _replicas(self.parts)


def _flattened(parts: Parts, copies: int) -> Iterator[Stage]:
    for part in parts:
        if isinstance(part, Stage):
            yield Stage(part.layers, part.devices * copies, part.seconds)
        else:
            yield from _flattened(part.parts, copies * part.copies)


def _replicas(parts: Parts) -> str:
    return "-".join(
        str(part.devices) if isinstance(part, Stage) else f"{part.copies}x({_replicas(part.parts)})"
        for part in parts
    )


@dataclass(frozen=True, eq=False)
class Costs:
    """What stages of a graph cost on a cluster with levels: one, or all between two down-sets.

    With `single` a stage is on one device (see the module). No device holds more than `memory`.
    """

    graph: LayerGraph
    levels: Levels
    single: bool = False
    memory: float = math.inf

    @property
    def sets(self) -> tuple[int, ...]:
        """The down-sets between which stages are: all, or some where all are too many."""
        return self._tried[0]

    @property
    def is_exact(self) -> bool:
        """Whether those are all down-sets."""
        return self._tried[1]

    @cached_property
    def _tried(self) -> tuple[tuple[int, ...], bool]:
        try:
            return self.graph.down_sets, True
        except GraphTooLarge:
            return self.graph.some_down_sets, False

    @cached_property
    def bound(self) -> float:
        """What no pace is below: the work shared evenly, and on one device the largest block."""
        even_share = math.fsum(layer.seconds for layer in self.graph.layers) / self.sizes[-1]
        blocks = self.graph.blocks if self.single else ()
        alone = (
            math.fsum(self.graph.layers[i].seconds for i in members(mask)) for mask, _ in blocks
        )
        return max([even_share, *alone])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices of a unit of each level: a device first, the whole cluster last."""
        units = (level.units for level in self.levels)
        return tuple(itertools.accumulate(units, operator.mul, initial=1))

    def reduced(self, first: int, devices: int) -> float:
        """Seconds to reduce a byte of gradients between consecutive devices, level by level.

        On each level m units, the most inside one of the next level, take 4 (m - 1) / m of it.
        """
        seconds = []
        for (size, outer_size), level in zip(
            itertools.pairwise(self.sizes), self.levels, strict=True
        ):
            units = range(first // size, (first + devices - 1) // size + 1)
            most = max(Counter(unit * size // outer_size for unit in units).values())
            seconds.append(4 * (most - 1) / (most * level.bandwidth))
        return math.fsum(seconds)

    def received(self, before: int, first: int, devices: int, inner: int = 0) -> float:
        """Seconds for a byte of activations into a stage, and one of their gradients back.

        The stage in front begins at the device `before`. Levels below `inner` are left aside.
        """
        last = first + devices - 1
        return max(
            2 / (level.bandwidth * (last // size - first // size + 1))
            for k, (size, level) in enumerate(zip(self.sizes[:-1], self.levels, strict=True))
            if k >= inner and (k == 0 or before // size != last // size)
        )

    def stage(self, held: int, before: int, first: int, devices: int) -> float:
        """Seconds a micro-batch of the layers `held`, behind those `before`."""
        layers = [self.graph.layers[i] for i in members(held)]
        seconds = math.fsum(layer.seconds for layer in layers)
        if self.single:
            others = self.graph.every_layer & ~held
            sent = self.graph.crossing(others, held) + self.graph.crossing(held, others)
            return seconds + sent / self.levels[0].bandwidth
        parameters = math.fsum(layer.parameters for layer in layers)
        return (seconds + self.reduced(first, devices) * parameters) / devices

    def repeated(self, held: int, copies: int, level: int, inside: float) -> float:
        """Seconds a micro-batch of layers whose pipeline inside a unit, `inside`, is repeated.

        All their parameters are reduced between the units: that a stage may be on several devices
        of each is left aside, as in T^k(i -> j, m).
        """
        parameters = math.fsum(self.graph.layers[i].parameters for i in members(held))
        return (inside + self.between(copies, level) * parameters) / copies

    def between(self, copies: int, level: int) -> float:
        """Seconds to reduce a byte between units of a level."""
        return 4 * (copies - 1) / (copies * self.levels[level].bandwidth)

    def may_repeat(self, copies: int, level: int) -> bool:
        """Whether a repeated pipeline may be faster than all its layers on all its devices.

        At best it computes as fast as these.
        """
        size = self.sizes[level]
        devices, link = copies * size, copies * self.levels[level].bandwidth
        narrower = any(
            self.levels[k].bandwidth * (devices // self.sizes[k]) < link for k in range(level)
        )
        return narrower or self.reduced(0, devices) / size > self.between(copies, level)

    @cached_property
    def tables(self) -> StageTables:
        """Seconds and parameters of every stage, and the bytes into it, by its two down-sets."""
        graph, sets = self.graph, self.sets
        held = np.array([[s >> i & 1 for i in range(len(graph.layers))] for s in sets], dtype=float)
        within = (held @ (1 - held).T == 0) & ~np.eye(len(sets), dtype=bool)
        seconds = held @ np.array([layer.seconds for layer in graph.layers])
        parameters = held @ np.array([layer.parameters for layer in graph.layers])
        spent = np.where(within, np.maximum(seconds[None] - seconds[:, None], 0.0), np.inf)
        if self.single:
            spent += self.sent(held) / self.levels[0].bandwidth
        if math.isfinite(self.memory):
            memory = held @ np.array([layer.memory for layer in graph.layers])
            # Sums in another order may differ in the last bits.
            spent[memory[None] - memory[:, None] > self.memory * (1 + 1e-12)] = np.inf
        bytes_ = np.maximum(parameters[None] - parameters[:, None], 0.0)
        return StageTables(spent, bytes_, np.array([graph.leaving(s) for s in sets]))

    def sent(self, held: Seconds) -> Seconds:
        """Bytes that every stage receives and sends, each value once a side."""
        sent = np.zeros((len(held), len(held)))
        for i, layer in enumerate(self.graph.layers):
            readers = list(members(self.graph.after[i]))
            if not readers or not layer.output:
                continue
            read, produced = held[:, readers].sum(axis=1), held[:, i] > 0
            reading = read[None] - read[:, None]
            making = produced[None] & ~produced[:, None]
            sent += layer.output * np.where(making, reading < len(readers), reading > 0)
        return sent


@dataclass(frozen=True, slots=True)
class StageTables:
    """By the places of two down-sets: seconds (infinite for none) and bytes of parameters.

    `leaving`: bytes out of each down-set.
    """

    seconds: Seconds
    parameters: Seconds
    leaving: Seconds


def cut(
    graph: LayerGraph, levels: Levels, single: bool = False, memory: float = math.inf
) -> Cut | None:
    """The stages on at most all devices with the shortest time between micro-batches.

    Of equal ones, that in which a micro-batch passes all stages soonest. None where no stages keep
    to `memory`, in bytes a device. Where there are too many down-sets, some of them are tried, and
    `bound` says how good the stages are. Raises GraphTooLarge.
    """
    small = contracted(graph)
    costs = Costs(small.graph, levels, single, memory)
    sets, devices = len(costs.sets), costs.sizes[-1]
    # On how many devices, behind how many others, and in how many machines the last stage begins.
    begins = devices // costs.sizes[1] if len(levels) > 1 else 1
    once = devices if single else devices * (devices + 1) // 2 * begins
    if once > MOST_STEPS or once * sets**2 > MOST_WORK:
        raise GraphTooLarge(f"{sets:,} down-sets on {devices:,} devices are too many to try")
    search = _StageSearch(costs)
    parts = search.parts(len(levels), 0, sets - 1)
    if parts is None:
        if not costs.is_exact:
            raise GraphTooLarge(
                "the stages that were tried do not fit, and all are too many to try"
            )
        return None
    full_costs = Costs(graph, levels, single)
    held = small.expanded([stage.layers for stage in _flattened(parts, 1)])
    parts = _priced(full_costs, parts, iter(held), 0, 0)
    seconds = pace(full_costs, parts)
    return Cut(parts, seconds, seconds if costs.is_exact else costs.bound, search.work)


def _priced(
    costs: Costs, parts: Parts, layers: Iterator[tuple[int, ...]], before: int, first: int
) -> Parts:
    """The parts with other layers, stage after stage, and what these take."""
    priced: list[Stage | Replicated] = []
    for part in parts:
        if isinstance(part, Stage):
            held, devices = next(layers), part.devices
            mask = sum(1 << i for i in held)
            priced.append(Stage(held, devices, costs.stage(mask, before, first, devices)))
        else:
            inner = _priced(costs, part.parts, layers, before, 0)
            mask = sum(1 << i for stage in _flattened(inner, 1) for i in stage.layers)
            inside = pace(costs, inner, before)
            seconds = costs.repeated(mask, part.copies, part.level, inside)
            priced.append(Replicated(part.copies, part.level, inner, seconds))
            devices = part.copies * costs.sizes[part.level]
        before, first = before | mask, first + devices
    return tuple(priced)


State = tuple[int, tuple[int, ...]]
"""The devices that stages are on, and the units, level by level, in which the last one begins."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A stage on `devices`; or `copies` of a pipeline inside one unit of the level `inner`."""

    devices: int
    copies: int = 1
    inner: int = 0


@dataclass(frozen=True, slots=True)
class _StagesReached:
    """By down-set: the least value, and the state, the down-set and the step before it."""

    before: int
    values: Seconds
    behind: dict[int, tuple[State, int, _Step]]


@dataclass(frozen=True, eq=False)
class _StageSearch:
    """The recurrence over down-sets, devices and levels."""

    costs: Costs

    @cached_property
    def counted(self) -> list[int]:
        """The stages that were looked at."""
        return []

    @property
    def work(self) -> int:
        """How many stages were looked at."""
        return sum(self.counted)

    @cached_property
    def inside(self) -> dict[int, Seconds]:
        """For the units of a level, by two down-sets: the least pace on the devices of one."""
        return {}

    def unit(self, level: int) -> Seconds:
        """The least pace inside one unit of a level of the stages between two down-sets."""
        if level not in self.inside:
            sets = range(len(self.costs.sets))
            rows = [_least(self._reached(level, first)) for first in sets]
            self.inside[level] = np.stack(rows)
        return self.inside[level]

    def parts(self, level: int, first: int, last: int) -> Parts | None:
        """The best stages inside one unit of a level between two down-sets; None for none."""
        least = float(_least(self._reached(level, first))[last])
        if math.isinf(least):
            return None
        reached = self._reached(level, first, least)
        ends = {state: there.values[last] for state, there in reached.items()}
        state, at = min(ends, key=lambda state: (ends[state], state)), last
        backwards: list[Stage | Replicated] = []
        while at != first:
            behind, source, step = reached[state].behind[at]
            backwards.append(self._part(step, source, at))
            state, at = behind, source
        return tuple(reversed(backwards))

    def _part(self, step: _Step, source: int, target: int) -> Stage | Replicated:
        """A part whose seconds are not known yet."""
        if step.inner:
            parts = self.parts(step.inner, source, target)
            assert parts is not None
            return Replicated(step.copies, step.inner, parts, 0.0)
        sets = self.costs.sets
        return Stage(tuple(members(sets[target] & ~sets[source])), step.devices, 0.0)

    def _steps(self, level: int, first: int) -> Iterator[_Step]:
        """What may begin at a device inside one unit of a level."""
        left = self.costs.sizes[level] - first
        for devices in range(1, (1 if self.costs.single else left) + 1):
            yield _Step(devices)
        for inner in range(1, 1 if self.costs.single else level):
            size, outer_size = self.costs.sizes[inner : inner + 2]
            if size > 1 and first % size == 0:
                for copies in range(2, (outer_size - first % outer_size) // size + 1):
                    if self.costs.may_repeat(copies, inner):
                        yield _Step(copies * size, copies, inner)

    def _seconds(self, step: _Step, first: int, rows: Places) -> Seconds:
        """The seconds of a step from each of the down-sets `rows` to every one."""
        tables = self.costs.tables
        seconds = self.unit(step.inner)[rows] if step.inner else tables.seconds[rows]
        if self.costs.single or step.devices == 1:
            return seconds
        reduced = (
            self.costs.between(step.copies, step.inner)
            if step.inner
            else self.costs.reduced(first, step.devices)
        )
        shared = step.copies if step.inner else step.devices
        return (seconds + reduced * tables.parameters[rows]) / shared

    def _reached(
        self, level: int, first: int, least: float | None = None
    ) -> dict[State, _StagesReached]:
        """Every state inside one unit of a level, from a down-set on.

        The value is the slowest part; with the `least` of these, the sum of those within it.
        """
        costs, sets = self.costs, len(self.costs.sets)
        start = np.full(sets, np.inf)
        start[first] = 0.0
        inner = costs.sizes[1:level]
        reached: dict[State, _StagesReached] = {(0, ()): _StagesReached(0, start, {})}
        for used in range(costs.sizes[level]):
            here = [
                (state, there)
                for state, there in reached.items()
                if state[0] == used and np.isfinite(there.values).any()
            ]
            units = tuple(used // size for size in inner)
            for step in self._steps(level, used) if here else ():
                target = used + step.devices, units
                into = reached.setdefault(target, _StagesReached(used, np.full(sets, np.inf), {}))
                for state, there in here:
                    rows = np.flatnonzero(np.isfinite(there.values))
                    slowest = seconds = self._seconds(step, used, rows)
                    self.counted.append(seconds.size)
                    if used and not costs.single:
                        per_byte = costs.received(there.before, used, step.devices, step.inner)
                        links = costs.tables.leaving[rows, None] * per_byte
                        slowest = np.maximum(seconds, links)
                    values = np.maximum(there.values[rows, None], slowest)
                    if least is not None:
                        through = there.values[rows, None] + seconds
                        values = np.where(slowest <= least, through, np.inf)
                    value = values.min(axis=0)
                    if least is not None:
                        best = rows[values.argmin(axis=0)]
                        for at in np.flatnonzero(value < into.values):
                            into.behind[int(at)] = state, int(best[at]), step
                    np.minimum(into.values, value, out=into.values)
        return reached


def _least(reached: dict[State, _StagesReached]) -> Seconds:
    """The least value of each down-set over all states."""
    least: Seconds = np.stack([there.values for there in reached.values()]).min(axis=0)
    return least


def pace(costs: Costs, parts: Parts, before: int = 0) -> float:
    """The seconds between micro-batches of given stages, behind the down-set `before`."""
    slowest, first, front = 0.0, 0, -1
    for part in parts:
        held = sum(1 << i for stage in _flattened((part,), 1) for i in stage.layers)
        if isinstance(part, Stage):
            devices, inner = part.devices, 0
            here = costs.stage(held, before, first, devices)
        else:
            devices, inner = part.copies * costs.sizes[part.level], part.level
            here = costs.repeated(held, part.copies, inner, pace(costs, part.parts, before))
        if front >= 0 and not costs.single:
            link = costs.graph.leaving(before) * costs.received(front, first, devices, inner)
            here = max(here, link)
        slowest, before, front, first = max(slowest, here), before | held, first, first + devices
    return slowest


def time_of(
    graph: LayerGraph, levels: Levels, stages: Sequence[tuple[Sequence[int], int]]
) -> float:
    """The seconds between micro-batches of given stages: layers and devices of each, in order."""
    parts = tuple(Stage(tuple(layers), devices, 0.0) for layers, devices in stages)
    return pace(Costs(graph, levels), parts)
