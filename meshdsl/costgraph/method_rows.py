"""Methods of search side by side: the cost that each finds, its work, its proof, its seconds.

All but the seconds is the same on every machine. `search --compare-methods` prints it, for a
program and for a graph with costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypedDict

from meshdsl.diagnostics import DiagnosticError, counted
from meshdsl.records import dataclass

FAR = 0.99
"""The part of a cost from which on the gap to a bound says nothing."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a method found: the cost, and how it came by it.

    No plan of the method's space costs less than `bound`; None where nothing is known. `placed`
    are the layouts of a program that were placed and weighed in full, None for a graph. `steps` are
    counted by each method: nodes, table entries, proposals, placements.
    """

    cost: float
    steps: int
    proven: bool
    bound: float | None = None
    placed: int | None = None


class MethodFacts(TypedDict):
    """A row of the table; `refused` is why there is no cost."""

    method: str
    cost: float | None
    placed: int | None
    steps: int | None
    proven: bool
    bound: float | None
    refused: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class MethodRow:
    """A method with its figures, or the reason why it has none."""

    method: str
    figures: Figures | None
    refused: str
    seconds: float

    def facts(self) -> MethodFacts:
        """The row as data."""
        figures = self.figures
        return {
            "method": self.method,
            "cost": figures.cost if figures else None,
            "placed": figures.placed if figures else None,
            "steps": figures.steps if figures else None,
            "proven": bool(figures and figures.proven),
            "bound": figures.bound if figures else None,
            "refused": self.refused or None,
            "seconds": self.seconds,
        }

    def proof(self) -> str:
        """`proven`, the gap to a bound, or none."""
        figures = self.figures
        if figures is None or figures.proven:
            return self.refused or "proven"
        gap = 1.0 if figures.bound is None else max(0.0, 1 - figures.bound / (figures.cost or 1.0))
        return "none" if gap > FAR else f"gap {gap:.2%}"


Run = Callable[[], Figures]
"""A method on one question. Raises a diagnostic where it has no answer."""


def compared(methods: Mapping[str, Run]) -> tuple[MethodRow, ...]:
    """Every method, in order. Raises the diagnostic of the first where none has an answer."""
    rows, refusals = [], list[DiagnosticError]()
    for name, run in methods.items():
        begun = time.perf_counter()
        figures, refused = None, ""
        try:
            figures = run()
        except DiagnosticError as error:
            refusals.append(error)
            refused = f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"
        rows.append(MethodRow(name, figures, refused, time.perf_counter() - begun))
    if len(refusals) == len(rows):
        raise refusals[0]
    return tuple(rows)


def table(
    rows: tuple[MethodRow, ...],
    shown: Callable[[float], str],
    published: Mapping[str, float | None] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """The heading and the rows that have a cost, costs as `shown`, beside `published` ones."""
    with_figures = [(row, row.figures) for row in rows if row.figures is not None]
    least = min(figures.cost for _, figures in with_figures)
    with_placed = any(figures.placed is not None for _, figures in with_figures)
    placed = ("placed",) if with_placed else ()
    beside = ("published",) if published else ()
    lines = [("method", "cost", *beside, "above the least", *placed, "steps", "proof", "seconds")]
    for row, figures in with_figures:
        placed = (f"{figures.placed or 0:,}",) if with_placed else ()
        if published:
            beside = (_published(published, row.method, shown),)
        cost = shown(figures.cost), *beside, _above(figures.cost, least)
        seconds = f"{row.seconds:.2f}"
        lines.append((row.method, *cost, *placed, f"{figures.steps:,}", row.proof(), seconds))
    return tuple(lines)


def _published(
    published: Mapping[str, float | None], method: str, shown: Callable[[float], str]
) -> str:
    if method not in published:
        return ""
    figure = published[method]
    return "not found" if figure is None else shown(figure)


def refusals(rows: tuple[MethodRow, ...]) -> list[str]:
    """Why methods have no cost, a line for each."""
    return [f"{row.method}: {row.refused}" for row in rows if row.refused]


def _above(cost: float, least: float) -> str:
    """How far a cost is above the least of the table."""
    if cost == least:
        return "-"
    if not least:
        return "the least is 0"
    return f"{cost / least - 1:.2%}" if cost < 10 * least else f"{cost / least:,.0f} times"


def title(what: str, rows: tuple[MethodRow, ...], objective: str) -> str:
    """The line above the table."""
    return f"{what}: {counted(len(rows), 'method')} by {objective}"
