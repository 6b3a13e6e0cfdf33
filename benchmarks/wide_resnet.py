"""Wide-ResNets as pipelines of residual blocks on submeshes, for the plans of Alpa.

The network is that of alpa/model/wide_resnet.py. Each block is split by samples or by channels, and
computed again in the backward pass. Costs are those of the profile; sending between stages is not
among them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.costgraph.inter_op import Way, Ways
from meshdsl.placed.placements import Mesh

P3 = load("v100-p3")
F32 = 4
SIZES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""The blocks of each width."""


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution: channels in and out, side of the kernel, side of its result."""

    inside: int
    out: int
    kernel: int
    side: int

    @property
    def parameters(self) -> int:
        """Weights."""
        return self.inside * self.out * self.kernel**2


@dataclass(frozen=True, slots=True)
class Block:
    """A bottleneck: channels in, its width, how much wider the middle is, side in and out."""

    inside: int
    width: int
    wider: int
    before: int
    side: int

    @property
    def convs(self) -> tuple[Conv, ...]:
        """Down, 3 × 3, up, and past the others where the shape changes."""
        middle, out = self.width * self.wider, 4 * self.width
        there = (
            Conv(self.inside, self.width, 1, self.before),
            Conv(self.width, middle, 3, self.side),
            Conv(middle, out, 1, self.side),
        )
        past = Conv(self.inside, out, 1, self.side)
        return there if self.inside == out and self.before == self.side else (*there, past)

    @property
    def parameters(self) -> int:
        """Weights."""
        return sum(conv.parameters for conv in self.convs)

    def seconds(self, samples: float, data: int, tensor: int) -> float:
        """Of a micro-batch, its gradients, and the forward pass again.

        Channels are split as Megatron splits an MLP: the first result is gathered, the last summed.
        """
        timing = Timing(P3, Mesh("submesh", (("data", data), ("tensor", tensor))))
        held = samples / data
        seconds = 0.0
        for conv in self.convs:
            rows = int(held * conv.side**2)
            flops = 2 * rows * conv.parameters / tensor
            narrow = conv.out // (1 if conv is self.convs[2] else tensor)
            sides = min(rows, narrow), max(rows, narrow)
            # A norm and an activation, three passes over memory; their gradients, as many again.
            moved = 9 * F32 * held * conv.side**2 * conv.out / tensor
            seconds += 4 * timing.product("f32", flops, sides) + timing.passing(moved)
        if tensor == 1:
            return seconds
        small = int(F32 * held * self.side**2 * self.width)
        large = int(F32 * held * self.side**2 * 4 * self.width)
        gathered = timing.collective("all_gather", ("tensor",), small // tensor).seconds
        reduced = timing.collective("all_reduce", ("tensor",), large).seconds
        return seconds + 3 * (gathered + reduced)

    def held(self, data: int, tensor: int) -> float:
        """Bytes of weights, gradients and momentum, which is split over `data` (ZeRO 1)."""
        return self.parameters / tensor * F32 * (2 + 1 / data)

    def synchronised(self, data: int, tensor: int) -> float:
        """Seconds, once a step, to add up gradients."""
        if data == 1:
            return 0.0
        timing = Timing(P3, Mesh("submesh", (("data", data), ("tensor", tensor))))
        payload = int(self.parameters / tensor * F32)
        return timing.collective("all_reduce", ("data",), payload).seconds

    def input_bytes(self, samples: float, data: int) -> float:
        """What a micro-batch in flight keeps."""
        return F32 * samples / data * self.before**2 * self.inside


def network(layers: int, channels: int, wider: int) -> tuple[Block, ...]:
    """The residual blocks, for images of 224 × 224."""
    blocks, inside, side = [], channels, 56
    for i, count in enumerate(SIZES[layers]):
        for j in range(count):
            before, side = side, side // (2 if i and not j else 1)
            width = channels * 2**i
            blocks.append(Block(inside, width, wider, before, side))
            inside = 4 * width
    return tuple(blocks)


def divisions(devices: int, samples: int) -> Iterator[tuple[int, int]]:
    """Devices by samples and by channels."""
    for tensor in (1, 2, 4, 8):
        if devices % tensor == 0 and samples % (devices // tensor) == 0:
            yield devices // tensor, tensor


def ways_of(blocks: tuple[Block, ...], samples: int, micros: int, sizes: list[int]) -> Ways:
    """The ways to compute consecutive blocks.

    `sizes` are those of submeshes. All blocks alike, or each in the way that is fastest for it: to
    change between two is free.
    """

    @functools.cache
    def one(block: Block, data: int, tensor: int) -> tuple[float, float]:
        seconds = block.seconds(samples, data, tensor)
        return seconds + block.synchronised(data, tensor) / micros, block.held(data, tensor)

    def fastest(block: Block, options: list[tuple[int, int]]) -> tuple[int, int]:
        return min(options, key=lambda option: one(block, *option))

    @functools.cache
    def ways(start: int, end: int) -> list[Way]:
        found = []
        for size in sizes:
            options = list(divisions(size, samples))
            mixed = [fastest(block, options) for block in blocks[start:end]]
            for plan in [[option] * (end - start) for option in options] + [mixed]:
                pairs = list(zip(blocks[start:end], plan, strict=True))
                costs = [one(block, *option) for block, option in pairs]
                kept = sum(b.input_bytes(samples, d) for b, (d, _) in pairs)
                # What the largest block has inside while it is computed again.
                inner = max(3 * b.input_bytes(samples, d) * b.wider / t for b, (d, t) in pairs)
                name = " ".join(f"({d}, {t})" for d, t in plan)
                held = sum(h for _, h in costs) + inner
                found.append(Way(size, sum(s for s, _ in costs), held, kept, name))
        return [way for way in found if not any(beats(other, way) for other in found)]

    return ways


def beats(one: Way, other: Way) -> bool:
    """Whether a way is as good in everything as another on as many devices, and not the same."""
    a, b = ((w.seconds, w.held, w.kept) for w in (one, other))
    return (
        one.devices == other.devices and a != b and all(x <= y for x, y in zip(a, b, strict=True))
    )
