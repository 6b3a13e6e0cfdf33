"""Choices whose cost only a trial says: what methods that sample work on, and their packages.

Such methods ask for the cost of one choice per variable, and know nothing of where it comes from:
a layout that is placed, a graph whose factors are summed, a placement that is simulated.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Protocol

from meshdsl.option_edits import leave_out, refuse
from meshdsl.records import dataclass

Picks = tuple[int, ...]
"""A choice for each variable, by number."""

OUTSIDE = 1e200
"""From here on a cost says how far a choice is out of the limits, not what it takes."""


def outside(excess: float) -> float:
    """The cost of what exceeds a limit by a part of it: more than any other, and less if nearer."""
    return OUTSIDE * (1 + min(excess, 1e50))


@dataclass(slots=True, eq=False)
class BlackBox:
    """Variables with `sizes` choices each, and the cost of a choice for each; `tried` has all.

    Costs are 0 or more; what no limit allows costs `outside(…)`, what is impossible infinity. A
    search ends once `is_over`.
    """

    sizes: tuple[int, ...]
    cost: Callable[[Picks], float]
    is_over: Callable[[], bool] = lambda: False
    tried: dict[Picks, float] = field(default_factory=dict)

    def of(self, picks: Sequence[int]) -> float:
        """The cost of a choice, computed once."""
        key = tuple(picks)
        if key not in self.tried:
            self.tried[key] = min(self.cost(key), math.inf)
        return self.tried[key]

    @property
    def is_whole(self) -> bool:
        """Whether every choice has been tried."""
        return len(self.tried) >= math.prod(self.sizes)

    def best(self) -> tuple[Picks, float]:
        """The cheapest choice that was tried; of equal ones the first."""
        picks = min(self.tried, key=self.tried.__getitem__)
        return picks, self.tried[picks]


class Sampler(Protocol):
    """A method that tries choices: `starts` first, then others, the same for the same seed."""

    def __call__(
        self, box: BlackBox, trials: int, starts: Sequence[Picks] = (), seed: int = 0
    ) -> None:
        """Try at most so many choices."""


def package(name: str, method: str) -> Any:
    """A module of the extra `search`. Raises MD0667 where its package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        needs = f"the method `{method}` needs the package `{PACKAGES[name.partition('.')[0]]}`"
        fix = leave_out("--method", safe=False)
        other = "install it: `pip install 'meshdsl[search]'`"
        refuse("MD0667", needs, fix, other)


PACKAGES = {"optuna": "optuna", "sklearn": "scikit-learn", "pymetis": "pymetis"}
"""The packages of the extra `search` by the modules that are imported."""
