"""Whole operators on devices: the recurrent language model that ColocRL placed."""

from __future__ import annotations

import random

import pytest

from meshdsl.costgraph.device_placement import (
    Devices,
    GraphOperator,
    exhaustive,
    makespan,
    placements,
    reinforce,
)

STEPS, BATCH, WIDTH, VOCAB = 40, 64, 2048, 10_000
LAYERS = ("embedding", "lstm 1", "lstm 2", "softmax")
RECURRENT = (1, 2)
ONE_DEVICE, EXPERT = 1.57, 3.81
"""Seconds of a step of RNNLM, batch 64, on one K80 and as an expert placed it on two: Mirhoseini et
al. 2017, Table 1."""

PCIE = Devices(2, 0.02e-3, 12e9)
"""A transfer over PCI Express: 512 KiB take 0.06 ms."""


def language_model() -> list[GraphOperator]:
    """Two LSTM layers unrolled over 40 steps, forward and back; a group is a layer.

    Operators take the share of one device's time that their arithmetic has, thrice the forward
    pass in all; an output is a step's activations.
    """
    lstm, softmax = 2 * BATCH * 2 * WIDTH * 4 * WIDTH, 2 * BATCH * WIDTH * VOCAB
    flops = [0, lstm, lstm, softmax]
    unit = ONE_DEVICE / (3 * STEPS * sum(flops))
    made: list[GraphOperator] = []
    place: dict[tuple[str, int, int], int] = {}

    def add(way: str, layer: int, step: int, reads: list[tuple[str, int, int]]) -> None:
        place[way, layer, step] = len(made)
        times = 1 if way == "forward" else 2
        known = tuple(place[key] for key in reads if key in place)
        made.append(GraphOperator(layer, times * flops[layer] * unit, BATCH * WIDTH * 4, known))

    for step in range(STEPS):
        for layer in range(len(LAYERS)):
            carried = [("forward", layer, step - 1)] if layer in RECURRENT else []
            add("forward", layer, step, [("forward", layer - 1, step), *carried])
    for step in reversed(range(STEPS)):
        for layer in reversed(range(len(LAYERS))):
            carried = [("backward", layer, step + 1)] if layer in RECURRENT else []
            kept = ("forward", layer, step)
            add("backward", layer, step, [kept, ("backward", layer + 1, step), *carried])
    return made


BY_LAYER = (0, 0, 1, 1)
"""The expert's placement: a device for each LSTM."""


def overhead() -> float:
    """The seconds before a transfer under which the expert's placement takes what was measured."""
    model, low, high = language_model(), 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        slow = makespan(model, BY_LAYER, Devices(2, middle, PCIE.bandwidth)) > EXPERT
        low, high = (low, middle) if slow else (middle, high)
    return high


def test_two_devices_are_faster_by_the_speed_of_the_link() -> None:
    """What physics says: the layers overlap, and a transfer takes a hundredth of an operator."""
    model = language_model()
    assert makespan(model, (0, 0, 0, 0), PCIE) == pytest.approx(ONE_DEVICE)
    best = exhaustive(model, PCIE)
    assert 0.5 * ONE_DEVICE <= best.seconds < 0.75 * ONE_DEVICE
    assert set(best.devices) == {0, 1}
    assert reinforce(model, PCIE, samples=200).seconds == pytest.approx(best.seconds)


def test_one_device_is_faster_with_the_overhead_of_2016() -> None:
    """The published finding, that one device is best, holds only if a transfer takes tens of ms."""
    model, fitted = language_model(), overhead()
    assert 0.02 < fitted < 0.08
    slow = Devices(2, fitted, PCIE.bandwidth)
    assert makespan(model, BY_LAYER, slow) == pytest.approx(EXPERT)
    for found in (exhaustive(model, slow), reinforce(model, slow, samples=200)):
        assert found.seconds == pytest.approx(ONE_DEVICE)
        assert len(set(found.devices)) == 1


def random_model(draw: random.Random) -> list[GraphOperator]:
    made = []
    for i in range(8):
        reads = tuple(j for j in range(i) if draw.random() < 0.3)
        made.append(GraphOperator(draw.randrange(3), draw.randint(1, 9), draw.randint(0, 9), reads))
    return made


def test_learning_is_never_better_than_every_placement() -> None:
    draw = random.Random(0)
    for _ in range(10):
        model, devices = random_model(draw), Devices(3, 1, 2)
        groups = 1 + max(o.group for o in model)
        best = exhaustive(model, devices)
        learned = reinforce(model, devices, samples=100)
        assert learned == reinforce(model, devices, samples=100)
        assert best.seconds <= learned.seconds
        assert best.tried == len(list(placements(groups, 3)))


def test_every_placement_is_tried_once() -> None:
    """As many as there are ways to part a set into at most three: Stirling's numbers."""
    assert [len(list(placements(n, 3))) for n in (1, 2, 3, 4)] == [1, 2, 5, 14]
