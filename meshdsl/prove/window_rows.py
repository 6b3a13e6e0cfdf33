"""What each device has of the operands in a row; and do rows with windows hold?

Without communication: a window is a slice of the padded whole operand. Blocks are rounded up, the
last ones short or empty: a dim need not divide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdsl.backends.runtime.values import block
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Reads, Sample, Signature
from meshdsl.placed.placements import B, Partial, Split
from meshdsl.placed.sharding_rules import Row
from meshdsl.prove.sample_values import draw, join, results, same

DRAWS = 12


def reads_windows(row: Row) -> bool:
    """Whether a row splits a loop that has windows of operands."""
    return row.factor is not None and any(row.factor.reads)


def padded(x: np.ndarray, at: int, window: tuple[int, int], fill: Any) -> np.ndarray:
    """Indices [start, stop) of dim number `at` of the whole `x`, with `fill` around it."""
    start, stop = window
    size = x.shape[at]
    if fill == "wrap":
        return np.asarray(x.take(np.arange(start, stop) % size, at))
    widths = [(0, 0)] * x.ndim
    before, after = max(0, -start), max(0, stop - size)
    widths[at] = (before, after)
    with_fill = np.pad(x, widths, constant_values=fill or 0)
    lead = (slice(None),) * at
    return np.asarray(with_fill[(*lead, slice(start + before, stop + before))])


def holds(opdef: OpDef, sig: Signature, sample: Sample, row: Row, ranks: int) -> bool:
    """Whether the local results on windows of the operands are the blocks of the whole result."""
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        return all(_holds_once(opdef, sig, sample, row, ranks, rng) for _ in range(DRAWS))


def _holds_once(
    opdef: OpDef, sig: Signature, sample: Sample, row: Row, ranks: int, rng: np.random.Generator
) -> bool:
    pairs = zip(sig.ins, sample.values, strict=True)
    wholes = [draw(type_, kind, rng, 9) for type_, kind in pairs]
    call = NumpyCall(sig.ins, sig.outs, sig.attrs)
    expected = results(opdef, call, wholes)
    pieces = [piece(sig, row, wholes, (ranks,), (rank,)) for rank in range(ranks)]
    parts = zip(*(results(opdef, local, xs) for local, xs in pieces), strict=True)
    outputs = zip(sig.outs, row.outs, expected, parts, strict=True)
    return all(
        same(join(list(p), component, type_), result)
        and (component != B or all(same(p[0], q) for q in p))
        for type_, component, result, p in outputs
    )


def piece(
    sig: Signature, row: Row, wholes: list[np.ndarray], ways: tuple[int, ...], at: tuple[int, ...]
) -> tuple[NumpyCall, list[np.ndarray]]:
    """The call of the device at coordinates `at` of axes of sizes `ways`, and its operands."""
    extents, offsets, windows, local = {}, {}, {}, []
    for type_, component in zip((*sig.ins, *sig.outs), (*row.ins, *row.outs), strict=True):
        if isinstance(component, Split):
            first, count = block(type_.size(component.dim), ways, at)
            extents[component.dim], offsets[component.dim] = count, first
    read = zip(sig.ins, row.ins, reads_of(sig, row), wholes, strict=True)
    for index, (type_, component, reads, x) in enumerate(read):
        assert not isinstance(component, Partial)
        if not isinstance(component, Split):
            local.append(x)
            continue
        dim = component.dim
        window = (offsets[dim], offsets[dim] + extents[dim])
        if reads is not None:
            first, count = block(loop_size(sig, row), ways, at)
            window = windows[index, dim] = reads.window(first, first + count, type_.size(dim))
        local.append(padded(x, type_.index(dim), window, None if reads is None else reads.fill))
    return NumpyCall(sig.ins, sig.outs, sig.attrs, extents, offsets, windows=windows), local


def reads_of(sig: Signature, row: Row) -> tuple[Reads | None, ...]:
    """By operand, what a block of the loop that a row splits reads of it."""
    assert row.factor is not None
    return row.factor.reads or (None,) * len(sig.ins)


def loop_size(sig: Signature, row: Row) -> int:
    """The size of the loop that a row splits: that of a dim which is its index."""
    factor = row.factor
    assert factor is not None
    indexed: list[tuple[TensorType, str | None]] = list(zip(sig.outs, factor.outs, strict=True))
    read = zip(sig.ins, factor.ins, reads_of(sig, row), strict=True)
    indexed += [(type_, dim) for type_, dim, reads in read if reads is None]
    return next(type_.size(dim) for type_, dim in indexed if dim is not None)
