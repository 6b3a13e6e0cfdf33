"""0-1 programs: linear costs and constraints of variables that are 0 or 1, solved by HiGHS.

HiGHS (Huangfu and Hall, 2018) solves the relaxation first, and branches on the variables that are
`whole` only where that leaves fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import field

from meshdsl.placed.solver import LinearProgram, Status, solving
from meshdsl.records import dataclass

Terms = dict[int, float]
"""A quantity: coefficients by variable; the coefficient of `ONE` is a constant."""

ONE = -1
ALWAYS: Terms = {ONE: 1.0}

TOLERANCE = 1e-6
"""The tolerance for values that count as 0 or 1."""


class NoPlan(Exception):
    """The program has grown larger than it may, or nothing satisfies it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Values of the variables, their cost, and whether no others cost less."""

    values: Sequence[float]
    cost: float
    proven: bool

    def of(self, terms: Terms) -> int:
        """The value of a 0-1 quantity."""
        return round(sum(c * (self.values[i] if i >= 0 else 1) for i, c in terms.items()))


@dataclass(slots=True)
class ZeroOne:
    """A 0-1 program under construction: costs per variable and linear constraints.

    Raises NoPlan when it has more than `most` coefficients, or a constraint that cannot be met.
    """

    most: int
    whole: list[bool] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rows: list[Terms] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    coefficients: int = 0
    paid: float = 0.0

    def variable(self, whole: bool = True) -> Terms:
        """A new 0-1 variable; one that is not `whole` is 0 or 1 by itself once the others are."""
        self.costs.append(0.0)
        self.whole.append(whole)
        return {len(self.costs) - 1: 1.0}

    def choice(self, options: int) -> list[Terms]:
        """Quantities of which exactly one is 1."""
        if options == 1:
            return [ALWAYS]
        picks = [self.variable() for _ in range(options)]
        self.equal(total(picks), ALWAYS)
        return picks

    def pay(self, terms: Terms, cost: float) -> None:
        """Add `cost` times a quantity to the objective."""
        for variable, coefficient in terms.items():
            if variable == ONE:
                self.paid += cost * coefficient
            else:
                self.costs[variable] += cost * coefficient

    def equal(self, left: Terms, right: Terms) -> None:
        """`left` = `right`."""
        self._constrain(left, right, 0.0)

    def at_most(self, left: Terms, right: Terms) -> None:
        """`left` <= `right`."""
        self._constrain(left, right, -float("inf"))

    def _constrain(self, left: Terms, right: Terms, low: float) -> None:
        row = total([left, {i: -c for i, c in right.items()}])
        bound = -row.pop(ONE, 0.0)
        row = {i: c for i, c in row.items() if c}
        if not row:
            if not low + bound <= 0 <= bound:
                raise NoPlan
            return
        self.rows.append(row)
        self.lows.append(low + bound)
        self.highs.append(bound)
        self.coefficients += len(row)
        if self.coefficients > self.most:
            raise NoPlan

    def minimise(self) -> Answer | None:
        """The least values; None where no point was found within the limits, NoPlan if none exists.

        The relaxation comes first: where its values are 0 and 1, there is nothing to branch on.
        """
        if not self.costs:
            return Answer((), self.paid, proven=True)
        with solving(self._program()) as solver:
            status, values = solver.run()
            _refuse_infeasible(status)
            if status != "optimal":
                return None
            if not self._is_whole(values):
                solver.restrict(self.whole)
                status, values = solver.run()
                _refuse_infeasible(status)
        cost = self.paid + sum(c * v for c, v in zip(self.costs, values, strict=True))
        return Answer(tuple(values), cost, status == "optimal") if self._is_whole(values) else None

    def _is_whole(self, values: Sequence[float]) -> bool:
        pairs = zip(values, self.whole, strict=True)
        return all(min(value, 1 - value) < TOLERANCE for value, whole in pairs if whole)

    def _program(self) -> LinearProgram:
        return LinearProgram(
            self.costs,
            self.lows,
            self.highs,
            starts=list(itertools.accumulate(map(len, self.rows), initial=0)),
            indices=[i for row in self.rows for i in row],
            values=[c for row in self.rows for c in row.values()],
        )


def _refuse_infeasible(status: Status) -> None:
    """Raise NoPlan where the solver has found that nothing satisfies the constraints."""
    if status == "infeasible":
        raise NoPlan


def total(parts: Iterable[Terms]) -> Terms:
    """The sum of quantities."""
    coefficients: Terms = {}
    for part in parts:
        for variable, coefficient in part.items():
            coefficients[variable] = coefficients.get(variable, 0.0) + coefficient
    return coefficients
