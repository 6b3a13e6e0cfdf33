"""Equal layers on a grid: data × tensor × pipeline parallel, in closed form.

For a transformer whose layers are alike, the time of a step is that of its slowest stage,
(m + (p - 1)/v) · t_micro, and what is done once: reducing gradients and the update (Narayanan et
al. 2021, with v chunks of layers a device, interleaved). So every division of the devices can be
evaluated, in milliseconds. Costs are those of the cluster's profile; nothing is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.cluster.profile import Cluster, Device
from meshdsl.cluster.timing import Timing, parts_of
from meshdsl.placed.sbp import Mesh

HALF = 2
"""Bytes of an activation and of a weight (bf16 or f16)."""

GRADIENT = 4
"""Bytes of a gradient: Megatron-LM adds micro-batches up in f32, and reduces that."""

STATE = 12
"""Bytes of a parameter's f32 copy and two moments (Adam)."""

MOST_CHUNKS = 4
"""The most chunks of layers a device that are interleaved."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A GPT: `layers` of attention and an MLP of four times the width, with tied embeddings."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int

    @property
    def layer_parameters(self) -> int:
        """12 h² of the products, and biases and norms: 13 h."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the tokens' and positions' tables."""
        return (self.vocab + self.seq) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer_parameters + self.embedding

    def layer_flops(self, batch: int) -> int:
        """Of one forward pass of a layer: products, scores and what is attended to."""
        return batch * self.seq * (24 * self.hidden**2 + 4 * self.seq * self.hidden)

    def head_flops(self, batch: int) -> int:
        """Of one forward pass of the logits."""
        return 2 * batch * self.seq * self.hidden * self.vocab

    def step_flops(self, recompute: bool) -> int:
        """Of a training step: the backward pass is two forward ones; recomputing is one more."""
        passes = 4 if recompute else 3
        return passes * self.layers * self.layer_flops(self.batch) + 3 * self.head_flops(self.batch)


@dataclass(frozen=True, slots=True)
class Division:
    """Devices by tensor, pipeline and data parallelism; batch of a micro-batch; chunks a device."""

    tensor: int
    pipeline: int
    data: int
    micro: int
    chunks: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Plan:
    """A division with its costs. `seconds` of a step, `bytes` a device at most, `bubble` idle."""

    division: Division
    seconds: float
    bytes: float
    bubble: float
    utilisation: float


class Uncut(Exception):
    """The layers do not divide into so many stages."""


