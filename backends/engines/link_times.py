"""Times of products, passes over memory and gloo collectives on this machine, by processes of it.

As many processes as devices work at once, each with one thread, as under torchrun: on a machine of
fewer cores they get in each other's way here as they do there.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime import communication
from meshdsl.diagnostics import fail
from meshdsl.records import dataclass

Times = dict[tuple[str, int], list[tuple[float, float]]]
"""By what was timed and how many processes took part: pairs of bytes (FLOPs) and seconds."""

WORLDS = (1, 2, 4)
SIDES = (16, 32, 64, 128, 256, 512)
"""Sides of square products."""
BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
"""Sizes of what is sent, and of what is passed over."""
ROUNDS = 11
"""Bursts of each, of which the first warms up; of the slowest, every second one."""
BURST = 1 << 14
"""Bytes that a burst sends: smaller calls are repeated."""
POOL = 1 << 22
"""Bytes of operands that take turns: in a program they are seldom in the cache next to the core."""
PATIENCE = 60.0
"""Seconds after which processes that have not answered are ended."""


def measure() -> Times:
    """Medians of a few bursts each. Raises MD0325 where processes cannot work together."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    world = max(WORLDS)
    with tempfile.TemporaryDirectory() as folder:
        store, answers = str(Path(folder) / "store"), context.SimpleQueue()
        processes = [
            context.Process(target=_process, args=(rank, world, store, answers), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        ended = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, ended - time.monotonic()))
        failed = [p for p in processes if p.exitcode != 0]
        for process in failed:
            process.kill()
        if failed or answers.empty():
            help = "is there another process that measures, or too little shared memory?"
            fail("MD0325", "processes of this machine could not be timed together", help=help)
        times: Times = answers.get()
    return times


def _process(rank: int, world: int, store: str, answers: Any) -> None:
    """One of the processes; the first reports what it found."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),
    )
    torch.set_num_threads(1)
    trials = list(_trials(rank, world))
    for turn in range(ROUNDS):
        for trial in trials:
            dist.barrier()
            trial.take(turn)
    times: Times = {}
    for trial in trials:
        for what, size, seconds in trial.medians():
            times.setdefault((what, trial.members), []).append((size, seconds))
    if rank == 0:
        answers.put(times)
    dist.barrier()
    dist.destroy_process_group()


def _trials(rank: int, world: int) -> Iterator[_Trial]:
    """What is timed among how many: of kernels one group works and the others rest.

    All groups send at once, as those over one axis of a mesh do.
    """
    for members in WORLDS:
        groups = [dist.new_group(range(i, i + members)) for i in range(0, world, members)]
        group = groups[rank // members]
        yield _Trial(list(_kernels()) if rank < members else [], group, members)
        yield _Trial(list(_sends(rank, group)) if members > 1 else [], group, members)


@dataclass(frozen=True, slots=True)
class _Point:
    """Something to be timed: `work` on `size` bytes (FLOPs), `repeats` times in a burst."""

    what: str
    size: float
    work: Callable[[], Any]
    repeats: int
    slow: bool = False


def _kernels() -> Iterator[_Point]:
    """Products and passes over memory."""
    for side in SIDES:
        work = _in_turn(torch.mm, 4 * side**2, [(side, side)] * 2)
        yield _Point("product", 2.0 * side**3, work, max(1, min(64, SIDES[-1] ** 2 // side**2)))
    for size in BYTES:
        work = _in_turn(torch.relu, size, [(size // 4,)])
        yield _Point("pointwise", 2.0 * size, work, max(1, min(64, BYTES[-1] // size)))


def _in_turn(
    work: Callable[..., Any], size: int, shapes: list[tuple[int, ...]]
) -> Callable[[], Any]:
    """`work` on sets of operands in turn, of `size` bytes each; results stay until the next."""
    count = max(1, min(64, POOL // size))
    pool = [[torch.rand(shape) - 0.5 for shape in shapes] for _ in range(count)]
    results: list[Any] = [None] * len(pool)
    turn = itertools.cycle(range(len(pool)))

    def next_one() -> None:
        at = next(turn)
        results[at] = work(*pool[at])

    return next_one


def _sends(rank: int, group: Any) -> Iterator[_Point]:
    """Collectives, as the emitted programs call them."""
    members = dist.get_world_size(group)
    sends: dict[str, Callable[[Any], Any]] = {
        "all_gather": lambda x: communication.all_gather(x, 0, group),
        "all_reduce": lambda x: communication.all_reduce(x, group, "sum"),
        "reduce_scatter": lambda x: communication.reduce_scatter(x, 0, group, "sum"),
        "all_to_all": lambda x: communication.all_to_all(x, 0, 1, group),
        "permute": lambda x: _passed_on(x, rank % members, members, group),
    }
    for what, send in sends.items():
        for size in BYTES:
            x, repeats = torch.rand(8, size // 32), max(1, BURST // size)
            yield _Point(what, float(size), partial(send, x), repeats, size == BYTES[-1])


def _passed_on(x: torch.Tensor, rank: int, world: int, group: Any) -> torch.Tensor:
    """The block of the next device, sent as `permute` sends it."""
    received = torch.empty_like(x)
    arrives, leaves = [0] * world, [0] * world
    arrives[(rank + 1) % world] = leaves[(rank - 1) % world] = x.numel()
    dist.all_to_all_single(received.view(-1), x.view(-1), arrives, leaves, group=group)
    return received


class _Trial:
    """Points that a group of processes times together; every process has the same ones.

    All take turns, round by round, so that a busy moment of the machine meets each of them once. A
    burst is as long as its slowest process takes: where processes share a core, whoever is given
    it first sees a time in which the others wait.
    """

    def __init__(self, points: list[_Point], group: Any, members: int) -> None:
        self.points, self.group, self.members = points, group, members
        self.taken = torch.full((ROUNDS, len(points)), torch.nan, dtype=torch.float64)

    def take(self, turn: int) -> None:
        """Time a burst of each point."""
        for number, point in enumerate(self.points):
            if point.slow and turn % 2:
                continue
            if self.members > 1:
                dist.barrier(self.group)
            start = time.perf_counter()
            for _ in range(point.repeats):
                point.work()
            self.taken[turn, number] = (time.perf_counter() - start) / point.repeats

    def medians(self) -> Iterator[tuple[str, float, float]]:
        """Seconds of each point: the median of its bursts, without the first, which warms up."""
        if self.members > 1 and self.points:
            dist.all_reduce(self.taken, dist.ReduceOp.MAX, self.group)
        for point, column in zip(self.points, self.taken[1:].T, strict=True):
            yield point.what, point.size, median(column[~column.isnan()].tolist())
