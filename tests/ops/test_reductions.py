"""What records say of reductions and casts, on numbers: of elements twice, and in other memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, load_all, lookup
from meshdsl.prove.sample_values import draw, results, signature
from tests.together import together

TWICE = {
    "sum": lambda x: x + x,
    "mean": lambda x: x,
    "max": lambda x: x,
    "min": lambda x: x,
    "prod": lambda x: x * x,
}


def doubled(value: Any, dim: str) -> Any:
    """A type, an attribute or several of them, with twice as many elements along a dim."""
    if isinstance(value, tuple):
        return tuple(doubled(v, dim) for v in value)
    if isinstance(value, TensorType):
        return replace(value, dims=doubled(value.dims, dim))
    return Dim(dim, 2 * value.size) if isinstance(value, Dim) and value.name == dim else value


def check_twice(opdef: OpDef, sample: Sample, dim: str, way: str) -> None:
    """The results of elements twice are as the reduction says."""
    rng = np.random.default_rng(0)
    arrays = [draw(t, kind, rng, 3) for t, kind in zip(sample.ins, sample.values, strict=True)]
    pairs = zip(arrays, sample.ins, strict=True)
    more = [np.concatenate([a, a], t.index(dim)) if t.has(dim) else a for a, t in pairs]
    twice = Sample(
        doubled(sample.ins, dim),
        tuple((name, doubled(value, dim)) for name, value in sample.attrs),
        sample.values,
    )
    made = [
        results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), each)[0]
        for sig, each in ((signature(opdef, sample), arrays), (signature(opdef, twice), more))
    ]
    np.testing.assert_allclose(made[1], TWICE[way](np.asarray(made[0])), rtol=1e-6)


@together(name=load_all())
def test_a_reduction_of_elements_twice_is_what_its_record_says(name: str) -> None:
    opdef = lookup(name)
    for sample in opdef.samples:
        sig = signature(opdef, sample)
        for dim in {d for t in sig.ins for d in t.names}:
            way = opdef.reduces({dim}, sig)
            if way is not None:
                check_twice(opdef, sample, dim, way)


@together(name=load_all())
def test_what_converts_is_its_operand_in_another_dtype(name: str) -> None:
    """And nothing else is: of every other operator some result differs, or has its dtype."""
    opdef, rng = lookup(name), np.random.default_rng(0)
    converted = []
    for sample in opdef.samples:
        sig = signature(opdef, sample)
        if len(sig.ins) != 1 or sig.ins[0].dims != sig.outs[0].dims:
            converted.append(False)
            continue
        array = draw(sig.ins[0], sample.values[0], rng, 3)
        (made, *_) = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), [array])
        other = sig.ins[0].dtype != sig.outs[0].dtype
        same = np.array_equal(np.asarray(made), array.astype(np.asarray(made).dtype))
        converted.append(other and same)
    assert opdef.converts == all(converted)
