"""PaSE's table of AlexNet on 32 devices (Elango 2021): what alternates in the dense layers, does.

Elango, "PaSE: Parallelization Strategies for Efficient DNN Training", IPDPS 2021: Table II. Costs
are those of its section II with the figures of a 1080Ti's data sheet: arithmetic, the sums that a
split of inputs, outputs or samples leaves, and what a device needs of the layer before and does not
have. Devices are numbered so that they have as much of it as they can.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshdsl.costgraph.exact import eliminate, integer_program
from meshdsl.costgraph.graph import CostFactor, CostGraph, Variable
from tests.costgraph.convnets import BATCH, F32, Layer, alexnet

DEVICES = 32
RATE = 11.3e12
"""FLOP/s of a GTX 1080 Ti in f32."""
LINK = 12e9
"""Bytes/s of PCIe 3.0 with 16 lanes that programs reach."""

Parts = tuple[int, int, int]
"""The parts of samples, of outputs and of inputs."""

LAYERS = tuple(layer for layer in alexnet() if not layer.pool)
PARTS: tuple[Parts, ...] = tuple(
    (b, n, c)
    for b, n, c in itertools.product([2**k for k in range(6)], repeat=3)
    if b * n * c <= DEVICES
)


def summed(count: int, elements: float) -> float:
    """Seconds of an all_reduce of `elements` over `count` devices."""
    return 2 * (count - 1) / count * elements * F32 / LINK


def inside(layer: Layer, parts: Parts) -> float:
    """Seconds of a layer's three passes, and of the sums in them."""
    b, n, c = parts
    outputs = BATCH * layer.channels * layer.side**2 / (b * n)
    inputs = BATCH * layer.inputs * layer.side**2 / (b * c)
    return (
        3 * layer.flops / (RATE * b * n * c)
        + summed(c, outputs)
        + summed(n, inputs)
        + summed(b, layer.parameters / (n * c))
    )


def between(layer: Layer, has: Parts, needs: Parts) -> float:
    """Seconds for what a device lacks of a layer's operands, and the layer before of gradients."""
    both = 1 / (max(has[0], needs[0]) * max(has[1], needs[2]))
    forward, backward = 1 / (needs[0] * needs[2]), 1 / (has[0] * has[1])
    lacks = forward - both + backward - both
    return lacks * BATCH * layer.inputs * layer.side**2 * F32 / LINK


def alexnet_costs() -> CostGraph:
    """Every way to split every layer."""
    factors = [
        CostFactor((i,), np.array([inside(layer, p) for p in PARTS]))
        for i, layer in enumerate(LAYERS)
    ]
    for i, layer in enumerate(LAYERS[1:]):
        table = [[between(layer, p, q) for q in PARTS] for p in PARTS]
        factors.append(CostFactor((i, i + 1), np.array(table)))
    names = tuple(map(str, PARTS))
    return CostGraph(tuple(Variable(a.name, names) for a in LAYERS), tuple(factors))


PUBLISHED = [*[(32, 1, 1)] * 5, (1, 4, 8), (1, 8, 4), (1, 4, 8)]


def test_splits_of_outputs_and_inputs_alternate() -> None:
    """The dense layers are those of the table; convolutions split samples in 16 at least."""
    costs = alexnet_costs()
    found = eliminate(costs)
    assert [PARTS[k] for k in found.picks[5:]] == PUBLISHED[5:]
    assert all(PARTS[k][0] >= 16 for k in found.picks[:5])
    assert costs.cost([PARTS.index(p) for p in PUBLISHED]) < 1.12 * found.cost
    assert integer_program(costs).cost == pytest.approx(found.cost, rel=1e-9)
