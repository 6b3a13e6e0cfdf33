"""Records that say that no element's index counts: their results are permuted as their operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import Factor, NumpyCall, Signature, load_all, lookup
from tests.ops.row_prover import draw, results, signature

UNORDERED = [name for name, opdef in load_all().items() if opdef.unordered]


def loops_everywhere(sig: Signature, factors: tuple[Factor, ...]) -> Iterator[str]:
    """The dims that one loop goes through in all tensors which have them."""
    for factor in factors:
        pairs = [*zip(sig.ins, factor.ins, strict=True), *zip(sig.outs, factor.outs, strict=True)]
        names = {name for _, name in pairs if name is not None}
        if len(names) == 1 and not any(factor.reads):
            (dim,) = names
            if all((name == dim) == type_.has(dim) for type_, name in pairs):
                yield dim


def permuted(array: np.ndarray, type_: TensorType, dim: str, order: np.ndarray) -> np.ndarray:
    return array.take(order, type_.index(dim)) if type_.has(dim) else array


@pytest.mark.parametrize("name", UNORDERED)
def test_no_index_counts(name: str) -> None:
    opdef, rng, tried = lookup(name), np.random.default_rng(0), 0
    for sample in opdef.samples:
        sig = signature(opdef, sample)
        kinds = zip(sig.ins, sample.values, strict=True)
        arrays = [draw(type_, kind, rng, 3) for type_, kind in kinds]
        call = NumpyCall(sig.ins, sig.outs, sig.attrs)
        made = results(opdef, call, arrays)
        for dim in loops_everywhere(sig, opdef.factors(sig).loops):
            size = next(t.size(dim) for t in (*sig.ins, *sig.outs) if t.has(dim))
            order = rng.permutation(size)
            turned = [permuted(a, t, dim, order) for a, t in zip(arrays, sig.ins, strict=True)]
            again = results(opdef, call, turned)
            for old, new, type_ in zip(made, again, sig.outs, strict=True):
                expected = permuted(np.asarray(old), type_, dim, order)
                np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)
            tried += 1
    assert tried


def test_what_looks_at_indices_does_not_say_so() -> None:
    for name in ("iota", "stage_index", "cumsum", "sort", "one_hot", "dropout", "gather", "argmax"):
        assert not lookup(name).unordered, name
