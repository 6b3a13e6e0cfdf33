"""The rows that an all_to_all sends where only those that are there are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdsl.records import dataclass

if TYPE_CHECKING:
    from meshdsl.device.ir import Var
    from meshdsl.diagnostics import Span


@dataclass(frozen=True, slots=True)
class Promise:
    """The blocks together have `most` rows, and each has room for `room`, as the program says."""

    most: int
    room: int
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class CountedRows:
    """How many rows along the dim `row` are there is known when the program runs.

    `leaving` has the numbers of rows as the tensor is placed before, `arriving` as it is after.
    `most` are the bytes that a device sends at most, `balanced` those where each group has as many
    rows. A `promise` is checked on the numbers before, where these are of all blocks.
    """

    leaving: Var
    arriving: Var
    row: str
    most: int
    balanced: int
    promise: Promise | None = None

    @property
    def reads(self) -> tuple[Var, ...]:
        """The numbers of rows, before and after."""
        return (self.leaving, self.arriving)

    def on(self, of: Callable[[Var], Var]) -> CountedRows:
        """The same on the variables that `of` gives."""
        numbers = (of(self.leaving), of(self.arriving))
        return CountedRows(*numbers, self.row, self.most, self.balanced, self.promise)
