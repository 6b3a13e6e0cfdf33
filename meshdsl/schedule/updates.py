"""Asynchronous schedules: stages update their parameters while micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.schedule.laws import Law
from meshdsl.schedule.list_scheduling import as_they_arrive, in_order
from meshdsl.schedule.one_stage import FLUSH, HELD_1F1B, Step, alternating
from meshdsl.schedule.registry import Rows, needs, schedule
from meshdsl.schedule.table import ANNEAL
from meshdsl.schedule.times import Times


@schedule(
    "Gaunt et al. 2017, AMPNet",
    asynchronous=True,
    idle=FLUSH,
    in_flight=Law("min(N, active or D, 2*(D - 1 - s) + 1)"),
)
def ampnet(devices: int, micro: int, active: int = 0, times: Times | None = None) -> Rows:
    """Asynchronous: devices run what has arrived.

    Every backward pass is followed by an update. Every pass reads the newest parameters, so the two
    passes of a micro-batch read different ones. Backward passes go before forward passes; `active`
    micro-batches are on their way at most, as many as devices where nothing is said. The order of
    arrival is that of the times given, with `--times` or by how many layers each stage has. It is a
    table from then on, which is replayed.
    """
    way = tuple(range(devices))
    rows = in_order([way] * micro, times or Times(), active or devices, as_they_arrive)
    for row in rows:
        yield _behind(iter(row), 1)


@schedule(
    "Harlap et al. 2018; Narayanan et al. 2019, PipeDream",
    weights="stashed",
    asynchronous=True,
    idle=FLUSH,
    in_flight=HELD_1F1B,
)
def pipedream(devices: int, micro: int) -> Rows:
    """Asynchronous 1F1B; both passes read one version.

    Every backward pass is followed by an update, and reads the version that its forward pass read.
    Stage s keeps D - s versions for that.
    """
    return _updating(devices, micro, 1)


@schedule(
    "Narayanan et al. 2021, PipeDream-2BW",
    weights="buffered",
    asynchronous=True,
    idle=FLUSH,
    in_flight=HELD_1F1B,
    also=("pipedream_2bw", "2bw"),
)
def two_bw(devices: int, micro: int, batch: int = 0) -> Rows:
    """Asynchronous 1F1B, updating after `batch` passes.

    `batch` is D by default, and every stage has two versions. A batch reads what was new when the
    one before it began, so every stage is one update behind.
    """
    size = batch or devices
    help = f"use {devices} or more micro-batches for an update"
    needs(size >= devices, f"an update every {size} micro-batches on {devices} devices", help)
    description = f"{micro} micro-batches with an update every {size}"
    needs(micro % size == 0, description, f"take a multiple of {size}")
    return _updating(devices, micro, size)


@schedule(
    "Yang et al. 2021, PipeMare",
    weights="corrected",
    asynchronous=True,
    idle=FLUSH,
    in_flight=HELD_1F1B,
)
def pipemare(devices: int, micro: int, anneal: int = ANNEAL) -> Rows:
    """Asynchronous 1F1B; backward estimates versions.

    Updates are as in AMPNet; a backward pass estimates what its forward pass read. The estimate is
    the newest version, less the version's distance times an average of updates. Steps of a stage
    are divided by its staleness, less and less so in the first `anneal` updates.
    """
    return _updating(devices, micro, 1)


def _updating(devices: int, micro: int, size: int) -> Rows:
    """1F1B, with an update after the last of every `size` backward passes."""
    for stage in range(devices):
        yield _behind(alternating(stage, micro, devices - 1 - stage), size)


def _behind(steps: Iterator[Step], size: int) -> Iterator[Step]:
    for kind, micro, stage in steps:
        yield kind, micro, stage
        if kind == "B" and (micro + 1) % size == 0:
            yield "U", micro, stage
