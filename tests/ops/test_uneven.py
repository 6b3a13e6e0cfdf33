"""Blocks of several sizes, and empty ones: every split that an operator declares, tried on them.

The blocks' results, by the numpy meaning and by the torch text, joined are the result of the whole.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.runtime.values import block
from meshdsl.backends.torch.call import TorchText
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature, load_all, lookup
from meshdsl.placed.rows import Row, rows
from meshdsl.placed.sbp import B, Component, Split
from tests.ops.row_prover import draw, join, results, same, signature
from tests.ops.torch_run import run_lines, several, to_torch

WAYS: tuple[tuple[int, ...], ...] = ((3,), (4,), (5,), (2, 2), (3, 2))
"""Numbers of blocks along each axis. Dims of the samples are of sizes 2, 4, 6 and 8: among these
are blocks of several sizes, of one element, and none."""

Parts = list[np.ndarray[Any, Any]]


def uneven_rows(opdef: OpDef, sig: Signature, ways: tuple[int, ...]) -> list[Row]:
    """The rows that split a dim which so many blocks do not divide, as far as they are legal."""
    count = math.prod(ways)
    found = rows(opdef.factors(sig), len(sig.ins), len(sig.outs))
    return [r for r in found if _is_uneven(sig, r, count) and _is_legal(opdef, sig, r, count)]


def _splits(sig: Signature, row: Row) -> dict[str, int]:
    types = zip((*sig.ins, *sig.outs), (*row.ins, *row.outs), strict=True)
    return {c.dim: t.size(c.dim) for t, c in types if isinstance(c, Split)}


def _is_uneven(sig: Signature, row: Row, count: int) -> bool:
    windows = row.factor is not None and any(getattr(row.factor, "reads", ()))
    return not windows and any(size % count for size in _splits(sig, row).values())


def _is_legal(opdef: OpDef, sig: Signature, row: Row, count: int) -> bool:
    if opdef.legal is None:
        return True
    sides = ({c.dim: count for c in s if isinstance(c, Split)} for s in (row.ins, row.outs))
    return opdef.legal(sig, *sides)


def cut(array: np.ndarray[Any, Any], component: Component, type_: Any, spans: Any) -> Parts:
    """The part of each device: a block, or the whole (of partial values the first has it)."""
    if isinstance(component, Split):
        at = type_.index(component.dim)
        return [array.take(range(start, start + n), axis=at) for start, n in spans[component.dim]]
    assert component == B
    return [array] * len(next(iter(spans.values())))


def spans_of(sig: Signature, row: Row, ways: tuple[int, ...]) -> dict[str, list[tuple[int, int]]]:
    """First index and size of each block of the dims that a row splits."""
    every = list(itertools.product(*map(range, ways)))
    return {d: [block(n, ways, at) for at in every] for d, n in _splits(sig, row).items()}


def text_call(sig: Signature, spans: dict[str, list[tuple[int, int]]]) -> TorchText:
    """The call as an emitter makes it: local types have the largest sizes."""
    numbers = itertools.count()
    largest = {d: own[0][1] for d, own in spans.items()}
    return TorchText(
        args=tuple(f"x{i}" for i in range(len(sig.ins))),
        constants=(False,) * len(sig.ins),
        ins=tuple(t.resized(largest) for t in sig.ins),
        outs=tuple(t.resized(largest) for t in sig.outs),
        global_ins=sig.ins,
        global_outs=sig.outs,
        attrs=sig.attrs,
        fresh=lambda hint: f"{hint}_{next(numbers)}",
        place="'test.mdsl:1'",
        offsets={d: f"at_{d}" for d in spans},
        splits=frozenset(spans),
        extents={d: f"n_{d}" for d, own in spans.items() if len({n for _, n in own}) > 1},
        empty=frozenset(d for d, own in spans.items() if not all(n for _, n in own)),
    )


def blocks_of(
    opdef: OpDef, sig: Signature, spans: dict[str, list[tuple[int, int]]], parts: list[Parts]
) -> tuple[list[Parts], list[Parts]]:
    """What each device makes of its parts: by the numpy meaning, and by the torch text."""
    by_numpy, by_torch = [], []
    for rank in range(len(next(iter(spans.values())))):
        own = {d: every[rank] for d, every in spans.items()}
        offsets, extents = ({d: v[i] for d, v in own.items()} for i in (0, 1))
        local = [p[rank] for p in parts]
        call = NumpyCall(sig.ins, sig.outs, sig.attrs, extents, offsets)
        by_numpy.append([np.asarray(a) for a in results(opdef, call, local)])
        text = text_call(sig, spans)
        operands = [to_torch(a, t) for a, t in zip(local, sig.ins, strict=True)]
        names = {f"at_{d}": v[0] for d, v in own.items()} | {f"n_{d}": v[1] for d, v in own.items()}
        made = several(run_lines(text, opdef.torch(text), operands, names=names))
        by_torch.append([(m.double() if m.is_floating_point() else m).numpy() for m in made])
    return by_numpy, by_torch


@pytest.mark.parametrize("name", sorted(load_all()))
def test_every_split_holds_on_blocks_of_several_sizes(name: str) -> None:
    opdef = lookup(name)
    # CI tries three blocks, of which one is empty, and a nest of two by two on the first sample.
    every = list(itertools.product(opdef.samples, WAYS))
    few = [*itertools.product(opdef.samples, WAYS[:1]), (opdef.samples[0], (2, 2))]
    for sample, ways in every if "MESHDSL_CASES" in os.environ else few:
        sig = signature(opdef, sample)
        for row in uneven_rows(opdef, sig, ways):
            check(opdef, sample, sig, row, ways)


def check(opdef: OpDef, sample: Sample, sig: Signature, row: Row, ways: tuple[int, ...]) -> None:
    rng, spans = np.random.default_rng(5), spans_of(sig, row, ways)
    if any(c != B and not isinstance(c, Split) for c in row.ins):
        return
    wholes = [draw(t, kind, rng) for t, kind in zip(sig.ins, sample.values, strict=True)]
    drawn = zip(wholes, row.ins, sig.ins, strict=True)
    parts = [cut(array, c, t, spans) for array, c, t in drawn]
    with np.errstate(all="ignore"):
        expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), wholes)
        found = blocks_of(opdef, sig, spans, parts)
    for which, made in zip(("numpy", "torch"), found, strict=True):
        for i, (out, type_) in enumerate(zip(row.outs, sig.outs, strict=True)):
            own = [m[i] for m in made]
            if isinstance(out, Split):
                at = type_.index(out.dim)
                sizes = [n for _, n in spans[out.dim]]
                assert [a.shape[at] for a in own] == sizes, f"{which}: {sample} {row} {ways}"
            got = join(own, out, type_)
            close = same(got, expected[i]) if which == "numpy" else _close(got, expected[i])
            assert close, f"{which}: {sample} {row} {ways}: {got} for {expected[i]}"


def _close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Equal up to the rounding of f32."""
    if found.shape != expected.shape:
        return False
    return bool(np.allclose(found.astype(float), expected.astype(float), 1e-4, 1e-4, True))
