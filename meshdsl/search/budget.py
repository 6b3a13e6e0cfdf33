"""How much a search may do: operators placed, so that no answer depends on the clock.

`--budget 60s` is so many seconds' worth of operators by one constant, whatever else a machine is
busy with. A search is done with small budgets first, each twice the one before, and keeps the best
of all: with more of a budget it is never worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshdsl.records import dataclass

PER_SECOND = 5_000
"""Operators that count as a second: about as many as are placed in one, with what goes with it."""

SMALLEST = 1_000
"""The operators of the first round."""

SIMULATED = 4
"""How many times as much it takes to place an operator in the stages of a pipeline, and time it."""

LISTING = 0.1
"""How much it is to list a layout and to look it up in tables."""

SWEPT = 0.2
"""How much it is to move costs over an operator in a sweep of the bound of per-tensor plans."""


@dataclass(slots=True, eq=False)
class Budget:
    """What is `spent` of `most` operators; without a number, there is no end."""

    most: float = math.inf
    spent: float = 0

    def spend(self, operators: float) -> None:
        """Count operators that are placed."""
        self.spent += operators

    @property
    def is_over(self) -> bool:
        """Whether all is spent."""
        return self.spent >= self.most


def operators(seconds: float | None) -> float:
    """The operators of a budget in seconds."""
    return math.inf if seconds is None else round(seconds * PER_SECOND)


def rounds(most: float) -> Iterator[Budget]:
    """The budgets of a search that may spend so much in all: each twice the one before.

    Those of a smaller search are the first of a larger one's.
    """
    if most == math.inf:
        yield Budget()
        return
    size, left = float(min(SMALLEST, most)), most
    yield Budget(size)
    while size and (left := left - size) >= 2 * size:
        size *= 2
        yield Budget(size)
