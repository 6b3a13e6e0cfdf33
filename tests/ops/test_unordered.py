"""Where no element's index counts, as records say: results are permuted as operands are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import Factor, NumpyCall, Signature, load_all, lookup
from meshdsl.prove.sample_values import draw, results, signature
from tests.together import together


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


@together(name=load_all())
def test_an_index_counts_where_the_record_says_so(name: str) -> None:
    opdef, rng = lookup(name), np.random.default_rng(0)
    counts = set()
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
            expected = [
                permuted(np.asarray(a), t, dim, order) for a, t in zip(made, sig.outs, strict=True)
            ]
            pairs = zip(again, expected, strict=True)
            if dim in opdef.ordered_dims(sig.ins, sig.attrs):
                counts.add(all(np.allclose(new, old) for new, old in pairs))
                continue
            for new, old in pairs:
                np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-6)
    assert bool(opdef.ordered or opdef.grouped) == (False in counts), "of no sample an index counts"
