"""One step of every operator subtracts the gradient: torch's, of its text or an oracle by hand.

Every sample, the dims of its operands in every order, on one device; and every dim split over two.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from meshdsl.backends.torch.emitter import emit
from meshdsl.ops.opdef import REGISTRY, TorchCall, lookup
from tests.training.oracles import ORACLES
from tests.training.registry import AGAIN, WAYS, Built, placed_on, programs_of, trained_operators
from tests.training.stepping import on_devices

OPERATORS = trained_operators()
POLICIES = ("deferred", "immediate", "mesh-tf")
MOST = 1e-9
ALL = "MESHDSL_CASES" in os.environ


def check(built: Built, mesh: str, rules: str, policy: str) -> None:
    """A step is right, and the same on every replica of a parameter."""
    assert built.program is not None
    emitted = emit(placed_on(built.program, mesh, rules, policy), {})
    inputs = {str(v.name): built.arrays[str(v.name)] for v in built.inputs}
    step = on_devices(emitted, inputs, built.arrays)
    for name, gradient in built.gradients.items():
        update = built.arrays[name] - step.run.updated[name]
        scale = max(float(np.max(np.abs(gradient))), 1e-6)
        error = float(np.max(np.abs(update - gradient))) / scale
        term = built.terms[int(name.partition("_")[0][1:])]
        assert error <= MOST, f"operand {name} of {term} is off by {error:.1e}\n{emitted.text}"


@pytest.mark.parametrize("name", OPERATORS)
def test_a_step_subtracts_the_gradient(name: str) -> None:
    for built in programs_of(name, most=6 if ALL else 2):
        check(built, "d:1", "", "deferred")


@pytest.mark.parametrize("name", OPERATORS if ALL else OPERATORS[1::2])
def test_a_step_of_split_operands_does(name: str) -> None:
    """Of every other operator: that each split of each is right, gradients too, `ops` proves."""
    number = OPERATORS.index(name)
    for built in programs_of(name, most=1, ways=WAYS[number % len(WAYS) :][:1]):
        for dim in built.even_dims[:: 1 if ALL else 2]:
            number += 1
            check(built, "d:2", f"{dim}:d", POLICIES[number % len(POLICIES)])


@pytest.mark.parametrize("name", OPERATORS if ALL else OPERATORS[::2])
def test_a_step_by_gradients_of_gradients_does(name: str) -> None:
    for built in programs_of(name, most=1, ways=(AGAIN,)):
        check(built, "d:1", "", "deferred")


def test_every_operator_with_a_gradient_is_there() -> None:
    assert set(ORACLES) <= set(OPERATORS)
    assert {"softmax", "softmax_grad", "einsum", "gather", "where"} <= set(OPERATORS)


def _as_if_contiguous(call: TorchCall) -> str:
    dy, y, at = call.tensor(0), call.tensor(1), call.ins[0].index(call.attrs["dim"].name)
    kernel = "torch.ops.aten._softmax_backward_data.out"
    return f"{kernel}({dy}, {y}, {at}, {call.outs[0].dtype.torch}, grad_input={dy})"


def test_a_planted_write_to_strided_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = replace(lookup("softmax_grad"), in_place={0: _as_if_contiguous})
    monkeypatch.setitem(REGISTRY, "softmax_grad", planted)
    with pytest.raises(AssertionError, match=r"of Term.*softmax.*is off by"):
        test_a_step_subtracts_the_gradient("softmax")


def test_a_planted_write_to_what_others_show_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table that is looked up by one number is a slice of it."""
    monkeypatch.setitem(REGISTRY, "gather", replace(lookup("gather"), shows=None))
    with pytest.raises(AssertionError, match=r"of Term.*gather.*is off by"):
        test_a_step_subtracts_the_gradient("gather")
