"""Gradients of whole programs: torch's own, finite differences, and the same under every layout."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.reference import reference_step
from meshdsl.placed.place import POLICIES
from tests.covering import some
from tests.programs.harness import Case
from tests.programs.test_seeds import said
from tests.project import matching
from tests.training.programs import PROGRAMS
from tests.training.stepping import Arrays, autograd, check_step, values, whole


def policies(number: int) -> tuple[str, ...]:
    """One for each layout, in turns; with `MESHDSL_CASES` all of them."""
    return POLICIES if "MESHDSL_CASES" in os.environ else (POLICIES[number % len(POLICIES)],)


CASES = [
    pytest.param(name, layout, policy, id=f"{name}-{layout}-{policy}")
    for turn, (name, program) in enumerate(PROGRAMS.items())
    for number, layout in enumerate(program.layouts)
    for policy in policies(turn + number)
]


def gradients(text: str, inputs: Arrays, params: Arrays) -> Arrays:
    """The gradients of all parameters as the reference computes them: what a step subtracts."""
    named = whole(text).named
    _, updated = reference_step(named, inputs, params, {})
    return {name: array - updated[name] for name, array in params.items() if name in updated}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_torch(name: str) -> None:
    if PROGRAMS[name].overwrites:
        pytest.skip("its gradients of gradients overwrite what torch would read again")
    text = PROGRAMS[name].text
    inputs, params = values(whole(text).named)
    found, expected = gradients(text, inputs, params), autograd(text, inputs, params)
    assert set(found) == set(expected) == set(params)
    for param, array in expected.items():
        most = 1e-9 * max(float(np.abs(array).max()), 1e-6)
        np.testing.assert_allclose(found[param], array, rtol=0, atol=most, err_msg=param)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_finite_differences(name: str) -> None:
    """Along one random direction of all parameters at once."""
    if name == "stop_gradient":
        pytest.skip("it is not the gradient of what is computed: that is its purpose")
    text = PROGRAMS[name].text
    named = whole(text).named
    inputs, params = values(named)
    rng = np.random.default_rng(1)
    along = {n: rng.standard_normal(a.shape) for n, a in params.items()}
    step = 1e-6

    def loss(sign: int) -> float:
        moved = {n: a + sign * step * along[n] for n, a in params.items()}
        return float(reference_step(named, inputs, moved, {})[0]["loss"])

    found = gradients(text, inputs, params)
    slope = sum(float(np.sum(found[n] * along[n])) for n in params)
    assert slope == pytest.approx((loss(1) - loss(-1)) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("name", "layout", "policy"), some(CASES))
def test_every_layout_gives_the_gradients_of_one_device(
    name: str, layout: str, policy: str
) -> None:
    mesh, _, rules = layout.partition(" ")
    check_step(Case(PROGRAMS[name].text, mesh, rules, policy))


@pytest.mark.parametrize("path", matching("tests/training/seeds/*.mdsl"), ids=lambda p: p.stem)
def test_seed(path: Path) -> None:
    """Programs that were once trained wrongly."""
    text = path.read_text()
    mesh, layout, reduce = (said(text, key) or "" for key in ("mesh", "layout", "reduce"))
    check_step(Case(text, mesh, layout, reduce))
