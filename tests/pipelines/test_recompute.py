"""`recompute=stage`: the same numbers, with what a stage received of a micro-batch kept alone."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from benchmarks.training_memory import allocated
from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import DiagnosticError
from meshdsl.pipeline import Compilation
from meshdsl.report.explanation import explain
from meshdsl.report.pipeline_facts import pipeline_sentence
from tests.covering import in_turn, some
from tests.device.alone import first_device
from tests.pipelines.test_programs import (
    BY_ROWS,
    MESHES,
    OPTIMIZERS,
    PRINTED,
    PROGRAMS,
    compiled,
    hold_bytes,
    hold_text,
    results,
)

USES = (
    ("pipe:2", "gpipe[b](4)"), ("pipe:2", "zb_h1[b](4)"), ("pipe:2", "interleaved[b](4)"),
    ("pipe:2", "chimera[b](4)"), ("pipe:4", "chimera[b](8)"), ("pipe:4", "zb_h2[b](8)"),
    ("pipe:4", "one_f_one_b[b](2)"), ("pipe:4", "gpipe[b](4)"), ("d:2,pipe:2", "zb_v[b](2)"),
    ("d:2,pipe:2", "one_f_one_b[b](4)"), ("d:2,pipe:2,tp:2", "zb_v[b](4)"),
    ("d:2,pipe:2,tp:2", "gpipe[b](2)"),
)  # fmt: skip


def again(schedule: str) -> str:
    """A schedule with its stages computed twice."""
    return f"with {schedule[:-1]}, recompute=stage)"


@in_turn(
    name=some(name for name in PROGRAMS if name not in BY_ROWS), use=USES, optimizer=OPTIMIZERS
)
def test_the_numbers_are_the_same_bits(name: str, use: tuple[str, str], optimizer: str) -> None:
    mesh, schedule = use
    text = PROGRAMS[name].replace("OPT", optimizer)
    kept = results(run_local(compiled(text, mesh, MESHES[mesh], f"with {schedule}").text, seed=4))
    made = compiled(text, mesh, MESHES[mesh], again(schedule))
    run = run_local(made.text, seed=4)
    for key, array in results(run).items():
        np.testing.assert_array_equal(array, kept[key], key)
    assert not run.disagreements()
    hold_bytes(run, made)
    if PRINTED == 1:
        hold_text(made)


@pytest.mark.parametrize("name", some(PROGRAMS))
def test_what_was_received_is_all_that_is_kept(name: str) -> None:
    text = PROGRAMS[name].replace("OPT", "sgd(lr=0.1)")
    made = compiled(text, "pipe:2", "l -> pipe", again("gpipe[b](4)"))
    (kept,) = re.findall(r"^ *kept\[micro\] = (.*)$", made.text, re.M)
    received = re.findall(
        r"(\w+) = \w+\.receive\(micro, pipe\)", made.text.split("def backward")[0]
    )
    assert set(kept.strip("()").removesuffix(",").split(", ")) <= set(received)


WIDE = """
dim b = 64, m = 256, h = 1024, l = 8, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, h]
    param v[h, o]
    x = x + einsum(tanh(einsum(x, w -> [b, h])), v -> [b, o])[o -> m]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
CLOSE = 0.05


@functools.cache
def wide(use: str) -> Compilation:
    """The wide program in two stages, compiled once for all tests."""
    return compiled(WIDE, "pipe:2", "l -> pipe", use)


ONCE = [
    f"with {use}" for use in ("gpipe[b](8)", "interleaved[b](8)", "zb_v[b](4)", "chimera[b](8)")
]
TWICE = [again(use) for use in ("gpipe[b](8)", "interleaved[b](8)", "chimera[b](4)", "zb_h1[b](8)")]


@pytest.mark.parametrize("use", some(ONCE) + some(TWICE))
def test_the_memory_that_is_reported_is_what_torch_allocates(use: str) -> None:
    made = wide(use)
    peak, *_ = explain(made.device)["pipeline"]["peak"]
    held, run = first_device(made)
    assert held + allocated(run) == pytest.approx(peak, rel=CLOSE)


def test_a_micro_batch_takes_the_memory_of_what_was_received() -> None:
    """The first stage shows its inputs, the second one has what was sent to it."""
    received = 8 * 256 * 4
    peaks = {}
    for micro in (4, 8):
        text = WIDE.replace("b = 64", f"b = {8 * micro}")
        made = compiled(text, "pipe:2", "l -> pipe", again(f"gpipe[b]({micro})"))
        report = explain(made.device)
        inputs = report["memory"]["inputs"]
        peaks[micro] = np.array(report["pipeline"]["peak"]) - inputs
    assert (peaks[8] - peaks[4]).tolist() == [0, 4 * received]


REFUSED = {
    "recompute=layers": "MD0533",
    "recompute=": "MD0001",
}


@pytest.mark.parametrize("option", REFUSED)
def test_other_values_are_refused(option: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        wide(f"with gpipe[b](8, {option})").checked()
    assert {d.code for d in caught.value.diagnostics} == {REFUSED[option]}


def test_the_report_says_so() -> None:
    once, twice = (sentence(wide(use)) for use in (ONCE[0], TWICE[0]))
    assert "8 micro-batches; 11/107 (" in once
    assert "8 micro-batches, recomputed for their backward passes; 11/107 (" in twice


def sentence(made: Compilation) -> str:
    return pipeline_sentence(explain(made.device)["pipeline"], predicted=False)
