"""Schedules with one stage on each device."""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.schedule.registry import Rows, schedule
from meshdsl.schedule.table import Kind

Step = tuple[Kind, int, int]


@schedule("what GPipe is compared with (Huang et al. 2019, figure 2b)")
def naive(devices: int, micro: int) -> Rows:
    """One micro-batch after the other: one device works, the others wait.

    Idle: (D - 1) / D. In flight: 1.
    """
    for stage in range(devices):
        yield [(kind, m, stage) for m in range(micro) for kind in _FB]


@schedule("Huang et al. 2019, GPipe")
def gpipe(devices: int, micro: int) -> Rows:
    """All forward passes, then all backward passes.

    Idle: (D - 1) / (N + D - 1) where a backward pass takes as long as a forward pass. In flight: N.
    """
    for stage in range(devices):
        yield [(kind, m, stage) for kind in _FB for m in range(micro)]


@schedule("Narayanan et al. 2021, PipeDream-Flush in Megatron-LM; Fan et al. 2021, DAPPLE")
def one_f_one_b(devices: int, micro: int) -> Rows:
    """One forward pass, one backward pass in turn, after as many forward passes as stages follow.

    As idle as gpipe. In flight: min(N, D - s) on stage s.
    """
    for stage in range(devices):
        yield alternating(stage, micro, devices - 1 - stage)


@schedule("Zhuang et al. 2023, eager-1F1B in AlpaComm")
def eager(devices: int, micro: int) -> Rows:
    """1F1B that begins with twice as many forward passes, for links that take time.

    In flight: min(N, 2(D - 1 - s) + 1) on stage s.
    """
    for stage in range(devices):
        yield alternating(stage, micro, 2 * (devices - 1 - stage))


@schedule("Qi et al. 2023, ZB-H1 in Zero Bubble Pipeline Parallelism; ZB1P in torch")
def zb_h1(devices: int, micro: int) -> Rows:
    """1F1B with the gradients of parameters moved into the bubble, in the memory of 1F1B.

    Idle: D - 1 units where F, I and W take one each. In flight: min(N, D) on every stage.
    """
    for stage in range(devices):
        yield _split(stage, micro, devices - 1 - stage, stage)


@schedule("Qi et al. 2023, ZB-H2 in Zero Bubble Pipeline Parallelism")
def zb_h2(devices: int, micro: int) -> Rows:
    """Forward passes enough that no device waits between its first action and its last one.

    From 2D - 1 micro-batches on, where F, I and W take as long. In flight: 2D - 1 on every stage.
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
