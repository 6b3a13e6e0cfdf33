"""The size of what cancels: of sums and products known by hand, and of what does not round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.reference import evaluated
from meshdsl.backends.engines.sensitivity import RUNS, Sensitivity, roundoff
from tests.compiling import named

DIMS = "dim n = 6, m = 4, one = 1\n"


def sizes(body: str, tolerance: float = 1e-5, **inputs: Any) -> tuple[Any, Any]:
    """The size of output `y`, and its exact value, of statements on x[n], z[n] and p[m, n]."""
    head = "program t(x[n], z[n], p[m, n]) {\n"
    lines = "".join(f"  {line.strip()}\n" for line in body.split("\n"))
    program = named(f"{DIMS}{head}{lines}  return y\n}}\n", mesh="d:1")
    rng = np.random.default_rng(0)
    given = {v.label: rng.normal(size=v.type.shape) for v in program.inputs}
    given |= {name: np.array(array, float) for name, array in inputs.items()}
    values = evaluated(program, given, {}, {})
    found = Sensitivity(program, given, {}, {}, values, tolerance)
    for _ in range(RUNS):
        found.grow()
    return found.outputs["y"], values[program.outputs[0].value]


THIRDS = np.array([1, 2, 4, 5, 7, 8]) / 3

KNOWN: dict[str, tuple[str, dict[str, Any], float]] = {
    "a sum of what cancels": ("y = sum(x)", {"x": [1e3 / 3, -1e3 / 3, 0, 0, 0, 0]}, 1e3 / 3),
    "a difference": ("y = max(x * z - z * x + x * 1.0)", {"x": [0.0] * 6}, 0.0),
    "centred and summed": ("y = sum(x - mean(x))", {"x": 1e2 * THIRDS}, 3e2),
    "centred, scaled and summed": ("y = sum(0.01 * (x - mean(x)))", {"x": 1e2 * THIRDS}, 3.0),
    "a product": ("y = sum(x - mean(x)) * 100.0", {"x": THIRDS}, 300.0),
    "an einsum": ("y = einsum(x, z -> [])", {"x": [1 / 3] * 6, "z": [7, -7, 7, -7, 7, -7]}, 7 / 3),
    "nothing cancels": ("y = sum(x)", {"x": THIRDS}, 9.0),
    "within a composite": (
        "t = x[n = 0:1 -> one]\ny = grad(sum(rms_norm[one](t)), x)[n = 0]",
        {"x": [3.0] * 6},
        0.3,
    ),
    "through a function": ("y = sin(sum(x - mean(x)))", {"x": THIRDS}, 3.0),
    "a softmax of large logits": (
        "y = max(softmax[n](x))",
        {"x": [1e3 / 3, 1e3 / 3 - 1, 0, 0, 0, 0]},
        1e2,
    ),
}
"""Statements, values, and about what the size is: within a factor of 10 of it."""


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_are_those_of_the_terms(name: str) -> None:
    body, inputs, about = KNOWN[name]
    size, _ = sizes(body, **inputs)
    assert about / 10 <= float(size) <= about * 10


EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "the largest of what is given": ("y = where(x == max(x), 1.0, 0.0)", {}),
    "what is above 0": ("y = where(relu(x) == x, 1.0, 0.0)", {}),
    "ties": ("y = argmax[n](x)", {"x": [1 / 3] * 6}),
    "where two are equal": ("y = where(x / 3.0 >= x / 3.0, 1.0, 2.0)", {"x": THIRDS}),
    "the largest": ("s = x / 7.0\ny = where(s == max(s), 1.0, 0.0)", {"x": THIRDS}),
    "a constant": ("y = x * 0.0", {"x": THIRDS}),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_is_compared_stays_as_it_is(name: str) -> None:
    """A choice that turned would have a size of about 1 / roundoff."""
    body, inputs = EXACT[name]
    size, exact = sizes(body, **inputs)
    assert (np.asarray(size) <= 4 * np.abs(exact)).all()


@pytest.mark.parametrize("tolerance", [1e-12, 1e-5, 4e-3, 3e-2])
def test_a_roundoff_is_an_eighth_of_the_tolerance(tolerance: float) -> None:
    assert tolerance / 8 <= roundoff(tolerance) < tolerance / 4


def test_sizes_are_the_same_every_time_and_only_grow() -> None:
    program = named(f"{DIMS}program t(x[n]) {{\n  return sum(x - mean(x)), x / 3.0\n}}\n")
    given = {"x": THIRDS}
    values = evaluated(program, given, {}, {})
    both = [Sensitivity(program, given, {}, {}, values, 1e-5) for _ in range(2)]
    last = {name: np.zeros(()) for name in both[0].outputs}
    for _ in range(3):
        for each in both:
            each.grow()
        for name, size in both[0].outputs.items():
            np.testing.assert_array_equal(size, both[1].outputs[name])
            assert (size >= last[name]).all()
        last = dict(both[0].outputs)


def test_infinities_have_no_size() -> None:
    size, exact = sizes("y = x / z", x=[1, 2, 3, 4, 5, 0], z=[0.0] * 6)
    assert not np.isfinite(exact).any()
    assert not size.any()
