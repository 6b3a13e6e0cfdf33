"""Splits that pass through a split or merge, on up to eight simulated ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, Sample, Signature, lookup
from meshdsl.prove.sample_values import signature

WHOLES = [
    (8, (2, 4)),
    (8, (4, 2)),
    (12, (6, 2)),
    (12, (3, 4)),
    (8, (2, 2, 2)),
    (4, (1, 4)),
    (6, (6,)),
]


@pytest.mark.parametrize(("size", "parts"), WHOLES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["split", "merge"])
def test_legal_splits_are_exactly_the_true_ones(
    name: str, size: int, parts: tuple[int, ...], ranks: int
) -> None:
    whole, pieces = Dim("w", size), tuple(Dim(f"p{i}", n) for i, n in enumerate(parts))
    sig = _signature(name, whole, pieces)
    for counts in _factorings(ranks, pieces):
        one, many = {"w": ranks}, dict(zip([p.name for p in pieces], counts, strict=True))
        splits = (one, many) if name == "split" else (many, one)
        opdef = lookup(name)
        assert opdef.legal is not None
        true = size % ranks == 0 and _holds(sig, name, *splits, ranks=ranks)
        assert opdef.legal(sig, *splits) == true, splits


@pytest.mark.parametrize("name", ["split", "merge"])
def test_unequal_counts_are_not_legal(name: str) -> None:
    sig = _signature(name, Dim("w", 8), (Dim("p0", 2), Dim("p1", 4)))
    one, many = {"w": 4}, {"p0": 2}
    opdef = lookup(name)
    assert opdef.legal is not None
    assert not opdef.legal(sig, *((one, many) if name == "split" else (many, one)))
    assert opdef.legal(sig, {}, {})


def _signature(name: str, whole: Dim, pieces: tuple[Dim, ...]) -> Signature:
    other = Dim("o", 3)
    if name == "split":
        split = (("dim", whole), ("into", pieces))
        return signature(lookup(name), Sample((TensorType((other, whole), _F32),), split))
    merge = (("dims", pieces), ("into", whole))
    return signature(lookup(name), Sample((TensorType((other, *pieces), _F32),), merge))


_F32 = lookup("zeros").surface.options[0][1]


def _factorings(ranks: int, pieces: tuple[Dim, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to split `pieces` into `ranks` blocks in all."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for counts in itertools.product(divisors, repeat=len(pieces)):
        fits = all(p.size % n == 0 for p, n in zip(pieces, counts, strict=True))
        if np.prod(counts) == ranks and fits:
            yield counts


def _holds(
    sig: Signature, name: str, ins: Mapping[str, int], outs: Mapping[str, int], ranks: int
) -> bool:
    opdef = lookup(name)
    x = np.arange(sig.ins[0].elements).reshape(sig.ins[0].shape)
    expected = opdef.numpy(NumpyCall(sig.ins, sig.outs, sig.attrs), x)
    splits = {**ins, **outs}
    types = (sig.ins[0], sig.outs[0])
    extents = {d.name: d.size // splits.get(d.name, 1) for t in types for d in t.dims}
    local_shape = TensorType(sig.outs[0].dims, _F32).resized(extents).shape
    for rank in range(ranks):
        part = x[_block(sig.ins[0], ins, rank)]
        if part.size != np.prod(local_shape):
            return False
        found = opdef.numpy(NumpyCall(sig.ins, sig.outs, sig.attrs, extents), part)
        if not np.array_equal(found, expected[_block(sig.outs[0], outs, rank)]):
            return False
    return True


def _block(type_: TensorType, splits: Mapping[str, int], rank: int) -> tuple[slice, ...]:
    """The block of `rank`: axes are split outer dim first, so the rank counts through them."""
    found = []
    for dim in reversed(type_.dims):
        rank, at = divmod(rank, splits.get(dim.name, 1))
        extent = dim.size // splits.get(dim.name, 1)
        found.append(slice(at * extent, (at + 1) * extent))
    return tuple(reversed(found))