def half_rate(device: Device) -> float:
    """FLOP/s in 16 bits."""
    return device.peak("bf16" if "bf16" in device.flops else "f16")


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
            data, rest = divmod(devices // tensor, stage)
            if rest or model.batch % data or parts_of(cluster, [stage, data, tensor]) is None:
                continue
            for micro in _divisors(model.batch // data):
                for chunks in range(1, MOST_CHUNKS + 1 if stage > 1 else 2):
                    if (model.layers // stage) % chunks == 0:
                        yield Division(tensor, stage, data, micro, chunks)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def near_stages(model: Transformer, stages: int) -> tuple[int, ...]:
    """The nearest numbers of stages below and above that the layers can be cut into."""
    able = _divisors(model.layers)
    below, above = [n for n in able if n < stages], [n for n in able if n > stages]
    return (*below[-1:], *above[:1])


def evaluate(
    model: Transformer, cluster: Cluster, division: Division, recompute: bool = True
) -> Plan:
    """The time and memory of a step under a division; activations kept, or computed again."""
    sizes = (("pipe", division.pipeline), ("data", division.data), ("tensor", division.tensor))
    costs = _Costs(model, Timing(cluster, Mesh("grid", sizes)), division, recompute)
    micros = micro_batches(model, division)
    turns = micros + (division.pipeline - 1) / division.chunks
    seconds = turns * costs.micro_batch() + costs.once()
    done = model.step_flops(recompute) / division.devices
    used = done / (seconds * half_rate(cluster.device))
    return Plan(division, seconds, costs.bytes(), bubble(division, micros), used)


def ranked(
    model: Transformer,
    cluster: Cluster,
    devices: int,
    recompute: bool = True,
    memory: float | None = None,
    pipeline: int | None = None,
) -> list[Plan]:
    """The divisions that fit in `memory` (the profile's), the fastest first."""
    limit = cluster.device.memory if memory is None else memory
    every = (
        evaluate(model, cluster, d, recompute) for d in divisions(model, cluster, devices, pipeline)
    )
    return sorted((p for p in every if p.bytes <= limit), key=lambda p: (p.seconds, p.bytes))


@dataclass(frozen=True, slots=True)
class _Costs:
    """What one device spends under a division."""

    model: Transformer
    timing: Timing
    division: Division
    recompute: bool

    @property
    def layers(self) -> int:
        """Of a stage."""
        return self.model.layers // self.division.pipeline

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.division.micro * self.model.seq

    def micro_batch(self) -> float:
        """Seconds of the slowest stage, the last, which has the logits; and what it sends."""
        d, forward = self.division, self._layer()
        passes = 4 if self.recompute else 3
        seconds = self.layers * passes * forward + 3 * self._head()
        if d.tensor > 1:
            # Two a pass: behind attention and behind the MLP.
            rounds = 2 * (passes - 1) * self.layers
            width = self.tokens * self.model.hidden * HALF
            seconds += rounds * self.timing.collective("all_reduce", ("tensor",), width).seconds
        if d.pipeline > 1:
            # Forward and back; devices of a tensor group send a part each.
            part = self.tokens * self.model.hidden * HALF // d.tensor
            seconds += 2 * d.chunks * self.timing.collective("permute", ("pipe",), part).seconds
        return seconds

    def _layer(self) -> float:
        """Seconds of a layer's forward pass: its products, and its passes over memory."""
        h, t = self.model.hidden, self.division.tensor
        rows, scores = self.tokens, self.model.seq
        products = (
            (rows, 3 * h // t, h),
            (rows, h, h // t),
            (rows, 4 * h // t, h),
            (rows, h, 4 * h // t),
        )
        seconds = sum(self._product(m, n, k) for m, n, k in products)
        key = h // self.model.heads
        heads = self.division.micro * self.model.heads // t
        seconds += sum(
            self._product(scores, n, k, heads) for n, k in ((scores, key), (key, scores))
        )
        # A chain of pointwise operators counts its ends: two norms and two dropouts with residuals
        # of the width, gelu of four times the width, softmax of the scores.
        moved = 10 * rows * h + 8 * rows * h // t + 2 * heads * scores * scores
        return seconds + self._pass(HALF * moved)

    def _product(self, rows: int, columns: int, summed: int, times: int = 1) -> float:
        device = self.timing.cluster.device
        half_rows, half_columns = device.gemm_half
        small, large = sorted((rows, columns))
        filled = small / (small + half_rows) * large / (large + half_columns)
        done = 2 * times * rows * columns * summed
        return done / (half_rate(device) * device.mm_eff * filled)

    def _pass(self, moved: float) -> float:
        device = self.timing.cluster.device
        return moved / (device.hbm * device.hbm_eff)

    def _head(self) -> float:
        """Seconds of the logits' forward pass, on the last stage."""
        return self._product(
            self.tokens, self.model.vocab // self.division.tensor, self.model.hidden
        )

    def once(self) -> float:
        """Seconds of the gradients' reduction and the update."""
        d = self.division
        own = self._parameters()
        seconds = self._pass(own * (2 * STATE + GRADIENT + HALF))
        if d.data > 1:
            seconds += self.timing.collective("all_reduce", ("data",), int(own * GRADIENT)).seconds
        return seconds

    def _parameters(self) -> float:
        """Of the stage that has most: the first, with the embedding."""
        held = self.layers * self.model.layer_parameters + self.model.embedding
        return held / self.division.tensor

    def bytes(self) -> float:
        """Parameters, gradients, state and activations of the first stage.

        What a layer keeps: Korthikanti et al. 2022, with its dropout masks.
        """
        d, m = self.division, self.model
        width = self.tokens * m.hidden
        whole = width * (10 + (24 + 5 * m.heads * m.seq / m.hidden) / d.tensor)
        # Of whole stages: the first waits for all others; with chunks, for one round more.
        flight = d.pipeline + (d.pipeline - 1) / d.chunks * (d.chunks > 1)
        flight = min(flight, micro_batches(m, d))
        kept = HALF * width if self.recompute else whole
        activations = flight * self.layers * kept + (whole if self.recompute else 0)
        return self._parameters() * (HALF + GRADIENT + STATE) + activations
