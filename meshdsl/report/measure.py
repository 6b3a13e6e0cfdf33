"""Running the columns of a comparison on the same values: how far apart they are, as measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Severity
from meshdsl.report.columns import Column

if TYPE_CHECKING:
    from meshdsl.backends.verify import Comparison

Json = dict[str, Any]
TOO_LARGE = ("MD0703", "MD0704")
"""Why a run is refused: memory, or the number of devices."""

NOT_RUN: Json = {"executed": [], "seed": None, "engine": None, "runs": [], "between": []}
"""What there is to say where nothing was executed."""


def measure(columns: Sequence[Column], seed: int, budget: int | None = None) -> Json:
    """Run all columns that compiled with the local engine, and the float64 reference once.

    `runs` has an entry per column: `status` is `ran`, `same` (the program of an earlier column,
    not run again), `refused` (too large), `failed` or `broken` (it did not compile). `between`
    compares every two that ran. `budget` is the memory there is; None asks the machine.
    """
    from meshdsl.backends.engines import Given

    given = Given(seed=seed)
    outputs: dict[str, Mapping[str, Any]] = {}
    runs = [_run(c, given, budget, outputs) for c in columns]
    if outputs:
        _against_reference(columns, given, outputs, runs)
    between = [_between(a, b, outputs, columns) for a, b in itertools.combinations(outputs, 2)]
    return {
        "executed": list(outputs),
        "seed": seed,
        "engine": "local",
        "runs": runs,
        "between": between,
    }


def _run(
    column: Column, given: Any, budget: int | None, outputs: dict[str, Mapping[str, Any]]
) -> Json:
    from meshdsl.backends.engines import run
    from meshdsl.render import to_json

    entry: Json = {"column": column.letter, "status": "broken"}
    if not column.works:
        return entry
    if column.same_as is not None:
        return entry | {"status": "same", "same_as": column.same_as}
    try:
        result = run(column.made, "local", given, budget)
    except DiagnosticError as error:
        refused = all(d.code in TOO_LARGE for d in error.diagnostics)
        told = [to_json(d) for d in error.diagnostics]
        severity: Severity = "warning" if refused else "error"
        column.diagnostics.add(*(replace(d, severity=severity) for d in error.diagnostics))
        return entry | {"status": "refused" if refused else "failed", "diagnostics": told}
    for text in result.disagreements:
        column.diagnostics.add(Diagnostic("MD0707", f"column {column.letter}: {text}"))
    outputs[column.letter] = result.outputs
    sent = max((wire for _, wire in result.sent), default=0)
    return entry | {"status": "ran", "seconds": result.seconds, "wire_bytes": sent}


def _against_reference(
    columns: Sequence[Column],
    given: Any,
    outputs: Mapping[str, Mapping[str, Any]],
    runs: Sequence[Json],
) -> None:
    """Add to every run how far its outputs are from the reference's."""
    from meshdsl.backends.engines import run
    from meshdsl.backends.verify import compare_outputs, tolerances_of

    made = next(c for c in columns if c.letter in outputs).made
    expected = run(made, "reference", given).outputs
    tolerances = tolerances_of(made["named"])
    for entry, column in zip(runs, columns, strict=True):
        if entry["status"] == "ran":
            checked = compare_outputs(outputs[column.letter], expected, tolerances)
            entry["reference"] = _worst(checked)
            column.diagnostics.add(*_too_far(column.letter, checked))


def _too_far(letter: str, checked: Sequence[Comparison]) -> Iterator[Diagnostic]:
    for item in checked:
        if not item.ok:
            far = f"differs by {item.relative:.1e} of the reference's maximum"
            message = f"`{item.name}` of column {letter} {far}"
            yield Diagnostic("MD0708", message, help=f"allowed is {item.tolerance:.0e}")


def _between(
    first: str,
    second: str,
    outputs: Mapping[str, Mapping[str, Any]],
    columns: Sequence[Column],
) -> Json:
    from meshdsl.backends.verify import compare_outputs, tolerances_of

    made = next(c for c in columns if c.letter == first).made
    tolerances = tolerances_of(made["named"])
    checked = compare_outputs(outputs[second], outputs[first], tolerances)
    return {"columns": [first, second], **_worst(checked)}


def _worst(checked: Sequence[Comparison]) -> Json:
    """The output that is furthest off: `max_error` is max|Δ|, `relative` max|Δ|/max|ref|.

    Both are None where shapes, NaN or infinities differ.
    """
    worst = max(checked, key=lambda c: c.relative)
    return {
        "output": worst.name,
        "max_error": _finite(max(c.error for c in checked)),
        "relative": _finite(worst.relative),
        "tolerance": worst.tolerance,
        "ok": all(c.ok for c in checked),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
