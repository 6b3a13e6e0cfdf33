"""The torch text of records, against the numpy meaning: on whole operands, parts and windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from meshdsl.ir.types import DTYPES
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature
from meshdsl.placed.placements import Split
from meshdsl.placed.sharding_rules import Row, rows
from meshdsl.prove.sample_values import RANKS, draw, draw_parts, join, results, signature
from meshdsl.prove.torch_run import (
    call,
    evaluate,
    retyped,
    several,
    to_numpy,
    to_torch,
    unlike,
    window_call,
)
from meshdsl.prove.window_rows import piece, reads_windows
from meshdsl.prove.wrong_cases import Cases, WrongCase, call_text


def rows_of(opdef: OpDef, sample: Sample) -> tuple[Row, ...]:
    """The rows of a sample, of splits that divide its dims or not."""
    sig = signature(opdef, sample)
    return rows(opdef.factors(sig), len(sig.ins), len(sig.outs))


def _drawn(sample: Sample) -> list[np.ndarray]:
    rng = np.random.default_rng(11)
    return [draw(t, kind, rng) for t, kind in zip(sample.ins, sample.values, strict=True)]


def _problem(sig: Signature, said: str, how: str = "") -> WrongCase | None:
    """A text that differs from the numpy meaning; None where nothing is said."""
    return WrongCase("MD0173", "torch", call_text(sig) + how, said) if said else None


def on_wholes(opdef: OpDef, sample: Sample) -> Cases:
    """Whole operands, in plain memory and in memory with gaps."""
    sig, arrays = signature(opdef, sample), _drawn(sample)
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)
    for strided in (False, True):
        operands = [to_torch(a, t, strided) for a, t in zip(arrays, sig.ins, strict=True)]
        yielded = several(evaluate(opdef, call(sig), operands))
        if len(yielded) != len(sig.outs):
            yield _problem(sig, f"the text yields {len(yielded)} results")
            return
        for got, wanted, type_ in zip(yielded, expected, sig.outs, strict=True):
            how = "; operands in memory with gaps" if strided else ""
            yield _problem(sig, unlike(got, wanted, type_), how)


def on_parts(opdef: OpDef, sample: Sample, row: Row) -> Cases:
    """The parts of two devices, under a row without windows."""
    rng, sig = np.random.default_rng(11), signature(opdef, sample)
    parts = [
        draw_parts(t, kind, c, rng, 4)
        for t, kind, c in zip(sig.ins, sample.values, row.ins, strict=True)
    ]
    wholes = [join(p, c, t) for p, c, t in zip(parts, row.ins, sig.ins, strict=True)]
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), wholes)
    types = zip((*sig.ins, *sig.outs), (*row.ins, *row.outs), strict=True)
    extents = {c.dim: t.size(c.dim) // RANKS for t, c in types if isinstance(c, Split)}
    yielded = []
    for rank in range(RANKS):
        operands = [to_torch(p[rank], t) for p, t in zip(parts, sig.ins, strict=True)]
        text = call(sig, extents=extents, offsets=extents)
        yielded.append(several(evaluate(opdef, text, operands, rank)))
    how = f"; {row} on {RANKS} devices"
    for i, (out, type_) in enumerate(zip(row.outs, sig.outs, strict=True)):
        blocks = [each[i] for each in yielded]
        local = type_.resized(extents) if isinstance(out, Split) else type_
        shapes = [tuple(x.shape) for x in blocks]
        if any(shape != local.shape for shape in shapes):
            yield _problem(sig, f"the shapes {shapes} instead of {local.shape}", how)
            continue
        joined = to_torch(join(list(map(to_numpy, blocks)), out, type_), type_)
        yield _problem(sig, unlike(joined, expected[i], type_), how)


def on_windows(opdef: OpDef, sample: Sample, row: Row, ranks: int) -> Cases:
    """Windows of the operands on some devices, under a row that reads them."""
    sig, wholes = signature(opdef, sample), _drawn(sample)
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), wholes)
    yielded = []
    for rank in range(ranks):
        local, arrays = piece(sig, row, wholes, (ranks,), (rank,))
        text = window_call(local, tuple(map(np.shape, arrays)))
        operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
        yielded.append(several(evaluate(opdef, text, operands, rank)))
    for i, (out, type_) in enumerate(zip(row.outs, sig.outs, strict=True)):
        joined = to_torch(join([to_numpy(blocks[i]) for blocks in yielded], out, type_), type_)
        how = f"; windows of {row} on {ranks} devices"
        yield _problem(sig, unlike(joined, expected[i], type_), how)


def windows(opdef: OpDef, sample: Sample) -> Iterator[tuple[Row, int]]:
    """The rows that read windows, each with the numbers of devices that it is tried on."""
    reading = filter(reads_windows, rows_of(opdef, sample))
    yield from itertools.product(reading, (2, 3))


# --- literals as operands ---------------------------------------------------------------------

LITERALS = {"float": (1.5, -0.5), "int": (3, -2), "bool": (True, False)}
"""The numbers that stand for scalars, by kind of dtype."""


def literals(opdef: OpDef, sample: Sample) -> Iterator[frozenset[int]]:
    """Every choice of scalar operands that may be written as literals."""
    scalars = [j for j, t in enumerate(sample.ins) if not t.dims and j not in opdef.overwrites]
    for chosen in itertools.product([False, True], repeat=len(scalars)):
        if literal := frozenset(j for j, c in zip(scalars, chosen, strict=True) if c):
            yield literal


def with_literals(opdef: OpDef, sample: Sample, literal: frozenset[int]) -> Cases:
    """Some scalar operands written as numbers."""
    sample = retyped(sample, DTYPES["f64"])
    sig = signature(opdef, sample)
    arrays, args = _drawn(sample), [f"x{i}" for i in range(len(sample.ins))]
    for i in literal:
        if not sample.values[i].startswith(("index", "positive")):
            number = LITERALS[sample.ins[i].dtype.kind][i % 2]
            arrays[i] = np.asarray(number, arrays[i].dtype)
        args[i] = repr(arrays[i].item())
    expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)
    operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
    constants = tuple(i in literal for i in range(len(sample.ins)))
    text = call(sig, constants=constants, args=tuple(args))
    with np.errstate(all="ignore"):
        yielded = several(evaluate(opdef, text, operands))
    numbers = ", ".join(f"operand {i} is the number {args[i]}" for i in sorted(literal))
    for got, wanted, type_ in zip(yielded, expected, sig.outs, strict=True):
        if not isinstance(got, torch.Tensor):
            yield _problem(sig, f"the text yields {got!r}, no tensor", f"; {numbers}")
            continue
        yield _problem(sig, unlike(got, wanted, type_), f"; {numbers}")
