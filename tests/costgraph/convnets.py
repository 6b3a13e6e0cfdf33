"""AlexNet and VGG-16 as OptCNN sees them (Jia et al. 2018, sections 4 and 5): graphs with costs.

A layer is split into parts of its samples, channels, rows and columns, one a device. It costs its
three passes' arithmetic, and the reduction of the gradients of what several devices hold; an edge
what a device needs of the layer before and does not have, forward and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.costgraph.graph import CostFactor, CostGraph, Variable
from meshdsl.placed.placements import Mesh

BATCH = 128
DEVICES = 4
F32 = 4

Parts = tuple[int, int, int, int]
"""The parts of samples, channels, rows and columns."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, a pool (no parameters) or a product (one row and column): its output."""

    name: str
    channels: int
    side: int
    inputs: int
    kernel: int
    pool: bool = False

    @property
    def parameters(self) -> int:
        """Weights."""
        return 0 if self.pool else self.inputs * self.kernel**2 * self.channels

    @property
    def flops(self) -> int:
        """Of a forward pass of the batch."""
        return 2 * BATCH * self.parameters * self.side**2

    @property
    def shape(self) -> Parts:
        """Of the output."""
        return BATCH, self.channels, self.side, self.side


def alexnet() -> tuple[Layer, ...]:
    """Torchvision's, 61.1 million parameters."""
    return (
        Layer("conv1", 64, 55, 3, 11),
        Layer("pool1", 64, 27, 64, 3, pool=True),
        Layer("conv2", 192, 27, 64, 5),
        Layer("pool2", 192, 13, 192, 3, pool=True),
        Layer("conv3", 384, 13, 192, 3),
        Layer("conv4", 256, 13, 384, 3),
        Layer("conv5", 256, 13, 256, 3),
        Layer("pool5", 256, 6, 256, 3, pool=True),
        Layer("fc6", 4096, 1, 256 * 36, 1),
        Layer("fc7", 4096, 1, 4096, 1),
        Layer("fc8", 1000, 1, 4096, 1),
    )


def vgg16() -> tuple[Layer, ...]:
    """Simonyan and Zisserman 2015, column D."""
    layers: list[Layer] = []
    inputs, side = 3, 224
    for block, (count, channels) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for k in range(1, count + 1):
            layers.append(Layer(f"conv{block}_{k}", channels, side, inputs, 3))
            inputs = channels
        side //= 2
        layers.append(Layer(f"pool{block}", channels, side, channels, 2, pool=True))
    wide = 512 * 49
    ends = (("fc6", 4096, wide), ("fc7", 4096, 4096), ("fc8", 1000, 4096))
    return (*layers, *(Layer(name, out, 1, width, 1) for name, out, width in ends))


def graph(layers: Sequence[Layer]) -> CostGraph:
    """Every way to split every layer over four P100."""
    timing = Timing(load("p100"), Mesh("gpus", (("gpu", DEVICES),)))
    device = timing.cluster.device
    rate = device.peak("f32") * device.mm_eff
    splits = [tuple(_splits(layer)) for layer in layers]
    factors = []
    for i, (layer, options) in enumerate(zip(layers, splits, strict=True)):
        costs = [3 * layer.flops / (rate * _used(p)) + _reduced(layer, p, timing) for p in options]
        factors.append(CostFactor((i,), np.array(costs)))
    for i, (one, other) in enumerate(itertools.pairwise(layers)):
        table = [[_moved(one, p, other, q, timing) for q in splits[i + 1]] for p in splits[i]]
        factors.append(CostFactor((i, i + 1), np.array(table)))
    named = zip(layers, splits, strict=True)
    variables = tuple(Variable(a.name, tuple(map(_said, options))) for a, options in named)
    return CostGraph(variables, tuple(factors))


def _splits(layer: Layer) -> Iterator[Parts]:
    """Powers of two of each dim that divide the devices; even parts, but for rows and columns."""
    for parts in itertools.product((1, 2, 4), repeat=4):
        whole = parts[2:] == (1, 1) or layer.side >= DEVICES
        if DEVICES % _used(parts) == 0 and whole:
            yield parts  # type: ignore[misc]


def _used(parts: Sequence[int]) -> int:
    return int(np.prod(parts))


def _said(parts: Parts) -> str:
    return " ".join(f"{d}={n}" for d, n in zip("nchw", parts, strict=True) if n > 1) or "whole"


def _reduced(layer: Layer, parts: Parts, timing: Timing) -> float:
    """Seconds to add up the gradients of the weights that several devices hold."""
    copies = _used(parts) // parts[1]
    if copies == 1 or not layer.parameters:
        return 0.0
    held = layer.parameters * F32 // parts[1]
    alone = Timing(timing.cluster, Mesh("gpus", (("gpu", copies),)))
    return alone.collective("all_reduce", ("gpu",), held).seconds


def _moved(one: Layer, has: Parts, other: Layer, needs: Parts, timing: Timing) -> float:
    """Seconds for what any device needs and does not have: activations, and their gradients."""
    worst = 0.0
    for device in range(_used(needs)):
        samples, channels, *area = _block(device, needs, other.shape)
        if not other.pool:
            channels = (0.0, float(one.channels))
        wanted = [samples, channels, *(_read(one, other, part) for part in area)]
        own = _block(device, has, one.shape) if device < _used(has) else ((0.0, 0.0),) * 4
        all_ = _volume(wanted)
        here = _volume([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, own, strict=True)])
        worst = max(worst, all_ - here)
    payload = int(worst * F32)
    return 2 * timing.collective("permute", ("gpu",), payload).seconds if payload else 0.0


def _read(one: Layer, other: Layer, part: tuple[float, float]) -> tuple[float, float]:
    """The rows or columns of one layer that those of the next read: all, for a product."""
    if other.side == 1:
        return 0.0, float(one.side)
    stride, half = one.side / other.side, other.kernel // 2
    return max(0.0, part[0] * stride - half), min(float(one.side), part[1] * stride + half)


def _block(device: int, parts: Parts, shape: Parts) -> tuple[tuple[float, float], ...]:
    """The interval of each dim that a device has, row by row."""
    at = zip(np.unravel_index(device, parts), parts, shape, strict=True)
    return tuple((int(i) * n / p, (int(i) + 1) * n / p) for i, p, n in at)


def _volume(block: Sequence[tuple[float, float]]) -> float:
    return float(np.prod([max(0.0, b - a) for a, b in block]))
