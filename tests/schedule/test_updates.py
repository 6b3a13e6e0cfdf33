"""Versions of parameters in asynchronous schedules, against recursions written without a table.

Stages are x -> tanh(w x), the loss of a micro-batch is half the square of what is missing to its
target. The table is carried out with all versions kept; the laws are of the versions alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import ScheduleTable
from meshdsl.schedule.verification import Verified, verify

RATE = 0.3
SIZES = [(1, 4), (2, 4), (2, 8), (3, 9), (4, 8), (4, 16), (8, 24)]
Versions = Callable[[int, int], int]
"""The version that a micro-batch reads on a stage."""


def problem(micro: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(3)
    return chance.normal(size=micro), chance.normal(size=micro)


def begun(stages: int) -> list[list[float]]:
    """The versions of each stage's parameter, of which there is one."""
    return [[float(w)] for w in np.random.default_rng(5).normal(size=stages)]


def recursion(
    stages: int, micro: int, batch: int, forward: Versions, backward: Versions
) -> list[list[float]]:
    """All versions, one micro-batch after the other: each stage updates behind every `batch`."""
    weights, (xs, targets) = begun(stages), problem(micro)
    waiting = np.zeros(stages)
    for m in range(micro):
        seen = [float(xs[m])]
        for s in range(stages):
            seen.append(float(np.tanh(weights[s][forward(m, s)] * seen[-1])))
        slope = seen[-1] - targets[m]
        for s in reversed(range(stages)):
            inner = slope * (1 - seen[s + 1] ** 2)
            waiting[s] += inner * seen[s]
            slope = inner * weights[s][backward(m, s)]
        if (m + 1) % batch == 0:
            for s in range(stages):
                weights[s].append(weights[s][-1] - RATE * float(waiting[s]) / batch)
            waiting[:] = 0
    return weights


def carried_out(found: Verified, batch: int) -> list[list[float]]:
    """All versions, by the table: what is read has to have been made."""
    table = found.schedule
    weights, (xs, targets) = begun(table.stages), problem(table.micro)
    waiting = np.zeros(table.stages)
    values = {(m, -1): float(xs[m]) for m in range(table.micro)}
    slopes: dict[tuple[int, int], float] = {}
    for place in found.order:
        kind, m, s = found.action(place)
        read = found.versions[s]
        if kind == "F":
            values[m, s] = float(np.tanh(weights[s][read.forward[m]] * values[m, s - 1]))
        elif kind == "B":
            last = s + 1 == table.stages
            slope = values[m, s] - targets[m] if last else slopes[m, s + 1]
            inner = slope * (1 - values[m, s] ** 2)
            waiting[s] += inner * values[m, s - 1]
            slopes[m, s] = inner * weights[s][read.backward[m]]
        else:
            weights[s].append(weights[s][-1] - RATE * float(waiting[s]) / batch)
            waiting[s] = 0
    return weights


@pytest.mark.parametrize(("devices", "micro"), SIZES)
@pytest.mark.parametrize("name", ["ampnet", "pipedream", "two_bw"])
def test_training_is_the_recursion_of_the_papers(name: str, devices: int, micro: int) -> None:
    def late(m: int, s: int) -> int:
        return max(0, m - (devices - 1 - s))

    rules: dict[str, tuple[Versions, Versions]] = {
        "ampnet": (late, lambda m, s: m),
        "pipedream": (late, late),
        "two_bw": (lambda m, s: max(0, m // devices - 1),) * 2,
    }
    batch = devices if name == "two_bw" else 1
    found = verify(generate(name, devices, micro))
    wanted = recursion(devices, micro, batch, *rules[name])
    made = carried_out(found, batch)
    assert [len(each) for each in made] == [micro // batch + 1] * devices
    np.testing.assert_allclose(made, wanted, rtol=1e-12)


@pytest.mark.parametrize(("devices", "micro"), SIZES)
def test_staleness_and_copies(devices: int, micro: int) -> None:
    enough = micro > 2 * (devices - 1)
    for name in ("ampnet", "pipedream", "pipemare"):
        for each in verify(generate(name, devices, micro)).versions:
            behind = devices - 1 - each.stage
            assert each.forward == tuple(max(0, m - behind) for m in range(micro))
            assert each.staleness == tuple(min(m, behind) for m in range(micro))
            assert each.backward == (each.forward if name == "pipedream" else tuple(range(micro)))
            if name != "pipedream":
                assert each.copies == 1
            elif enough:
                assert each.copies == devices - each.stage


@pytest.mark.parametrize("batch", [4, 5, 8])
def test_two_versions_are_enough_for_two_bw(batch: int) -> None:
    for each in verify(generate("two_bw", 4, 4 * batch, {"batch": batch})).versions:
        assert each.forward == tuple(max(0, m // batch - 1) for m in range(4 * batch))
        assert each.staleness == tuple(min(1, m // batch) for m in range(4 * batch))
        assert each.copies == 2


def test_asynchronous_schedules_are_1f1b_with_updates() -> None:
    for name, record in schedules().items():
        table = generate(name, 4, 8)
        assert table.updates == record.asynchronous
        if record.asynchronous:
            assert without_updates(table).rows == generate("one_f_one_b", 4, 8).rows
        else:
            assert not verify(table).versions


def without_updates(table: ScheduleTable) -> ScheduleTable:
    rows = tuple(tuple(a for a in row if a.kind != "U") for row in table.rows)
    return ScheduleTable(table.stages, table.micro, rows)
