"""Operators on devices, whole: the problem of ColocRL (Mirhoseini et al. 2017).

Groups of operators go to devices; a device does one operator at a time, in the graph's order, and
what another device needs is sent. `exhaustive` tries every placement up to a renaming of devices;
`reinforce` learns one by policy gradients (Williams 1992) from the simulated time, as ColocRL did
from measured times. It is here to be compared with the exact answer; `partitioning.py` has the
baselines of its table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from meshdsl.records import dataclass

SAMPLES = 2_000
"""Placements that learning tries."""

RATE = 0.1
"""The step of the policy's gradient, per sample: at 1 it settles on few devices before it has drawn
a single one of four."""

FORGETTING = 0.9
"""How slowly the baseline, a running mean of rewards, follows."""


@dataclass(frozen=True, slots=True)
class GraphOperator:
    """An operator of a group: its seconds, bytes of its output, and the operators it reads."""

    group: int
    seconds: float
    output: float
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, any two linked: seconds to begin a transfer, and bytes per second."""

    count: int
    transfer: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Placed:
    """The device of each group, the seconds of a step, and how many placements were tried."""

    devices: tuple[int, ...]
    seconds: float
    tried: int


def makespan(operators: Sequence[GraphOperator], places: Sequence[int], devices: Devices) -> float:
    """Seconds of a step: operators in the order given, each when its device and operands are there.

    An output goes to each device once; a link carries one at a time in each direction.
    """
    free = [0.0] * devices.count
    links: dict[tuple[int, int], float] = {}
    ends: list[float] = []
    there: dict[tuple[int, int], float] = {}
    for number, operator in enumerate(operators):
        here = places[operator.group]
        start = free[here]
        for source in operator.reads:
            away = places[operators[source].group]
            if away != here and (source, here) not in there:
                begun = max(ends[source], links.get((away, here), 0.0))
                sent = devices.transfer + operators[source].output / devices.bandwidth
                there[source, here] = links[away, here] = begun + sent
            start = max(start, there.get((source, here), ends[source]))
        ends.append(start + operator.seconds)
        free[here] = ends[number]
    return max(ends)


def exhaustive(operators: Sequence[GraphOperator], devices: Devices) -> Placed:
    """The fastest of all placements; of equal ones that with fewer devices."""
    every = list(placements(1 + max(o.group for o in operators), devices.count))
    best = min(every, key=lambda p: (makespan(operators, p, devices), max(p), p))
    return Placed(best, makespan(operators, best, devices), len(every))


def placements(groups: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every placement of groups; devices are named in the order they are first used in."""
    for places in itertools.product(range(devices), repeat=groups):
        firsts = list(dict.fromkeys(places))
        if firsts == sorted(firsts) and firsts == list(range(len(firsts))):
            yield places


def reinforce(
    operators: Sequence[GraphOperator], devices: Devices, samples: int = SAMPLES, seed: int = 0
) -> Placed:
    """The fastest placement that a policy draws while it learns: a softmax for each group.

    The reward is minus the square root of the time, as ColocRL's, less a running mean. The same
    seed gives the same answer.
    """
    draw = np.random.default_rng(seed)
    groups = 1 + max(o.group for o in operators)
    logits = np.zeros((groups, devices.count))
    mean: float | None = None
    best, seconds = (0,) * groups, math.inf
    for _ in range(samples):
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        picked = tuple(int(draw.choice(devices.count, p=row)) for row in chances)
        taken = makespan(operators, picked, devices)
        if taken < seconds:
            best, seconds = picked, taken
        reward = -math.sqrt(taken)
        mean = reward if mean is None else FORGETTING * mean + (1 - FORGETTING) * reward
        chosen = np.zeros_like(logits)
        chosen[np.arange(groups), picked] = 1.0
        logits += RATE * (reward - mean) * (chosen - chances)
    return Placed(best, seconds, samples)
