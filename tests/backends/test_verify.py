"""Comparing with the reference: outputs, and what a step updates."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from meshdsl.backends.engines.against_reference import Reference, TensorComparison, errors, problems
from meshdsl.backends.engines.execution import InputSource, reference_of, run, verify
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import Array
from meshdsl.ops.opdef import REGISTRY, TorchCall, lookup
from tests.backends.conftest import Emit
from tests.compiling import compile_text

NAN, INF = math.nan, math.inf
Dict = dict[str, Array]
CASES = [
    ([1.0, 2.0], [1.0, 2.0], (0, 0)),
    ([1.0, 2.5], [1.0, 2.0], (0.5, 0.25)),
    ([0.0, 0.5], [0.0, 0.0], (0.5, INF)),
    ([NAN, 1.0], [NAN, 1.0], (0, 0)),
    ([INF, 1.0], [INF, 1.0], (0, 0)),
    ([-INF, 1.0], [INF, 1.0], (INF, INF)),
    ([NAN, 1.0], [1.0, 1.0], (INF, INF)),
    ([1.0, 1.0], [NAN, 1.0], (INF, INF)),
    ([], [], (0, 0)),
]


@pytest.mark.parametrize(("found", "expected", "answer"), CASES)
def test_floats(found, expected, answer):
    assert errors(np.array(found, np.float32), np.array(expected)) == answer


@pytest.mark.parametrize(
    ("found", "expected", "answer"),
    [
        (np.array([1, 2]), np.array([1, 2]), (0, 0)),
        (np.array([1, 2]), np.array([1, 4]), (2, 0.5)),
        (np.array([2**62 + 1]), np.array([2**62]), (1, 1 / 2**62)),
        (np.array([True, False]), np.array([True, True]), (1, 1)),
        (np.ones(3), np.ones(4), (INF, INF)),
    ],
)
def test_integers_truth_values_and_shapes(found, expected, answer):
    assert errors(found, expected) == answer


STEPS = [
    ([4.0, 8.5], [4.0, 8.0], [4.0, 7.0], 0.0, None, (0.5, 0.5)),
    ([4.0, 8.5], [4.0, 8.0], [4.0, 7.0], 1 / 32, None, (0.5, 0.25)),
    ([4.0, 8.5], [4.0, 8.0], [4.0, 7.0], 1 / 16, None, (0.5, 0.0)),
    ([4.0, 8.5], [4.0, 8.0], [4.0, 8.0], 0.0, None, (0.5, INF)),
    ([4.0, 8.5], [4.0, 8.0], [4.0, 7.0], 0.0, [9.0, 0.0], (0.5, 0.5)),
    ([4.0, 8.5], [4.0, 8.0], [4.0, 7.0], 0.0, [0.0, 5.0], (0.5, 0.1)),
]


@pytest.mark.parametrize(("found", "expected", "before", "slack", "sizes", "answer"), STEPS)
def test_steps_are_measured_by_what_changes_and_what_cancels(
    found, expected, before, slack, sizes, answer
):
    sizes = None if sizes is None else np.array(sizes)
    found, expected, before = (np.array(a) for a in (found, expected, before))
    assert errors(found, expected, before, slack, sizes) == answer


# --- programs -----------------------------------------------------------------------------------

TEXT = """
dim b = 4, s = 4, m = s, h = 2, k = 2, d = 4
layout split { b -> x, params: d -> x }
program attention(x[b, s, d]) {
  param wq[d, h, k]
  param wk[d, h, k]
  param wv[d, h, k]
  q = einsum(x, wq -> [b, s, h, k])
  kk = einsum(x, wk -> [b, s, h, k])[s -> m]
  v = einsum(x, wv -> [b, s, h, k])[s -> m]
  a = softmax[m](einsum(q, kk -> [b, s, h, m]))
  o = einsum(a, v -> [b, s, h, k])
  loss = mean(o^2)
  return loss
  minimize loss with OPTIMIZER
}
"""
OPTIMIZERS = (
    "sgd(lr=1e-4)",
    "adam(lr=1e-3)",
    "momentum(lr=0.1)",
    "adafactor(lr=0.01)",
    "adamw(lr=0.01, accumulate=2, clip=0.1)",
    'adamw(lr=0.01, compute="bf16")',
)


def checked(text: str, **options: str) -> tuple[TensorComparison, ...]:
    made = compile_text(text, None, **options)
    found = run(made, "local", InputSource())
    assert not found.disagreements
    return verify(made, InputSource(), found.outputs, found.updated)


@pytest.mark.parametrize("mesh", ["x:1", "x:2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_verify(optimizer: str, mesh: str) -> None:
    found = checked(TEXT.replace("OPTIMIZER", optimizer), mesh=mesh, reduce="deferred")
    assert {c.role for c in found} == {"output", "param", "state"}
    assert {"wq", "wk", "wv", "step", "loss"} <= {c.name for c in found}
    assert all(c.ok for c in found), found


def _as_if_contiguous(call: TorchCall) -> str:
    """Writes to the memory of the cotangent as if it were contiguous."""
    dy, y, at = call.tensor(0), call.tensor(1), call.ins[0].index(call.attrs["dim"].name)
    kernel = "torch.ops.aten._softmax_backward_data.out"
    return f"{kernel}({dy}, {y}, {at}, {call.outs[0].dtype.torch}, grad_input={dy})"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax whose gradient is written over a cotangent whatever its strides are."""
    wrong = replace(lookup("softmax_grad"), in_place={0: _as_if_contiguous})
    monkeypatch.setitem(REGISTRY, "softmax_grad", wrong)


