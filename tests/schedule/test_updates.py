"""Versions of parameters in asynchronous schedules, against recursions written without a table.

Stages are x -> tanh(w x), the loss of a micro-batch is half the square of what is missing to its
target. The table is carried out with all versions kept; the laws are of the versions alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.table import Action, ScheduleTable
from meshdsl.schedule.times import Exact, Times, timed
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

    rows = generate(name, devices, micro).rows

    def as_arrived(m: int, s: int) -> int:
        return sum(a.kind == "U" for a in rows[s][: rows[s].index(Action("F", m, s))])

    rules: dict[str, tuple[Versions, Versions]] = {
        "ampnet": (as_arrived, lambda m, s: m),
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
    for name in ("pipedream", "pipemare"):
        for each in verify(generate(name, devices, micro)).versions:
            behind = devices - 1 - each.stage
            assert each.forward == tuple(max(0, m - behind) for m in range(micro))
            assert each.staleness == tuple(min(m, behind) for m in range(micro))
            assert each.backward == (each.forward if name == "pipedream" else tuple(range(micro)))
            if name != "pipedream":
                assert each.copies == 1
            elif enough:
                assert each.copies == devices - each.stage


@pytest.mark.parametrize("active", [1, 2, 4, 9])
@pytest.mark.parametrize("slow", [None, 0, 1, 3])
def test_ampnet_does_what_has_arrived(active: int, slow: int | None) -> None:
    """No device waits while it has a pass that can begin, and none does a forward pass then.

    A pass is one that can begin if what it reads has arrived, and if it is the first one of a
    micro-batch, while fewer than `active` are on their way. Times are those of the replayed table.
    """
    each = tuple(3 if stage == slow else 1 for stage in range(4))
    times = Times(each, each, each)
    table = generate("ampnet", 4, 9, {"active": active}, times=times)
    made = timed(verify(table), times)
    leaves = {s.action: s.start + times.of(s.action)[1] for row in made.rows for s in row}
    ends = {s.action: s.end for row in made.rows for s in row}
    for stage, row in enumerate(made.rows):
        passes = [slot for slot in row if slot.action.kind != "U"]
        assert [s.action.kind for s in row if s.action.kind != "F"] == ["B", "U"] * 9
        for now, slot in enumerate(passes):
            free = passes[now - 1].end if now else 0
            arrived: dict[Action, Exact] = {}
            for later in passes[now:]:
                kind, micro, _ = later.action
                through = [ends[Action("B", m, 0)] for m in range(9) if m < micro]
                if kind == "B":
                    reads = leaves.get(Action("B", micro, stage + 1), 0)
                    mine = Action("F", micro, stage)
                    arrived[later.action] = max(reads, ends[mine])
                    if mine in [s.action for s in passes[now:]]:
                        del arrived[later.action]
                elif stage:
                    arrived[later.action] = leaves[Action("F", micro, stage - 1)]
                elif micro < active:
                    arrived[later.action] = 0
                else:
                    arrived[later.action] = sorted(through)[micro - active]
            assert slot.start == max(free, min(arrived.values()))
            ready = [a for a, since in arrived.items() if since <= slot.start]
            backward = [a for a in ready if a.kind == "B"]
            assert slot.action in (backward or ready)


def test_how_late_ampnet_is() -> None:
    """As many updates as forward passes are ahead: fewer than are in flight."""
    found = verify(generate("ampnet", 4, 16))
    assert [max(v.staleness) for v in found.versions] == [3, 3, 2, 0]
    assert all(v.backward == tuple(range(16)) and v.copies == 1 for v in found.versions)
    alone = verify(generate("ampnet", 4, 8, {"active": 1}))
    assert {max(v.staleness) for v in alone.versions} == {0}


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
        if record.asynchronous and not record.by_times:
            assert without_updates(table).rows == generate("one_f_one_b", 4, 8).rows
        elif record.asynchronous:
            assert verify(table).peaks == (4, 4, 3, 1)
        else:
            assert not verify(table).versions


def without_updates(table: ScheduleTable) -> ScheduleTable:
    rows = tuple(tuple(a for a in row if a.kind != "U") for row in table.rows)
    return ScheduleTable(table.stages, table.micro, rows)
