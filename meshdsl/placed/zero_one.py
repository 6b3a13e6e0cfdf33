"""0-1 programs: linear costs and constraints of variables that are 0 or 1, solved by HiGHS.

HiGHS (Huangfu and Hall, 2018) solves the relaxation first, and branches on the variables that are
`whole` only where that leaves fractions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from meshdsl.records import dataclass

if TYPE_CHECKING:
    import highspy

Terms = dict[int, float]
"""A quantity: coefficients by variable; the coefficient of `ONE` is a constant."""

ONE = -1
ALWAYS: Terms = {ONE: 1.0}

MOST_NODES = 200
"""Nodes of the branch and bound tree: nearly every program is solved without one."""

MOST_ITERATIONS = 50_000
"""Iterations of the simplex method on the relaxation."""

TOLERANCE = 1e-6
"""The tolerance for values that count as 0 or 1."""


SOLVER = "highspy 1.15"
"""The solver and its version: another one may find another plan of the same cost."""


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
        import highspy
        import numpy as np

        solver = _solver()
        for option, value in _OPTIONS.items():
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        solver.run()
        optimal = highspy.HighsModelStatus.kOptimal
        _refuse_infeasible(solver)
        if solver.getModelStatus() != optimal:
            return None
        if not self._is_whole(solver.getSolution().col_value):
            solver.changeColsIntegrality(
                len(self.whole), np.arange(len(self.whole)), np.array(self.whole, np.uint8)
            )
            solver.run()
            _refuse_infeasible(solver)
        values = solver.getSolution().col_value
        proven = solver.getModelStatus() == optimal
        cost = self.paid + sum(c * v for c, v in zip(self.costs, values, strict=True))
        return Answer(tuple(values), cost, proven) if self._is_whole(values) else None

    def _is_whole(self, values: Sequence[float]) -> bool:
        pairs = zip(values, self.whole, strict=True)
        return all(min(value, 1 - value) < TOLERANCE for value, whole in pairs if whole)

    def _model(self) -> highspy.HighsLp:
        import highspy
        import numpy as np

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.rows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_, model.col_upper_ = np.zeros(len(self.costs)), np.ones(len(self.costs))
        model.row_lower_, model.row_upper_ = np.array(self.lows), np.array(self.highs)
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *map(len, self.rows)])
        matrix.index_ = np.array([i for row in self.rows for i in row])
        matrix.value_ = np.array([c for row in self.rows for c in row.values()])
        return model


_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "presolve": "off",  # choices of one option are constants already
    "simplex_iteration_limit": MOST_ITERATIONS,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-6,
    "mip_max_nodes": MOST_NODES,
}


_FIRST = threading.Lock()
_first_is_made = False


def _solver() -> highspy.Highs:
    """A new solver.

    The first one of a process announces itself on the standard output, in some versions, before any
    option can be set that says not to.
    """
    global _first_is_made
    import highspy

    with _FIRST:
        if not _first_is_made:
            with _silenced():
                highspy.Highs()  # type: ignore[no-untyped-call]
            _first_is_made = True
    return highspy.Highs()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Whatever is written to the descriptors 1 and 2, by C code too, is lost.

    Those that are closed are closed again. It holds for all threads: what is inside is short.
    """
    import ctypes

    def flush() -> None:
        ctypes.CDLL(None).fflush(None)  # what C code has yet to write

    flush()
    copies = {number: _copied(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # it may get a number that is closed
    try:
        for number in copies:
            os.dup2(nowhere, number)
        yield
        flush()
    finally:
        if copies.get(nowhere, 0) is not None:
            os.close(nowhere)
        for number, copy in copies.items():
            if copy is None:
                os.close(number)
            else:
                os.dup2(copy, number)
                os.close(copy)


def _copied(number: int) -> int | None:
    """A copy of a descriptor that is no standard stream; None where it is closed."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _refuse_infeasible(solver: highspy.Highs) -> None:
    """Raise NoPlan where the solver has found that nothing satisfies the constraints."""
    import highspy

    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        raise NoPlan


def total(parts: Iterable[Terms]) -> Terms:
    """The sum of quantities."""
    coefficients: Terms = {}
    for part in parts:
        for variable, coefficient in part.items():
            coefficients[variable] = coefficients.get(variable, 0.0) + coefficient
    return coefficients