@pytest.mark.parametrize("mesh", ["x:1", "x:2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:-1])
@pytest.mark.usefixtures("planted")
def test_a_wrong_gradient_in_place_fails(optimizer: str, mesh: str) -> None:
    """The loss is right, and the parameters are nearly: a small step in a wrong direction.

    The softmax is returned, and therefore an operator of its own.
    """
    text = TEXT.replace("return loss", "return loss, a").replace("OPTIMIZER", optimizer)
    found = {c.name: c for c in checked(text, mesh=mesh, reduce="deferred")}
    assert found["loss"].ok
    wrong = {name.partition(".")[0] for name, c in found.items() if not c.ok}
    assert {"wq", "wk"} <= wrong
    said = [d.message for d in problems(found.values()) if d.code == "MD0708"]
    assert any(re.match(r"`wq(\.\w+)?` after the step differs by ", text) for text in said)


def test_a_wrong_step_counter_fails() -> None:
    made = compile_text(TEXT.replace("OPTIMIZER", "sgd(lr=1e-4)"), mesh="x:1")
    found = run(made, "local", InputSource())
    updated = {**found.updated, "step": np.array(2, np.int32)}
    wrong = [c.name for c in verify(made, InputSource(), found.outputs, updated) if not c.ok]
    assert wrong == ["step"]


# --- what cancels -------------------------------------------------------------------------------

NORM = """
dim b = 8, c = 4, d = 4
layout split { b -> x }
program norm(x[b, d]) {
  param w[d, c]
  param bias[c]
  z = einsum(x, w -> [b, c]) + bias
  z = z - mean[b](z)
  n = z * rsqrt(mean[b](square(z)) + 1e-5)
  loss = mean(n * n * n)
  d_bias, d_z = grad(loss, bias, x)
  return loss, d_bias, d_z
  minimize loss with OPTIMIZER
}
"""


@pytest.mark.parametrize("mesh", ["x:1", "x:4"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_cancels_to_nothing_verifies(optimizer: str, mesh: str) -> None:
    found = checked(NORM.replace("OPTIMIZER", optimizer), mesh=mesh, reduce="deferred")
    assert all(c.ok for c in found), found


def normalised(optimizer: str = "sgd(lr=1.0)") -> tuple[Reference, Dict, Dict]:
    made = compile_text(NORM.replace("OPTIMIZER", optimizer), mesh="x:1")
    found = run(made, "local", InputSource())
    return reference_of(made, InputSource()), dict(found.outputs), dict(found.updated)


@pytest.mark.parametrize("off", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("element", range(4))
def test_what_should_cancel_and_does_not_fails(off: float, element: int) -> None:
    """Terms of about 1 leave 0 up to some 1e-7."""
    reference, outputs, updated = normalised()
    assert np.max(np.abs(reference.answer[0]["d_bias"])) < 1e-15
    assert all(c.ok for c in reference.compare(outputs, updated))
    wrong = outputs["d_bias"].copy()
    wrong[element] += off
    found = reference.compare(outputs | {"d_bias": wrong}, updated)
    assert [c.name for c in found if not c.ok] == ["d_bias"]
    moved = updated["bias"].copy()
    moved[element] -= off
    found = reference.compare(outputs, updated | {"bias": moved})
    assert [(c.name, c.role) for c in found if not c.ok] == [("bias", "param")]


def test_a_wrong_gradient_that_should_cancel_is_seen_in_the_states_of_adam() -> None:
    """Its first step has a size of 1, whatever the gradient is; the means tell."""
    reference, outputs, updated = normalised("adam(lr=0.01)")
    wrong = updated | {"bias.m": updated["bias.m"] + np.float32(1e-3)}
    found = reference.compare(outputs, wrong)
    assert [c.name for c in found if not c.ok] == ["bias.m"]


def test_what_is_not_finite_is_never_excused() -> None:
    reference, outputs, updated = normalised()
    wrong = np.full_like(outputs["d_bias"], NAN)
    found = reference.compare(outputs | {"d_bias": wrong}, updated)
    assert [c.error for c in found if not c.ok] == [INF]


def test_an_output_is_fine_within_its_tolerance() -> None:
    near, far = (
        TensorComparison("y", 1e-6, 1e-6, 1e-5),
        TensorComparison("y", 0.5, 0.5, 1e-5, "param"),
    )
    assert near.ok
    assert not far.ok
    (told,) = problems((near, far), " of column B")
    assert told.message == "`y` after the step of column B differs by 5.0e-01 of the maximum"
    assert told.help == "allowed is 1e-05"


def test_devices_that_update_one_parameter_differently_are_told(emit: Emit) -> None:
    body = """
    params["w"] = params["w"] + (rank == 2)
    states["step"] = states["step"] + 1
    return {"y": params["w"].sum() * 0}
    """
    tables = {
        "params": "{'w': Spec('f32', {'k': 4}, {}, ('zeros',))}",
        "outputs": "{'y': Spec('f32', {}, {})}",
    }
    text = emit(body, {"r": 3}, **tables).replace("inputs, params):", "inputs, params, states):")
    text = text.replace("PARAMS =", "STATES = {'step': 'i32[] = zeros()'}\nPARAMS =")
    found = run_local(text)
    assert found.disagreements() == ["device 2 holds other values of w after the step"]
    assert found.updated["step"] == 1
