"""0-1 programs, solved exactly by HiGHS (through scipy): bytes first, then a tie-breaker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


class TooManyVariables(Exception):
    """The program has grown larger than it may."""


@dataclass(slots=True)
class ZeroOne:
    """A 0-1 program in the making: costs per variable and linear constraints.

    Raises TooManyVariables when it has more than `most`.
    """

    most: int
    whole: list[bool] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    ties: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0, tie: float = 0, whole: bool = True) -> int:
        """A new 0-1 variable with its bytes and its weight in ties.

        One that is not `whole` is 0 or 1 by itself once the others are.
        """
        if len(self.costs) >= self.most:
            raise TooManyVariables
        self.costs.append(cost)
        self.ties.append(tie)
        self.whole.append(whole)
        return len(self.costs) - 1

    def constrain(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """`low <= sum(coefficient * variable) <= high`."""
        row: dict[int, float] = {}
        for variable, coefficient in terms:
            row[variable] = row.get(variable, 0) + coefficient
        self.rows.append(row)
        self.lows.append(low)
        self.highs.append(high)

    def minimise(self, seconds: float) -> tuple[list[float], bool] | None:
        """The best values (bytes first, then ties), and whether proven so; None: none found."""
        first = self._solve(self.costs, None, seconds)
        if first is None:
            return None
        values, proven = first
        best = sum(c * v for c, v in zip(self.costs, values, strict=True))
        second = self._solve(self.ties, best, seconds / 4)
        return (second[0] if second else values), proven

    def _solve(
        self, objective: list[float], most_bytes: float | None, seconds: float
    ) -> tuple[list[float], bool] | None:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = list(self.rows)
        lows, highs = list(self.lows), list(self.highs)
        if most_bytes is not None:
            rows.append({i: c for i, c in enumerate(self.costs) if c})
            lows.append(-np.inf)
            highs.append(most_bytes + 0.5)
        data = [(r, c, v) for r, row in enumerate(rows) for c, v in row.items()]
        at = ([r for r, _, _ in data], [c for _, c, _ in data])
        matrix = csr_array(([v for _, _, v in data], at), shape=(len(rows), len(objective)))
        result = milp(
            np.array(objective),
            integrality=np.array(self.whole, dtype=np.uint8),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, lows, highs),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if result.x is None:
            return None
        return [round(float(v)) for v in result.x], result.status == 0
