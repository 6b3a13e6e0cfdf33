"""Digits in pipelines that update on the way: what is learned, and what is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshdsl as md

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_async.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits_async", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_four_stages_learn_without_any_correction(digits: ModuleType) -> None:
    accuracies = [digits.accuracy(digits.trained("ampnet", 4, seed), 4) for seed in range(3)]
    assert sum(accuracies) / len(accuracies) >= 0.97


def test_of_eight_stages_updates_come_too_late(digits: ModuleType) -> None:
    with pytest.raises(md.ProgramError, match="MD0720"):
        digits.trained("ampnet", 8)


def test_eight_stages_learn_with_corrections(digits: ModuleType) -> None:
    assert digits.accuracy(digits.trained("pipemare", 8), 8) >= 0.93


@pytest.mark.parametrize("schedule", ["pipedream", "two_bw"])
def test_a_run_is_reproduced_bit_for_bit(digits: ModuleType, schedule: str) -> None:
    one, other = (digits.trained(schedule, 4, epochs=1).params for _ in range(2))
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
