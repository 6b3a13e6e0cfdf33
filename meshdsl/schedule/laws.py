"""Laws of schedules as their authors publish them: how long devices are idle, what is in flight.

A law is a formula of the numbers of devices D and of micro-batches N and of the schedule's options;
what is in flight may depend on the device s. Tests compare every law with what is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from types import CodeType
from typing import Literal

from meshdsl.records import dataclass

Passes = Literal["whole", "equal", "twice", "thirds", "window", "pairs", "doubled"]

CONDITIONS: Mapping[Passes, str] = {
    "whole": "with whole backward passes",
    "equal": "with whole backward passes as long as forward passes",
    "twice": "with whole backward passes twice as long as forward passes",
    "thirds": "where F, I and W take equally long",
    "window": "between a device's first and last action where F, I and W take equally long",
    "pairs": "where F, I and W take equally long and F and B of a pair send when both are done",
    "doubled": "where B = 2F and the two F of a pair send when both are done",
}
"""What a law of idle time holds for.

- `whole`: a backward pass sends when all of it is done, however long it takes.
- `equal`: the same, and it takes as long as a forward pass.
- `twice`: the same, and it takes twice as long as a forward pass.
- `thirds`: a forward pass takes as long as each half of a backward pass.
- `window`: the same, and idle is what a device waits between its first and its last action.
- `pairs`: as `thirds`, and a forward pass and the backward pass behind it are one action.
- `doubled`: two forward passes in turn are one action, which takes as long as a backward pass.
"""

_FUNCTIONS = {"min": min, "max": max}


@dataclass(frozen=True)
class Law:
    """A formula, and for which numbers and which times of passes it holds.

    text:   the formula: of idle time as the share of a step, of what is in flight as a number.
    where:  a condition on the numbers; without one it holds for all that the schedule is made for.
    passes: of idle time, for which times.
    published: the authors' formula where it is another one, of idle time itself for instance.
    derived: the law is nobody's but that of the table here, found by simulating it.
    """

    text: str
    where: str = ""
    passes: Passes = "whole"
    published: str = ""
    derived: bool = False

    def of(self, numbers: Mapping[str, int]) -> Fraction | None:
        """The value for D, N, s and options by name; None where it does not hold."""
        exact = {name: Fraction(number) for name, number in numbers.items()}
        if self._holds is not None and not _value(self._holds, exact):
            return None
        return _value(self._formula, exact)

    @cached_property
    def _formula(self) -> CodeType:
        return compile(self.text, "law", "eval")

    @cached_property
    def _holds(self) -> CodeType | None:
        return compile(self.where, "law", "eval") if self.where else None

    def __str__(self) -> str:
        """The formula and its condition: `chunks*N if N >= D`."""
        return f"{self.text} if {self.where}" if self.where else self.text


def _value(code: CodeType, numbers: Mapping[str, Fraction]) -> Fraction:
    """What a formula of this package yields; it has no names but the numbers, min and max."""
    value: Fraction | int = eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(numbers))
    assert not isinstance(value, float), "a law divides what is exact: `3*N/2`, not `3/2*N`"
    return Fraction(value)
