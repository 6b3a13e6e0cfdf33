"""Comparing with the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshdsl.backends.verify import Comparison, compare_outputs, errors

NAN, INF = math.nan, math.inf
CASES = [
    ([1.0, 2.0], [1.0, 2.0], (0, 0)),
    ([1.0, 2.5], [1.0, 2.0], (0.5, 0.25)),
    ([0.0, 0.5], [0.0, 0.0], (0.5, INF)),
    ([NAN, 1.0], [NAN, 1.0], (0, 0)),
    ([INF, 1.0], [INF, 1.0], (0, 0)),
    ([-INF, 1.0], [INF, 1.0], (INF, INF)),
    ([NAN, 1.0], [1.0, 1.0], (INF, INF)),
    ([1.0, 1.0], [NAN, 1.0], (INF, INF)),
    ([], [], (0, 0)),
]


@pytest.mark.parametrize(("found", "expected", "answer"), CASES)
def test_floats(found, expected, answer):
    assert errors(np.array(found, np.float32), np.array(expected)) == answer


@pytest.mark.parametrize(
    ("found", "expected", "answer"),
    [
        (np.array([1, 2]), np.array([1, 2]), (0, 0)),
        (np.array([1, 2]), np.array([1, 4]), (2, 0.5)),
        (np.array([2**62 + 1]), np.array([2**62]), (1, 1 / 2**62)),
        (np.array([True, False]), np.array([True, True]), (1, 1)),
        (np.ones(3), np.ones(4), (INF, INF)),
    ],
)
def test_integers_truth_values_and_shapes(found, expected, answer):
    assert errors(found, expected) == answer


def test_an_output_is_fine_within_its_tolerance():
    outputs = {"y": np.array([1.0, 1.000005], np.float32), "n": np.array([3])}
    reference = {"y": np.array([1.0, 1.0]), "n": np.array([3])}
    y, n = compare_outputs(outputs, reference, {"y": 1e-5, "n": 0.0})
    assert y.ok
    assert n == Comparison("n", 0.0, 0.0, 0.0)
    assert not compare_outputs(outputs, reference, {"y": 1e-7, "n": 0.0})[0].ok
