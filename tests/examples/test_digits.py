"""Real input: digits learned, and scikit-learn's weights under every layout of `digits.mdsl`."""

from __future__ import annotations

import numpy as np
import pytest

import meshdsl as md
from tests.examples.scripts import script


@pytest.fixture
def digits():
    """The example as a module."""
    return script("digits")


def test_predictions_are_scikit_learns_under_every_layout(digits, tmp_path):
    expected, truth = digits.fit(tmp_path)
    assert len(digits.LAYOUTS) == 4
    for layout in digits.LAYOUTS:
        found = digits.classify(tmp_path, layout)
        np.testing.assert_array_equal(found, expected, err_msg=layout)
        assert (found == truth).mean() >= 0.95


def test_digits_are_learned(digits):
    """Under one layout: under the others steps have the same numbers (`test_default_policy.py`)."""
    assert digits.train("two_d") >= 0.96


@pytest.fixture
def accuracy(digits, tmp_path_factory):
    """The part of the held-out images that is classified rightly after 400 steps of momentum."""
    known, held_out, answers, truth = digits.images_and_digits()
    text = digits.PROGRAM.read_text("utf-8").partition("# A training step")[0]
    old = "adamw(lr=cosine(0.01, 400), weight_decay=1.0)"
    assert old in text

    def trained(compress: str) -> float:
        path = tmp_path_factory.mktemp("digits") / "digits.mdsl"
        path.write_text(text.replace(old, f"momentum(lr=0.02{compress})"), "utf-8")
        plan = md.load(path).compile("d:2", layout="data_parallel")
        plan.train({"images": known, "labels": answers}, digits.STEPS)
        program = md.load(path, dims={"batch": digits.HELD_OUT})
        classifier = program.compile("d:2", layout="data_parallel")
        classifier.params = plan.params
        return float((classifier(images=held_out, labels=truth).digit == truth).mean())

    return trained


def test_digits_are_learned_from_compressed_gradients(accuracy):
    """Within a hundredth of what is learned from whole ones, of a hundredth of each gradient.

    The steps of every compression are those of its oracle (`training/test_workers.py` and
    `test_powersgd.py`).
    """
    whole = accuracy("")
    assert accuracy(", compress=topk(0.01)") >= whole - 0.01
    assert whole >= 0.95
