"""The slices of a sequence as JSON and as a document: the best ones, and those of equal size."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from meshdsl.report.document import Document, Gap, Grid, counted, line
from meshdsl.report.schedule_schema import SlicingFacts, SlicingRow
from meshdsl.schedule.slicing import SLICE_TIMES, SliceTimes, Slicing

VERSION = 1


def described(name: str, times: SliceTimes, best: Slicing, even: Iterable[Slicing]) -> SlicingFacts:
    """The facts of the best slicing and of others. Times are exact fractions, as text."""
    return {
        "version": VERSION,
        "schedule": name,
        "stages": best.stages,
        "sequences": best.sequences,
        "slice_times": {part: str(getattr(times, part)) for part in SLICE_TIMES},
        "best": _row(best),
        "even": [*map(_row, even)],
    }


def _row(slicing: Slicing) -> SlicingRow:
    return {
        "slices": [*slicing.sizes],
        "times": [*map(str, slicing.times)],
        "makespan": str(slicing.makespan),
        "bubble": str(slicing.bubble),
    }


def shown(facts: SlicingFacts) -> Document:
    """What is best, then a row for it and for each number of equal slices."""
    best, sequences = facts["best"], facts["sequences"]
    tokens = counted(sum(best["slices"]), "token")
    each = "" if sequences == 1 else f"{sequences} sequences, each of "
    stages = counted(facts["stages"], "stage")
    parts = ", ".join(f"{part}={t}" for part, t in facts["slice_times"].items())
    rows = [("best", best), *((f"even, {len(e['slices'])}", e) for e in facts["even"])]
    return (
        line(
            f"{facts['schedule']}: {each}{tokens} on {stages}, best in "
            f"{counted(len(best['slices']), 'slice')}.",
            "strong",
        ),
        line(f"A slice takes {parts}."),
        Gap(),
        Grid("", ("slices", "takes", "idle", "tokens"), tuple(_shown(*row) for row in rows)),
    )


def _shown(name: str, row: SlicingRow) -> tuple[str, ...]:
    takes = f"{float(Fraction(row['makespan'])):,.6g}"
    idle = f"{100 * float(Fraction(row['bubble'])):.3g} %"
    return name, takes, idle, _sizes(row["slices"])


def _sizes(slices: Sequence[int]) -> str:
    """`16 8 8 8` as `16 3x8`."""
    runs = ((size, len([*same])) for size, same in itertools.groupby(slices))
    return " ".join(str(size) if count == 1 else f"{count}x{size}" for size, count in runs)
