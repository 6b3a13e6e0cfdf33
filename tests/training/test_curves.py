"""Training a small language model: it learns, and under every layout by the same losses."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.runtime.values import Array
from meshdsl.backends.train.devices import train_local
from meshdsl.backends.train.job import DataFiles, Event, Job
from meshdsl.placed.place import POLICIES
from tests.covering import in_turn
from tests.programs.harness import Case, compiled

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm.mdsl"
SIZES = {
    "batch": 4, "seq": 8, "model": 16, "heads": 2, "key": 4, "hidden": 16, "layers": 2,
}  # fmt: skip
LAYOUTS = {
    "data_parallel": "four", "zero1": "four", "zero2": "four", "zero3": "four",
    "megatron": "square", "megatron_zero3": "square", "vocabulary": "square", "sequence": "square",
    "pipeline": "pipe:2",
}  # fmt: skip
CLOSE = {"f32": 1e-4, "f64": 1e-9}


def losses(layout: str, mesh: str, policy: str, dtype: str, text: Path, steps: int) -> Array:
    """The loss before each step."""
    case = Case(EXAMPLE.read_text("utf-8"), mesh, layout, policy, SIZES)
    emitted = Emitted(compiled(case, dtype).emitted)
    events: list[Event] = []
    job = Job(DataFiles(str(text), tokens="bytes"), steps, seed=1)
    train_local(emitted, job, events.append, lambda: False)
    return np.array([event["values"]["loss"] for event in events if event["kind"] == "step"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on: this project's own licence."""
    path = tmp_path_factory.mktemp("curves") / "text.txt"
    path.write_bytes((EXAMPLE.parents[1] / "LICENSE").read_bytes())
    return path


@functools.cache
def alone(dtype: str, text: Path, steps: int) -> Array:
    """The losses of one device."""
    return losses("data_parallel", "data:1", "deferred", dtype, text, steps)


@in_turn(layout=LAYOUTS, policy=POLICIES)
def test_five_losses_are_those_of_one_device(layout: str, policy: str, text: Path) -> None:
    found = losses(layout, LAYOUTS[layout], policy, "f64", text, 5)
    np.testing.assert_allclose(found, alone("f64", text, 5), rtol=0, atol=CLOSE["f64"])


def test_it_learns_in_fifty_steps(text: Path) -> None:
    """In f32 on four devices as on one."""
    found = losses("megatron_zero3", "square", "optimal", "f32", text, 50)
    assert found[-5:].mean() < found[:5].mean() - 1
    np.testing.assert_allclose(found, alone("f32", text, 50), rtol=0, atol=CLOSE["f32"])
