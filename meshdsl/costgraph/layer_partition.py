"""Cutting a graph of layers into stages: for chains, and for graphs that branch.

A stage is what one down-set of the graph has beyond a smaller one, so that values only flow
forward. Two published problems are solved by one recurrence over down-sets and devices:

- `replicated`: PipeDream's (Harlap et al. 2018; Narayanan et al. 2019). Every stage may be on
  several devices, which share its micro-batches and reduce its gradients; transfers overlap with
  computation, so the slowest stage or link sets the pace.
- `single`: the throughput problem of Tarnawski et al. (2020). A stage is on one device, whose load
  is its computation and what it receives and sends, each value once a side.

Times are in seconds a micro-batch, sizes in bytes, bandwidths in bytes per second one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from meshdsl.records import dataclass

MOST_SETS = 3_000
"""Down-sets of a graph that may be cut: the pairs of them are what is searched."""

MOST_STATES = 20_000_000
"""Stages on some devices, times the devices that earlier ones may be on, that are looked at."""


class GraphTooLarge(Exception):
    """The graph has more down-sets, or with its devices more states, than are looked at."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A node: seconds forward and backward, bytes of its output and of its parameters."""

    name: str
    forward: float
    backward: float
    output: float
    parameters: float

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layers in topological order, and the edges between their places in it."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    source: str = ""

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The layers that each one reads, as a set of bits."""
        masks = [0] * len(self.layers)
        for a, b in self.edges:
            masks[b] |= 1 << a
        return tuple(masks)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """The layers that read each one, as a set of bits."""
        masks = [0] * len(self.layers)
        for a, b in self.edges:
            masks[a] |= 1 << b
        return tuple(masks)

    @cached_property
    def down_sets(self) -> tuple[int, ...]:
        """The sets that hold with each layer all that it reads, small ones first.

        Raises TooLarge.
        """
        sets = {0}
        last = [0]
        while last:
            grown = {
                held | 1 << i
                for held in last
                for i in range(len(self.layers))
                if not held >> i & 1 and self.before[i] & ~held == 0
            }
            sets |= grown
            if len(sets) > MOST_SETS:
                raise GraphTooLarge(f"the layers have more than {MOST_SETS:,} down-sets")
            last = sorted(grown)
        return tuple(sorted(sets, key=lambda s: (s.bit_count(), s)))

    def crossing(self, source: int, target: int) -> float:
        """Bytes of the layers in one set that some layer of the other reads, each once."""
        return math.fsum(self.layers[i].output for i in members(source) if self.after[i] & target)


def members(held: int) -> Iterator[int]:
    """The places of the bits of a set."""
    while held:
        low = held & -held
        yield low.bit_length() - 1
        held ^= low


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers, on how many devices, and the seconds that a micro-batch takes there."""

    layers: tuple[int, ...]
    devices: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages in order, and the seconds between two micro-batches, which the slowest part sets.

    `work` counts the states that stages were added to.
    """

    stages: tuple[Stage, ...]
    seconds: float
    work: int

    @property
    def replicas(self) -> str:
        """The devices of the stages, as PipeDream writes them: 3-1."""
        return "-".join(str(s.devices) for s in self.stages)


@dataclass(frozen=True, slots=True)
class Pace:
    """What a stage and a link cost: the difference between the published problems."""

    graph: LayerGraph
    bandwidth: float
    single: bool = False

    def stage(self, held: int, before: int, devices: int) -> float:
        """Seconds a micro-batch of the layers `held`, behind those `before`."""
        layers = [self.graph.layers[i] for i in members(held)]
        seconds = math.fsum(layer.seconds for layer in layers)
        if self.single:
            later = (1 << len(self.graph.layers)) - 1 & ~(held | before)
            sent = self.graph.crossing(before, held) + self.graph.crossing(held, later)
            return seconds + sent / self.bandwidth
        parameters = math.fsum(layer.parameters for layer in layers)
        reduced = 4 * (devices - 1) * parameters / (self.bandwidth * devices)
        return (seconds + reduced) / devices

    def link(self, before: int, devices: int) -> float:
        """Seconds a micro-batch into a stage: activations forward, their gradients backward."""
        if self.single or not before:
            return 0.0
        later = (1 << len(self.graph.layers)) - 1 & ~before
        return 2 * self.graph.crossing(before, later) / (self.bandwidth * devices)


def cut(graph: LayerGraph, devices: int, bandwidth: float, single: bool = False) -> Cut:
    """The stages on at most `devices` devices with the shortest time between micro-batches.

    Of equal ones, that in which a micro-batch passes all stages soonest. Raises TooLarge.
    """
    sets = graph.down_sets
    pairs = sum(not before & ~after for after in sets for before in sets) - len(sets)
    if pairs * devices * (2 if single else devices + 1) > 2 * MOST_STATES:
        raise GraphTooLarge(f"{pairs:,} stages on {devices:,} devices are too many to try")
    pace = Pace(graph, bandwidth, single)
    parts = list(_parts(pace, 1 if single else devices))
    slowest = _best(parts, devices, lambda done, part: max(done, part.slowest))
    every_layer = graph.down_sets[-1]
    least = min(time for (held, _), (time, _) in slowest.items() if held == every_layer)
    usable = [part for part in parts if part.slowest <= least]
    soonest = _best(usable, devices, lambda done, part: done + part.seconds)
    ends = [(time, n) for (held, n), (time, _) in soonest.items() if held == every_layer]
    stages = _stages(soonest, (every_layer, min(ends)[1]))
    return Cut(stages, least, len(parts) * devices)


@dataclass(frozen=True, slots=True)
class _StageCandidate:
    """A stage that may be: what lies before it, what it holds, its devices and its times."""

    before: int
    held: int
    devices: int
    seconds: float
    slowest: float


State = tuple[int, int]
"""A down-set, and the devices its stages are on."""


def _parts(pace: Pace, most: int) -> Iterator[_StageCandidate]:
    """Every stage on 1 to `most` devices, those of small down-sets first."""
    sets = pace.graph.down_sets
    for after in sets[1:]:
        for before in sets:
            if before == after or before & ~after:
                continue
            for used in range(1, most + 1):
                seconds = pace.stage(after & ~before, before, used)
                slowest = max(seconds, pace.link(before, used))
                yield _StageCandidate(before, after & ~before, used, seconds, slowest)


def _best(
    parts: list[_StageCandidate], devices: int, extended: Callable[[float, _StageCandidate], float]
) -> dict[State, tuple[float, _StageCandidate | None]]:
    """The least value of every state, and the stage that it ends with."""
    best: dict[State, tuple[float, _StageCandidate | None]] = {(0, 0): (0.0, None)}
    for part in parts:
        for already in range(devices - part.devices + 1):
            reached = best.get((part.before, already))
            if reached is None:
                continue
            state = part.before | part.held, already + part.devices
            value = extended(reached[0], part)
            if state not in best or value < best[state][0]:
                best[state] = value, part
    return best


def _stages(
    best: dict[State, tuple[float, _StageCandidate | None]], state: State
) -> tuple[Stage, ...]:
    """The stages that lead to a state, from the first on."""
    backwards = []
    while (part := best[state][1]) is not None:
        backwards.append(Stage(tuple(members(part.held)), part.devices, part.seconds))
        state = part.before, state[1] - part.devices
    return tuple(reversed(backwards))


def time_of(
    graph: LayerGraph, bandwidth: float, stages: Sequence[tuple[Sequence[int], int]]
) -> float:
    """The seconds between micro-batches of given stages: layers and devices of each, in order."""
    pace = Pace(graph, bandwidth)
    before, slowest = 0, 0.0
    for layers, devices in stages:
        held = sum(1 << i for i in layers)
        here = max(pace.stage(held, before, devices), pace.link(before, devices))
        slowest, before = max(slowest, here), before | held
    return slowest
