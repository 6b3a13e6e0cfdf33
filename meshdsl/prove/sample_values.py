"""Random operands of a call, its results, and the whole that parts on devices make."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature
from meshdsl.placed.placements import Component, Partial, Split

RANKS = 2
"""The devices that a placement is tried on."""

_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def signature(opdef: OpDef, sample: Sample) -> Signature:
    """The global types of a sample call."""
    attrs = dict(sample.attrs)
    return Signature(sample.ins, opdef.infer(sample.ins, attrs), attrs)


def results(opdef: OpDef, call: NumpyCall, arrays: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The outputs of the numpy meaning, always as a tuple."""
    found = opdef.numpy(call, *arrays)
    return found if isinstance(found, tuple) else (found,)


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal in shape, and in value up to the rounding of float64."""
    if found.shape != expected.shape:
        return False
    if found.size:  # nearly all that differ do so here: no need to compare the rest
        first, wanted = float(found.item(0)), float(expected.item(0))
        if first != wanted and abs(first - wanted) > 1e-12 + 1e-9 * abs(wanted):
            return False
    equal = found == expected
    if equal.all() or found.dtype.kind != "f":
        return bool(equal.all())
    close = np.abs(found - expected) <= 1e-12 + 1e-9 * np.abs(expected)
    nan = (found != found) & (expected != expected)
    return bool((equal | close | nan).all())


def join(parts: Any, component: Component, type_: TensorType) -> np.ndarray:
    """The global value of the parts on all ranks."""
    if isinstance(component, Split):
        return np.concatenate(parts, axis=type_.index(component.dim))
    if isinstance(component, Partial):
        return functools.reduce(_COMBINE[component.op], parts)
    return np.asarray(parts[0])


# --- random values ---------------------------------------------------------------------------


def draw_parts(
    type_: TensorType, kind: str, component: Component, rng: np.random.Generator, largest: int
) -> list[np.ndarray]:
    """The block of a random operand on each rank; a sum of indices is still an index."""
    if isinstance(component, Partial):
        share = RANKS if component.op == "sum" else 1
        parts = [draw(type_, kind, rng, largest, share) for _ in range(RANKS)]
        if component.op == "sum":
            parts[1] = np.where(parts[0] + parts[1] == 0, parts[0], parts[1])
        return parts
    array = draw(type_, kind, rng, largest)
    if isinstance(component, Split):
        return np.split(array, RANKS, axis=type_.index(component.dim))
    return [array] * RANKS


def draw(
    type_: TensorType, kind: str, rng: np.random.Generator, largest: int = 4, share: int = 1
) -> np.ndarray:
    """Random values of a kind that `Sample` lists, integers up to `largest`.

    Indices take at most 1/`share` of their range, so that sums of as many are indices.
    """
    shape = type_.shape
    dtype = np.float64 if type_.dtype.kind == "float" else np.dtype(type_.dtype.numpy)
    if kind.startswith("index:"):
        return rng.integers(0, INDEX_SIZE // share, shape).astype(dtype)
    sign = SIGNS[rng.integers(0, 2, shape)]
    magnitude = rng.integers(1, largest + 1, shape)
    drawn: np.ndarray
    match kind:
        case "int" | "nonzero":
            drawn = sign * magnitude
        case "positive":
            drawn = rng.integers(1, 13, shape) / 4
        case "half":
            drawn = sign * (magnitude - 0.5)
        case "unit":
            drawn = rng.uniform(-1, 1, shape)
        case _:
            assert kind == "bool", kind
            drawn = rng.random(shape) < rng.choice([0.02, 0.5, 0.98])
    return np.asarray(drawn, dtype=dtype)


SIGNS = np.array([-1, 1])
INDEX_SIZE = 8
"""The size of the dim that the samples index."""
