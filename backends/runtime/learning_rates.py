"""Learning rates as numbers, by the number of the step, from 1.

A step is counted on the host, so no device is waited for.
"""

import math
from typing import Any


def warmup_rate(step: Any, peak: float, warmup: int) -> float:
    """The learning rate that rises to `peak` in equal parts, in the first `warmup` steps."""
    return min(1.0, int(step) / warmup) * peak if warmup else peak


def linear_rate(step: Any, peak: float, steps: int, warmup: int, final: float) -> float:
    """The rate that falls from `peak` on a line, and is `final` after `steps` steps."""
    left = 1 - share_done(step, steps, warmup)
    return warmup_rate(step, final + (peak - final) * left, warmup)


def cosine_rate(step: Any, peak: float, steps: int, warmup: int, final: float) -> float:
    """The rate that falls from `peak` along a cosine, and is `final` after `steps` steps.

    Loshchilov and Hutter 2017, without restarts.
    """
    left = (1 + math.cos(math.pi * share_done(step, steps, warmup))) / 2
    return warmup_rate(step, final + (peak - final) * left, warmup)


def share_done(step: Any, steps: int, warmup: int) -> float:
    """The share of the steps between the warmup and the last one that are done before a step."""
    return min(1.0, max(0.0, (int(step) - 1 - warmup) / (steps - warmup)))
