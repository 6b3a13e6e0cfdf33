"""Fifty steps of a small language model under every layout: the losses of one device."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Array
from meshdsl.backends.train.job import DataFiles, Event, Job
from meshdsl.backends.train.local import Emitted, train_local
from tests.programs.harness import Case, compiled

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm.mdsl"
SIZES = {
    "batch": 4, "seq": 8, "model": 16, "heads": 2, "key": 4, "hidden": 16, "layers": 2,
}  # fmt: skip
STEPS = 50
LAYOUTS = {
    "data_parallel": "four", "zero1": "four", "zero2": "four", "zero3": "four",
    "megatron": "square", "megatron_zero3": "square", "vocabulary": "square", "sequence": "square",
    "pipeline": "pipe:2",
}  # fmt: skip
CLOSE = {"f32": 1e-4, "f64": 1e-9}
REDUCE = {("f32", "four"): "optimal", ("f32", "square"): "immediate"}


def losses(layout: str, mesh: str, dtype: str, text: Path) -> Array:
    """The loss before each step."""
    case = Case(
        EXAMPLE.read_text("utf-8"), mesh, layout, REDUCE.get((dtype, mesh), "deferred"), SIZES
    )
    emitted = Emitted(compiled(case, dtype).emitted)
    events: list[Event] = []
    job = Job(DataFiles(str(text), tokens="bytes"), STEPS, seed=1)
    train_local(emitted, job, events.append, lambda: False)
    return np.array([event["values"]["loss"] for event in events if event["kind"] == "step"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on: this project's own licence."""
    path = tmp_path_factory.mktemp("curves") / "text.txt"
    path.write_bytes((EXAMPLE.parents[1] / "LICENSE").read_bytes())
    return path


@functools.cache
def alone(dtype: str, text: Path) -> Array:
    """The losses of one device."""
    return losses("data_parallel", "data:1", dtype, text)


@pytest.mark.some_of(2)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_device(layout: str, dtype: str, text: Path) -> None:
    expected = alone(dtype, text)
    assert len(expected) == STEPS
    assert expected[-5:].mean() < expected[:5].mean() - 1
    found = losses(layout, LAYOUTS[layout], dtype, text)
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE[dtype])
