"""Every collective that is counted has a place in the source, whatever pass it belongs to."""

from __future__ import annotations

import functools

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.torch.passes import FUNCTIONS
from meshdsl.device.ir import Pipeline
from meshdsl.pipeline import Compilation
from meshdsl.schedule.registry import schedules
from tests.pipelines.test_programs import compiled

PROGRAM = """
dim b = 8, m = 4, n = 4, l = 4
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, n]
    x = tanh(einsum(x, w -> [b, n])[n -> m])
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with momentum(lr=0.1)
}
"""


@functools.cache
def on_stages(schedule: str) -> Compilation:
    """A step on two stages of two devices each."""
    return compiled(PROGRAM, "d:2,pipe:2", "b -> d, l -> pipe", f"with {schedule}[b](4)")


@pytest.mark.parametrize("schedule", schedules())
def test_a_collective_has_its_place_in_the_source(schedule: str) -> None:
    emitted = on_stages(schedule).emitted
    run = run_local(emitted.text, seed=4, lines=emitted.places)
    lines = {sent.line for sent in run.sent[0]}
    assert lines
    assert lines <= emitted.places.keys()


def test_every_pass_of_every_schedule_has_its_function() -> None:
    """The emitter's names are those of the actions, and the only list of them."""
    actions = set[str]()
    for schedule in schedules():
        (pipe,) = (n for n in on_stages(schedule).device.body if isinstance(n, Pipeline))
        actions |= pipe.passes.keys()
    assert actions == FUNCTIONS.keys()
