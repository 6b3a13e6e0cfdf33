"""Real input: digits learned, and scikit-learn's weights under every layout of `digits.mdsl`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_predictions_are_scikit_learns_under_every_layout(digits, tmp_path):
    expected, truth = digits.fit(tmp_path)
    assert len(digits.LAYOUTS) == 4
    for layout in digits.LAYOUTS:
        found = digits.classify(tmp_path, layout)
        np.testing.assert_array_equal(found, expected, err_msg=layout)
        assert (found == truth).mean() >= 0.95


@pytest.mark.parametrize("layout", ["data_parallel", "two_d"])
def test_digits_are_learned(digits, layout):
    assert digits.train(layout) >= 0.96
