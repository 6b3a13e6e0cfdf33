"""Two blocks of a reduction combined, for every operator and kind of number, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshdsl.backends.runtime.uneven import combined

OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
VALUES = {
    "bool": [False, True],
    "int64": [-3, 0, 2],
    "float32": [-1.5, 0.0, 2.0, np.inf, np.nan],
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("op", OPS)
def test_every_pair_of_values(op: str, dtype: str) -> None:
    x, y = np.meshgrid(*[np.array(VALUES[dtype], dtype)] * 2)
    found = combined(torch.from_numpy(x.copy()), torch.from_numpy(y.copy()), op)
    np.testing.assert_array_equal(found.numpy(), OPS[op](x, y))
