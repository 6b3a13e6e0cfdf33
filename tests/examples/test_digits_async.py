"""Digits in pipelines that update on the way: what is learned, and what is not."""

from __future__ import annotations

from types import ModuleType

import pytest

import meshdsl as md
from tests.examples.scripts import script


@pytest.fixture
def digits() -> ModuleType:
    """The example as a module."""
    return script("digits_async")


@pytest.mark.parametrize(("schedule", "stages"), [("ampnet", 4), ("pipemare", 8)])
def test_digits_are_learned(digits: ModuleType, schedule: str, stages: int) -> None:
    """By four stages without any correction, by eight with corrections."""
    assert digits.accuracy(digits.trained(schedule, stages, epochs=10), stages) >= 0.93


def test_of_eight_stages_updates_come_too_late(digits: ModuleType) -> None:
    with pytest.raises(md.ProgramError, match="MD0720"):
        digits.trained("ampnet", 8)


@pytest.mark.parametrize("schedule", ["pipedream", "two_bw"])
def test_a_run_is_reproduced_bit_for_bit(digits: ModuleType, schedule: str) -> None:
    one, other = (digits.trained(schedule, 4, epochs=1).params for _ in range(2))
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
