"""Records that say that zeros stay zeros: so does their numpy meaning."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.ops.opdef import NumpyCall, load_all
from meshdsl.prove.sample_values import results, signature

KEEPING = [name for name, record in load_all().items() if record.keeps_zeros]


@pytest.mark.parametrize("name", KEEPING)
def test_a_result_of_zeros_is_0(name: str) -> None:
    record = load_all()[name]
    for sample in record.samples:
        sig = signature(record, sample)
        zeros = [np.zeros(t.shape, t.dtype.numpy) for t in sig.ins]
        (found,) = results(record, NumpyCall(sig.ins, sig.outs, sig.attrs), zeros)
        assert not np.any(found)
