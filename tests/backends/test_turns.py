"""Devices that run in turns: one at a time, in an order that no timing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshdsl.backends.engines.in_process import (
    Emitted,
    LocalSession,
    call_device,
    given_tables,
)
from meshdsl.backends.engines.local_devices import DeviceThreads, LocalRunError
from meshdsl.backends.engines.local_dist import LocalDist
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.turns import Turns, has_short_calls
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options

COUNT = 3

STEP = """
dim b = 64, d = SIZE, e = SIZE
program p(x[b, d], t[b, d]) {
  param w[d, e]
  param v[e, d]
  y = einsum(relu(einsum(x, w -> [b, e])), v -> [b, d])
  loss = mean(square(y - t))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def step(size: int) -> Compilation:
    """A step of training on two devices with matrices of `size` by `size`."""
    text = STEP.replace("SIZE", str(size))
    return Compilation(Source("p.mdsl", text), Options(mesh="z:2", layout="b:z"))


def devices(work: Callable[[int, LocalDist, Any], None]) -> DeviceThreads:
    """`work` on three devices in turns, run to their ends."""
    dist = LocalDist({"r": COUNT}, (("r",),), in_turns=True)
    return DeviceThreads(COUNT, dist, lambda rank: work(rank, dist, dist.groups(rank)["r"])).run()


def test_one_device_runs_until_it_waits() -> None:
    log: list[tuple[int, int]] = []
    inside = threading.Lock()

    def work(rank: int, dist: LocalDist, group: Any) -> None:
        for step in range(4):
            assert inside.acquire(blocking=False), "another device runs"
            log.append((rank, step))
            inside.release()
            dist.all_reduce(torch.ones(2), group=group)

    devices(work).check()
    first = [rank for rank, step in log if step == 0]
    # The last to arrive goes on, the others follow in rank order.
    order, expected = first, []
    for step in range(4):
        expected += [(rank, step) for rank in order]
        order = [order[-1], *sorted(order[:-1])]
    assert log == expected


def test_a_failure_reaches_those_that_wait_for_their_turn() -> None:
    def work(rank: int, dist: LocalDist, group: Any) -> None:
        if rank == 1:
            raise ValueError("on device 1")
        dist.all_reduce(torch.ones(2), group=group)

    with pytest.raises(LocalRunError, match="on device 1"):
        devices(work).check()


def test_a_device_that_ends_too_early_is_found() -> None:
    def work(rank: int, dist: LocalDist, group: Any) -> None:
        if rank:
            dist.all_reduce(torch.ones(2), group=group)

    with pytest.raises(LocalRunError, match="device 0, which ended without joining"):
        devices(work).check()


def test_all_run_once_the_run_is_given_up() -> None:
    turns, over = Turns(2), []

    def work(rank: int) -> None:
        turns.begin(rank)
        over.append(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    turns.open()
    for thread in threads:
        thread.join()
    assert sorted(over) == [0, 1]


@pytest.mark.parametrize(("size", "short"), [(16, True), (512, False)])
def test_short_calls_are_made_in_turns(size: int, short: bool) -> None:
    emitted = step(size).emitted
    assert has_short_calls(emitted) is short
    assert LocalSession(Emitted(emitted).load()).in_turns is short


def test_turns_change_no_number() -> None:
    session = LocalSession(Emitted(step(8).emitted).load())
    program = session.programs.program

    def losses(in_turns: bool) -> list[float]:
        session.in_turns = in_turns
        tables, _ = given_tables(program, {}, {}, 0, range(2))

        def call(ranks: Ranks) -> float:
            return float(call_device(ranks, program, tables[ranks.rank])["loss"])

        return session.run(call)

    assert losses(True) == losses(False)
