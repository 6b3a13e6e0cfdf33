"""What a check of a record finds: the code, the part of the record, the case, the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from meshdsl.ir.printer import attribute
from meshdsl.ops.opdef import Signature
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class WrongCase:
    """A case in which a record is wrong.

    `part` is the field of the record that is probably wrong, `case` the call with its sizes and
    placements, `said` the figures.
    """

    code: str
    part: str
    case: str
    said: str


Cases: TypeAlias = Iterator[WrongCase | None]
"""The cases of a check, one after the other; None is a case that is right."""


def found(cases: Cases) -> list[WrongCase]:
    """The problems among the cases of a check."""
    return [problem for problem in cases if problem is not None]


def call_text(sig: Signature) -> str:
    """`f32[b 2, h 6], f32[b 2] -> f32[b 2, h 6], alpha=1.5`."""
    ins, outs = (", ".join(map(str, side)) or "nothing" for side in (sig.ins, sig.outs))
    attrs = "".join(f", {name}={attribute(value)}" for name, value in sig.attrs.items())
    sizes = {d.name: d.size for t in (*sig.ins, *sig.outs) for d in t.dims}
    sizes_text = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return f"{ins} -> {outs}{attrs}" + (f" with {sizes_text}" if sizes_text else "")


def difference(
    found: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    names: Sequence[str] = (),
    floor: float = 0.0,
) -> str:
    """What differs most, as `0.31 instead of 0.98 at [b 0, h 1]`; empty where both are equal.

    Values are equal up to `tolerance` of their own size and of the largest, which is taken to be
    `floor` at least. Two NaNs are equal.
    """
    if found.shape != expected.shape:
        return f"the shape {list(found.shape)} instead of {list(expected.shape)}"
    got, wanted = (np.asarray(x, np.float64) for x in (found, expected))
    with np.errstate(all="ignore"):
        scale = np.max(np.abs(wanted[np.isfinite(wanted)]), initial=floor)
        off = np.abs(got - wanted)
        close = off <= tolerance * (np.abs(wanted) + scale)
    right = (got == wanted) | close | (np.isnan(got) & np.isnan(wanted))
    if right.all():
        return ""
    worst = np.where(right, -1.0, np.where(np.isnan(off), np.inf, off))
    at = np.unravel_index(int(np.argmax(worst)), worst.shape)
    dims = names if len(names) == len(at) else [""] * len(at)
    place = ", ".join(f"{name} {index}".strip() for name, index in zip(dims, at, strict=True))
    said = f"{got[at]:.6g} instead of {wanted[at]:.6g}" + (f" at [{place}]" if at else "")
    return said + (f", {int((~right).sum())} of {right.size} values" if right.size > 1 else "")
