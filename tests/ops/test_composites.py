"""The definition of every composite in the prelude is its numpy meaning."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.ir.types import DTYPES, I32, I64, DType, TensorType
from meshdsl.named.expand import expand
from meshdsl.named.identities import OF_STEPS
from meshdsl.named.ir import NamedOp, Value
from meshdsl.ops.opdef import NumpyCall, Sample, lookup
from meshdsl.prove.numpy_backward import NOWHERE, Evaluator
from meshdsl.prove.sample_values import draw, results, signature
from tests.ops.cases import SAMPLES, of_each_operator

COMPOSITES = {label: case for label, case in SAMPLES.items() if lookup(case[0]).composite}


@of_each_operator(COMPOSITES)
def test_the_definition_is_the_numpy_meaning(name: str, sample: Sample) -> None:
    sig = signature(lookup(name), sample)
    rng = np.random.default_rng(2)
    arrays = [draw(t, kind, rng) for t, kind in zip(sig.ins, sample.values, strict=True)]
    evaluator = Evaluator()
    ins = tuple(evaluator.value(a, t) for a, t in zip(arrays, sig.ins, strict=True))
    outs = tuple(Value(t, NOWHERE) for t in sig.outs)
    op = NamedOp(name, ins, outs, tuple(sample.attrs), NOWHERE)
    found = expand(op, {})
    assert found is not None
    assert (name, op.attrs) not in [(o.name, o.attrs) for o in found.ops]
    assert not any(o.name in OF_STEPS and o.ins[0].type == o.out.type for o in found.ops)
    for step in found.ops:
        made = evaluator.apply_all(step.name, step.ins, dict(step.attrs))
        for out, result in zip(step.outs, made, strict=True):
            evaluator.arrays[out] = evaluator.arrays[result]
    expected = results(lookup(name), NumpyCall(sig.ins, sig.outs, sig.attrs), arrays)
    for out, wanted in zip(op.outs, expected, strict=True):
        np.testing.assert_allclose(evaluator.arrays[out], wanted, rtol=1e-12, atol=1e-12)
        assert evaluator.arrays[out].dtype == wanted.dtype


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_grad"])
@pytest.mark.parametrize("dtype", ["bf16", "f64"])
def test_definitions_take_other_dtypes(name: str, dtype: str) -> None:
    sample = lookup(name).samples[1]
    change: dict[DType, DType] = {I32: I64}
    ins = [TensorType(t.dims, change.get(t.dtype, DTYPES[dtype])) for t in sample.ins]
    sig = signature(lookup(name), Sample(tuple(ins), sample.attrs))
    values = tuple(Value(t, NOWHERE) for t in ins)
    op = NamedOp(name, values, (Value(sig.outs[0], NOWHERE),), tuple(sample.attrs), NOWHERE)
    found = expand(op, {})
    assert found is not None
    last = found.ops[-1]
    types = lookup(last.name).infer(tuple(v.type for v in last.ins), dict(last.attrs))
    assert types == sig.outs
