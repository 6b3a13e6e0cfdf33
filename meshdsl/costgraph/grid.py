"""Equal layers on a grid: data × tensor × pipeline × expert parallel, in closed form.

For a transformer whose layers are alike, or alternate, the time of a step is that of its slowest
stage, (m + (p - 1)/v) · t_micro, and what is done once: reducing gradients and the update
(Narayanan et al. 2021, with v chunks of layers a device, interleaved). So every division of the
devices can be evaluated, in milliseconds. Costs are those of the cluster's profile; nothing is
fitted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from meshdsl.cluster.profile import Cluster
from meshdsl.cluster.timing import Timing, parts_of
from meshdsl.costgraph.transformer import LayerStage, Transformer
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass

MOST_CHUNKS = 4
"""The most chunks of layers a device that are interleaved."""


@dataclass(frozen=True, slots=True)
class Division:
    """Devices by tensor, pipeline and data parallelism; batch of a micro-batch; chunks a device.

    `expert` data parallel devices share the experts of a layer, each with some of them.
    """

    tensor: int
    pipeline: int
    data: int
    micro: int
    chunks: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class GridPlan:
    """A division with its costs. `seconds` of a step, `bytes` a device at most, `bubble` idle."""

    division: Division
    seconds: float
    bytes: float
    bubble: float
    utilisation: float


class Uncut(Exception):
    """The layers do not divide into so many stages."""


def micro_batches(model: Transformer, division: Division) -> int:
    """The micro-batches of a step."""
    return model.batch // (division.data * division.micro)


def bubble(division: Division, micros: int) -> float:
    """The idle share of a step: (p - 1) / (v m + p - 1) (Narayanan et al. 2021)."""
    idle = division.pipeline - 1
    return idle / (division.chunks * micros + idle)


def divisions(
    model: Transformer, cluster: Cluster, devices: int, pipeline: int | None = None
) -> Iterator[Division]:
    """Every division of the devices that divides heads, layers and batch, and cuts no level.

    Raises Uncut where the layers cannot be cut into `pipeline` stages.
    """
    if pipeline is not None and model.layers % pipeline:
        raise Uncut
    for tensor in _divisors(math.gcd(devices, model.heads)):
        stages = [pipeline] if pipeline else _divisors(math.gcd(devices // tensor, model.layers))
        for stage in stages:
            data, remainder = divmod(devices // tensor, stage)
            if remainder or model.batch % data or parts_of(cluster, [stage, data, tensor]) is None:
                continue
            chunked = [
                n
                for n in range(1, MOST_CHUNKS + 1 if stage > 1 else 2)
                if (model.layers // stage) % n == 0
            ]
            micros = [n for n in _divisors(model.batch // data) if model.routable(n)]
            shared = model.expert_splits(data)
            for micro, chunks, expert in itertools.product(micros, chunked, shared):
                yield Division(tensor, stage, data, micro, chunks, expert)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def near_stages(model: Transformer, stages: int) -> tuple[int, ...]:
    """The nearest numbers of stages below and above that the layers can be cut into."""
    able = _divisors(model.layers)
    below, above = [n for n in able if n < stages], [n for n in able if n > stages]
    return (*below[-1:], *above[:1])


def evaluate(
    model: Transformer, cluster: Cluster, division: Division, recompute: bool = True
) -> GridPlan:
    """The time and memory of a step under a division; activations kept, or computed again."""
    d = division
    sizes = (("pipe", d.pipeline), ("data", d.data), ("tensor", d.tensor))
    timing = Timing(cluster, Mesh("grid", sizes))
    micros = micro_batches(model, d)
    # The last stage has the logits, the first the embedding: the slowest is one, the largest the
    # other. None has more layers with experts than the first.
    layers = model.layers // d.pipeline
    stage = LayerStage(
        model,
        timing,
        layers,
        d.micro,
        recompute=recompute,
        routed=model.expert_layers(0, layers),
        shared=d.expert,
    )
    sent = 2 * d.chunks * stage.sending() if d.pipeline > 1 else 0.0
    turns = micros + (d.pipeline - 1) / d.chunks
    seconds = turns * (stage.seconds() + sent) + stage.once()
    # Of whole stages: the first waits for all others; with chunks, for one round more.
    flight = min(d.pipeline + (d.pipeline - 1) / d.chunks * (d.chunks > 1), micros)
    held = stage.held() + flight * stage.kept() + stage.working()
    peak = cluster.device.peak(cluster.device.half)
    used = model.step_flops(recompute) / d.devices / (seconds * peak)
    return GridPlan(d, seconds, held, bubble(d, micros), used)


def ranked(
    model: Transformer,
    cluster: Cluster,
    devices: int,
    recompute: bool = True,
    memory: float | None = None,
    pipeline: int | None = None,
) -> list[GridPlan]:
    """The divisions that fit in `memory` (the profile's), the fastest first."""
    limit = cluster.device.memory if memory is None else memory
    every = (
        evaluate(model, cluster, d, recompute) for d in divisions(model, cluster, devices, pipeline)
    )
    return sorted((p for p in every if p.bytes <= limit), key=lambda p: (p.seconds, p.bytes))
