"""Digits in pipelines that update on the way: what is learned, and what is not."""

from __future__ import annotations

import os
from types import ModuleType

import pytest

import meshdsl as md
from tests.examples.scripts import script

ALL = "MESHDSL_CASES" in os.environ


@pytest.fixture
def digits() -> ModuleType:
    """The example as a module."""
    return script("digits_async")


def test_four_stages_learn_without_any_correction(digits: ModuleType) -> None:
    """Three seeds to the end with `MESHDSL_CASES`, else one of them a fifth as long."""
    seeds, epochs, least = (range(3), digits.EPOCHS, 0.97) if ALL else (range(1), 4, 0.78)
    accuracies = [digits.accuracy(digits.trained("ampnet", 4, n, epochs), 4) for n in seeds]
    assert sum(accuracies) / len(accuracies) >= least


def test_of_eight_stages_updates_come_too_late(digits: ModuleType) -> None:
    with pytest.raises(md.ProgramError, match="MD0720"):
        digits.trained("ampnet", 8)


def test_eight_stages_learn_with_corrections(digits: ModuleType) -> None:
    """Half as long as the example with `MESHDSL_CASES`, else a fifth: ten digits, not by luck."""
    epochs, least = (10, 0.93) if ALL else (4, 0.7)
    assert digits.accuracy(digits.trained("pipemare", 8, epochs=epochs), 8) >= least


@pytest.mark.parametrize("schedule", ["pipedream", "two_bw"])
def test_a_run_is_reproduced_bit_for_bit(digits: ModuleType, schedule: str) -> None:
    one, other = (digits.trained(schedule, 4, epochs=1).params for _ in range(2))
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
