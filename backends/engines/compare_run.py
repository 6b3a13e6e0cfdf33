"""The columns of a comparison, run on the same values and compared with the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.backends.engines import execution as engines
from meshdsl.backends.engines.against_reference import Reference, TensorComparison, problems
from meshdsl.backends.engines.execution import InputSource, check_reference, reference_of
from meshdsl.carets import to_json
from meshdsl.columns import Column
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Severity
from meshdsl.placed.ir import reduced_in
from meshdsl.report.schema import DistanceFacts, PairFacts, RanFacts, RunFacts

Yielded = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The outputs of a run, and its parameters and states after the step."""

TOO_LARGE = ("MD0703", "MD0704")
"""The codes of refused runs: too much memory, or too many devices."""


def measure(columns: Sequence[Column], seed: int, budget: int | None = None) -> RunFacts:
    """Run all columns that compiled with the local engine, and the float64 reference once.

    `runs` has an entry per column: `status` is `ran`, `same` (the program of an earlier column,
    not run again), `refused` (too large), `failed` or `broken` (it did not compile). `between`
    compares every two that ran. `budget` is the available memory; None queries the machine.
    """
    given = InputSource(seed=seed)
    for column in columns:
        if column.made:
            check_reference(column.made)
    yielded: dict[str, Yielded] = {}
    runs = [_run(c, given, budget, yielded) for c in columns]
    between: list[PairFacts] = []
    if yielded:
        ran = next(c.made for c in columns if c.letter in yielded and c.made)
        reference = reference_of(ran, given)
        _against_reference(columns, reference, yielded, runs)
        reduced = {c.letter: reduced_in(c.made.placed) for c in columns if c.made}
        for a, b in itertools.combinations(yielded, 2):
            allowed = reference.allowing(reduced[a] | reduced[b])
            between.append(_between(a, b, yielded, allowed))
    return {
        "executed": list(yielded),
        "seed": seed,
        "engine": "local",
        "runs": runs,
        "between": between,
    }


def _run(column: Column, given: Any, budget: int | None, yielded: dict[str, Yielded]) -> RanFacts:

    entry: RanFacts = {"column": column.letter, "status": "broken"}
    if column.made is None:
        return entry
    if column.same_as is not None:
        return {**entry, "status": "same", "same_as": column.same_as}
    try:
        result = engines.run(column.made, "local", given, budget)
    except DiagnosticError as error:
        refused = all(d.code in TOO_LARGE for d in error.diagnostics)
        told = [to_json(d) for d in error.diagnostics]
        severity: Severity = "warning" if refused else "error"
        column.diagnostics.add(*(replace(d, severity=severity) for d in error.diagnostics))
        return {**entry, "status": "refused" if refused else "failed", "diagnostics": told}
    for text in result.disagreements:
        column.diagnostics.add(Diagnostic("MD0707", f"column {column.letter}: {text}"))
    yielded[column.letter] = (result.outputs, result.updated)
    sent = max((wire for _, wire in result.sent), default=0)
    return {**entry, "status": "ran", "seconds": result.seconds, "wire_bytes": sent}


def _against_reference(
    columns: Sequence[Column],
    reference: Reference,
    yielded: Mapping[str, Yielded],
    runs: Sequence[RanFacts],
) -> None:
    """Add to every run the distance of its outputs and updates from the reference's."""
    for entry, column in zip(runs, columns, strict=True):
        if entry["status"] == "ran":
            assert column.made is not None
            allowed = reference.allowing(reduced_in(column.made.placed))
            checked = allowed.compare(*yielded[column.letter])
            entry["reference"] = _worst(checked)
            column.diagnostics.add(*problems(checked, f" of column {column.letter}"))


def _between(
    first: str, second: str, yielded: Mapping[str, Yielded], reference: Reference
) -> PairFacts:
    checked = reference.compare(*yielded[second], other=yielded[first])
    return {"columns": [first, second], **_worst(checked)}


def _worst(checked: Sequence[TensorComparison]) -> DistanceFacts:
    """The worst output: `max_error` is the largest max|Δ|, `relative` a part of its `measure`.

    Both are None where shapes, NaN or infinities differ. `role` is `output`, `param` or `state`.
    """
    worst = max(checked, key=lambda c: c.relative)
    return {
        "output": worst.name,
        "role": worst.role,
        "measure": worst.measure,
        "max_error": _finite(max(c.error for c in checked)),
        "relative": _finite(worst.relative),
        "tolerance": worst.tolerance,
        "ok": all(c.ok for c in checked),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
