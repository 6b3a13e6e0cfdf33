"""Schedules with one stage on each device."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.schedule.laws import Law
from meshdsl.schedule.registry import Rows, schedule
from meshdsl.schedule.table import Kind

Step = tuple[Kind, int, int]


FLUSH = Law("(D - 1) / (N + D - 1)")
"""The idle share of a pipeline that fills and empties once a step."""

HELD_1F1B = Law("min(N, D - s)")
"""What 1F1B has in flight."""


@schedule(
    "Huang et al. 2019, figure 2b: what GPipe is compared with",
    idle=Law("(D - 1) / D"),
    in_flight=Law("1"),
    also=("sequential", "model_parallel"),
)
def naive(devices: int, micro: int) -> Rows:
    """One micro-batch at a time: the other devices wait."""
    for stage in range(devices):
        yield [(kind, m, stage) for m in range(micro) for kind in _FB]


@schedule(
    "Huang et al. 2019, GPipe",
    idle=FLUSH,
    in_flight=Law("N"),
    also=("fill_drain", "all_forward_all_backward", "afab"),
)
def gpipe(devices: int, micro: int) -> Rows:
    """All forward passes, then all backward passes."""
    for stage in range(devices):
        yield [(kind, m, stage) for kind in _FB for m in range(micro)]


@schedule(
    "Li et al. 2021, TeraPipe",
    idle=FLUSH,
    in_flight=Law("N"),
    also=("token_level",),
)
def terapipe(devices: int, micro: int) -> Rows:
    """GPipe on slices of a sequence, backward reversed.

    Each slice reads the keys and values of those before it. So backward passes run from the last
    micro-batch to the first.
    """
    for stage in range(devices):
        passes = range(micro)
        yield [*(("F", m, stage) for m in passes), *(("B", m, stage) for m in reversed(passes))]


@schedule(
    "Narayanan et al. 2021, PipeDream-Flush in Megatron-LM; Fan et al. 2021, DAPPLE",
    idle=FLUSH,
    in_flight=HELD_1F1B,
    also=("1f1b", "pipedream_flush", "dapple", "onefoneb"),
)
def one_f_one_b(devices: int, micro: int) -> Rows:
    """1F1B: forward and backward passes alternate.

    A stage begins with as many forward passes as stages follow it. As idle as gpipe, in less
    memory.
    """
    for stage in range(devices):
        yield alternating(stage, micro, devices - 1 - stage)


@schedule(
    "Zhuang et al. 2023, eager-1F1B in AlpaComm",
    idle=FLUSH,
    in_flight=Law("min(N, 2*(D - 1 - s) + 1)"),
    also=("eager_1f1b",),
)
def eager(devices: int, micro: int) -> Rows:
    """1F1B with twice the warm-up, for slow links."""
    for stage in range(devices):
        yield alternating(stage, micro, 2 * (devices - 1 - stage))


@schedule(
    "Qi et al. 2023, ZB-H1 in Zero Bubble Pipeline Parallelism; ZB1P in torch",
    idle=Law("(D - 1) / (3*N + D - 1)", "N >= D", "thirds"),
    in_flight=Law("min(N, D)"),
    also=("zero_bubble", "zb1p", "zbh1"),
)
def zb_h1(devices: int, micro: int) -> Rows:
    """1F1B with parameter gradients in its idle time.

    A third as idle as 1F1B with whole backward passes, in the memory of 1F1B.
    """
    for stage in range(devices):
        yield _split(stage, micro, devices - 1 - stage, stage)


@schedule(
    "Qi et al. 2023, ZB-H2 in Zero Bubble Pipeline Parallelism",
    idle=Law("0", "N >= 2*D - 1", "window"),
    in_flight=Law("min(N, 2*D - 1)"),
    also=("zero_bubble", "zb2p", "zbh2"),
)
def zb_h2(devices: int, micro: int) -> Rows:
    """ZB-H1 with more passes in flight: no waiting.

    No device waits between its first action and its last one, from 2D - 1 micro-batches on, where
    F, I and W take equally long.
    """
    for stage in range(devices):
        yield _split(stage, micro, 2 * (devices - 1 - stage), 2 * stage)


_FB: tuple[Kind, ...] = ("F", "B")


def alternating(stage: int, micro: int, warm: int) -> Iterator[Step]:
    """Some forward passes, then one forward and one backward in turn, then what is left."""
    warm = min(warm, micro)
    for m in range(warm):
        yield "F", m, stage
    for m in range(micro):
        if m + warm < micro:
            yield "F", m + warm, stage
        yield "B", m, stage


def _split(stage: int, micro: int, warm: int, lag: int) -> Iterator[Step]:
    """The same with backward passes in two halves, the second of them `lag` passes behind."""
    warm = min(warm, micro)
    for m in range(warm):
        yield "F", m, stage
    for m in range(micro):
        if m + warm < micro:
            yield "F", m + warm, stage
        yield "I", m, stage
        if m >= lag:
            yield "W", m - lag, stage
    for m in range(max(0, micro - lag), micro):
        yield "W", m, stage
