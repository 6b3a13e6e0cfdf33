"""Times of products, passes over memory and gloo collectives on this machine, by processes of it.

As many processes as devices work at once, each with one thread, as under torchrun: on a machine of
fewer cores they get in each other's way here as they do there.
"""

from __future__ import annotations

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

from meshdsl.backends.runtime import collectives
from meshdsl.diagnostics import fail

Times = dict[tuple[str, int], list[tuple[float, float]]]
"""By what was timed and how many processes took part: pairs of bytes (FLOPs) and seconds."""

WORLDS = (1, 2, 4)
SIDES = (16, 32, 64, 128, 256, 512)
"""Sides of square products."""
BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Sizes of what is sent, and of what is passed over."""
BURST = 1 << 18
"""Bytes that a burst moves: smaller calls are repeated."""
PATIENCE = 60.0
"""Seconds after which processes that have not answered are ended."""


def measure() -> Times:
    """Medians of a few repetitions each. Raises MD0325 where processes cannot work together."""
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
        found: Times = answers.get()
    return found


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
    found: Times = {}
    for members in WORLDS:
        groups = [dist.new_group(range(i, i + members)) for i in range(0, world, members)]
        group = groups[rank // members]
        for what, size, seconds in (*_kernels(rank < members, group), *_sends(rank, group)):
            found.setdefault((what, members), []).append((size, seconds))
        dist.barrier()
    if rank == 0:
        answers.put(found)
    dist.destroy_process_group()


def _kernels(works: bool, group: Any) -> Iterator[tuple[str, float, float]]:
    """Products and passes over memory of the first group; the other processes rest."""
    for side in SIDES if works else ():
        a = torch.rand(side, side)
        yield "product", 2.0 * side**3, _median(partial(torch.mm, a, a), group, 4 * side**2)
    for size in BYTES if works else ():
        x = torch.rand(size // 4) - 0.5
        yield "pointwise", 2.0 * size, _median(partial(torch.relu, x), group, size)
    dist.barrier()


def _sends(rank: int, group: Any) -> Iterator[tuple[str, float, float]]:
    """Collectives of all groups at once, as those over one axis of a mesh are."""
    members = dist.get_world_size(group)
    sends: dict[str, Callable[[Any], Any]] = {
        "all_gather": lambda x: collectives.all_gather(x, 0, group),
        "all_reduce": lambda x: collectives.all_reduce(x, group, "sum"),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, 0, group, "sum"),
        "all_to_all": lambda x: collectives.all_to_all(x, 0, 1, group),
        "permute": lambda x: _passed_on(x, rank % members, members, group),
    }
    for what, send in sends.items() if members > 1 else ():
        for size in BYTES:
            x = torch.rand(8, size // 32)
            yield what, float(size), _median(partial(send, x), group, 4 * size)


def _passed_on(x: torch.Tensor, rank: int, world: int, group: Any) -> torch.Tensor:
    """The block of the next device, sent as `permute` sends it."""
    received = torch.empty_like(x)
    arrives, leaves = [0] * world, [0] * world
    arrives[(rank + 1) % world] = leaves[(rank - 1) % world] = x.numel()
    dist.all_to_all_single(received.view(-1), x.view(-1), arrives, leaves, group=group)
    return received


def _median(work: Callable[[], Any], group: Any, size: int) -> float:
    """Seconds of `work` among others like it: the median of a few bursts, after one that warms up.

    A burst is as long as its slowest process takes. One call alone would say little where processes
    share a core: whoever is given the core first sees a time in which the others wait.
    """
    repeats, members = max(1, BURST // size), dist.get_world_size(group)
    taken = []
    for _ in range(4 if size > BURST else 6):
        if members > 1:
            dist.barrier(group)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        seconds = torch.tensor((time.perf_counter() - start) / repeats)
        if members > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        taken.append(seconds.item())
    return median(taken[1:])
