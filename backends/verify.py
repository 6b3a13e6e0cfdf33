"""What a run computed against the reference, output by output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from meshdsl.backends.support.values import Array
from meshdsl.named.ir import Program, Value, walk

TOLERANCES = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}
"""The most that max|Δ| may be of max|ref|, by the coarsest float dtype computed with."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output: `error` is max|Δ|, `relative` max|Δ|/max|ref|; both are 0 where all is equal.

    NaN and infinities must stand at the same places with the same signs, or `error` is infinite.
    """

    name: str
    error: float
    relative: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the output is what it should be."""
        return self.relative <= self.tolerance


def compare_outputs(
    outputs: Mapping[str, Array], reference: Mapping[str, Array], tolerances: Mapping[str, float]
) -> tuple[Comparison, ...]:
    """Compare every output with the reference's; `tolerances` as `tolerances_of` gives them."""
    return tuple(
        Comparison(name, *errors(outputs[name], expected), tolerances[name])
        for name, expected in reference.items()
    )


def tolerances_of(program: Program) -> dict[str, float]:
    """The tolerance of every output: 0 for integers and booleans."""
    floats = {v.type.dtype.name for v in _values(program) if v.type.dtype.kind == "float"}
    tolerance = max((TOLERANCES[name] for name in floats), default=0.0)
    return {
        output.name: tolerance if output.value.type.dtype.kind == "float" else 0.0
        for output in program.outputs
    }


def errors(found: Array, expected: Array) -> tuple[float, float]:
    """max|Δ| and max|Δ|/max|expected|, in float64."""
    if found.shape != expected.shape:
        return float("inf"), float("inf")
    if found.dtype.kind in "ib":
        return _ratio(_widest(found, expected), expected)
    finite = np.isfinite(expected)
    others = np.array_equal(found[~finite], expected[~finite].astype(found.dtype), equal_nan=True)
    if not others or not np.isfinite(found[finite]).all():
        return float("inf"), float("inf")
    difference = np.abs(found[finite].astype(np.float64) - expected[finite])
    return _ratio(float(np.max(difference, initial=0.0)), expected[finite])


def _widest(found: Array, expected: Array) -> float:
    """The greatest difference of integers or booleans; never 0 where any differ."""
    differs = found != expected
    apart = found[differs].astype(np.float64) - expected[differs].astype(np.float64)
    return float(np.max(np.abs(apart), initial=float(differs.any())))


def _ratio(error: float, expected: Array) -> tuple[float, float]:
    scale = float(np.max(np.abs(expected.astype(np.float64)), initial=0.0))
    if error == 0.0:
        return 0.0, 0.0
    return error, error / scale if scale else float("inf")


def _values(program: Program) -> Iterator[Value]:
    yield from program.inputs
    yield from (param.value for param in program.params)
    yield from (value for op in walk(program.body) for value in op.outs)
