"""Bytes that gradients cost: no more than the least that is known, counted where they run.

The programs and the figures of other systems are in `benchmarks/gradients.py`.
"""

from __future__ import annotations

import pytest

from benchmarks.bytes import Known, measure
from benchmarks.gradients import GRADIENTS, LAYOUTS, TWO_LAYERS, TwoLayers
from meshdsl.device.ir import DeviceProgram
from meshdsl.report.explanation import explain
from tests.programs.harness import Case, compiled, counts, explained


@pytest.mark.parametrize("known", GRADIENTS, ids=lambda k: k.name)
def test_gradients_send_no_more_than_the_least_known(known: Known) -> None:
    ours = measure(known.text, layout=known.layout)
    assert ours.counted == ours.predicted <= known.least
    assert ours.proven


@pytest.mark.parametrize("reduce", ["deferred", "optimal"])
def test_micro_batches_are_reduced_once(reduce: str) -> None:
    report = explained(Case(GRADIENTS[-1].text, "four", "data_parallel", reduce))
    assert report["totals"]["wire_bytes"] == GRADIENTS[-1].least
    assert max(c["count"] for c in report["collectives"]) == 1


# --- the formula for two layers ---------------------------------------------------------------


@pytest.mark.parametrize("known", LAYOUTS, ids=lambda k: f"{k.mesh} {k.rules}")
def test_two_layers_reduce_as_many_elements_as_the_formula_says(known: TwoLayers) -> None:
    made = compiled(Case(TWO_LAYERS, known.mesh, known.rules or "{ }", "immediate"))
    report = explain(made.device)
    assert set(counts(report)) <= {"all_reduce"}
    payload = sum(c["payload_bytes"] * c["count"] for c in report["collectives"])
    assert payload // 4 == known.formula == known.reduced
    program: DeviceProgram = made.device
    held = {v.value.name: v.local.elements for v in (*program.inputs, *program.params)}
    hidden = next(t for t in report["tensors"] if t["name"] == "h")
    rows, columns = hidden["local_shape"]
    assert held["x"] + held["w"] + rows * columns == known.held
