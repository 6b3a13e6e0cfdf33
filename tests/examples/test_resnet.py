"""A residual network with batch normalisation: it learns digits, under every layout."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from tests.examples.scripts import script
from tests.project import ROOT

SMALL = {"batch": 6, "c": 4, "c2": 4}


def test_digits_are_learned() -> None:
    assert script("resnet").learned("data_parallel") >= 0.97


@pytest.mark.parametrize("layout", ["data_parallel", "rows_of_images", "two_d"])
def test_an_image_is_classified_alone(layout: str) -> None:
    """By the averages: the others in its batch change nothing, and the plan keeps its states."""
    program = md.load(ROOT / "examples" / "resnet.mdsl", program="classify", dims=SMALL)
    plan = program.compile(layout=layout)
    before = {name: np.array(array) for name, array in plan.params.items()}
    images = np.random.default_rng(0).normal(size=(6, 8, 8)).astype(np.float32)
    found = plan(images=images).digit
    images[1:] *= 3
    assert plan(images=images).digit[0] == found[0]
    np.testing.assert_array_equal(plan(images=images).digit, plan.reference(images=images).digit)
    for name, array in plan.params.items():
        np.testing.assert_array_equal(array, before[name])
