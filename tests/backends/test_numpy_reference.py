"""The reference engine against numpy written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.against_reference import tolerances_of
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.reference import made_up, run_reference, whole_specs
from meshdsl.backends.runtime.values import cast, draw_part
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import build_named, front

DIMS = "dim a = 3, b = 4, c = 5, layers = 3\n"


def named(text):
    diagnostics = Diagnostics()
    return build_named(
        front(Source("t.mdsl", DIMS + text), {}, diagnostics), None, None, diagnostics
    )


def run(text, seed=0, **arrays):
    """Outputs of the program, and all arrays it was given."""
    program = named(text)
    inputs, params = whole_specs(program, draws(program))
    given = made_up(inputs, {n: a for n, a in arrays.items() if n in inputs}, seed)
    learned = made_up(params, {n: a for n, a in arrays.items() if n in params}, seed)
    return run_reference(program, given, learned), given | learned


def test_floats_are_computed_in_float64():
    found, given = run(
        "program p(x[a, b]) {\n param w[b, c]\n y = exp(einsum(x, w -> [a, c]))\n return y\n}"
    )
    assert given["x"].dtype == given["w"].dtype == np.float32
    expected = np.exp(given["x"].astype(np.float64) @ given["w"].astype(np.float64))
    assert found["y"].dtype == np.float64
    np.testing.assert_allclose(found["y"], expected, rtol=1e-15)


def test_a_loop_over_stacked_parameters():
    found, given = run(
        """program p(x[a, b]) {
          repeat layers {
            param w[b]
            x = tanh(x * w)
          }
          return x
        }"""
    )
    (w,) = (array for name, array in given.items() if name != "x")
    expected = given["x"].astype(np.float64)
    for index in range(3):
        expected = np.tanh(expected * w[index])
    np.testing.assert_allclose(found["x"], expected, rtol=1e-14)


def test_what_is_carried_is_assigned_all_at_once():
    found, given = run(
        """program p(x[a], y[a]) {
          repeat layers {
            old = x
            x = y
            y = old + y
          }
          return x, y
        }"""
    )
    x, y = given["x"].astype(np.float64), given["y"].astype(np.float64)
    for _ in range(3):
        x, y = y, x + y
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["y"], y)


def test_integers_stay_integers():
    found, _ = run("program p(n[a]: i32) { return n * n }", n=np.array([1, 2, 70000]))
    (answer,) = found.values()
    assert answer.dtype == np.int32
    with np.errstate(over="ignore"):
        expected = np.array([1, 2, 70000], np.int32) ** 2  # wraps around, as in torch
    np.testing.assert_array_equal(answer, expected)


def test_infinities_and_nan_are_no_warnings():
    found, _ = run("program p(x[a]) { return x / x, 1.0 / x }", x=np.zeros(3))
    ratio, inverse = found.values()
    assert np.isnan(ratio).all()
    assert np.isinf(inverse).all()


def test_an_index_out_of_range_is_told_as_in_the_other_engines():
    with pytest.raises(RunError) as caught:
        run("program p(t[b], ids[a]: i32) {\n return t[b = ids]\n}", ids=np.array([0, 9, -1]))
    assert caught.value.code == "MD0801"
    expected = "t.mdsl:3: index 9 at [a=1] is out of range for dim `b` of size 4"
    assert caught.value.message == expected
    assert caught.value.place == "t.mdsl:3"


def test_values_are_rounded_to_the_declared_dtype_first():
    x = np.array([1.001, 2.002, 3.003])
    found, given = run("program p(x[a]: bf16) { return x }", x=x)
    np.testing.assert_array_equal(given["x"], cast(x, "bf16"))
    np.testing.assert_array_equal(next(iter(found.values())), cast(x, "bf16"))


def test_made_up_values_are_those_of_the_other_engines():
    program = named("program p(x[a, b]) {\n param w[b]\n return x * w\n}")
    inputs, _ = whole_specs(program, draws(program))
    part = (slice(1, 2), slice(0, 3))
    np.testing.assert_array_equal(
        made_up(inputs, seed=3)["x"][part], draw_part(inputs["x"], "x", 3, part)
    )


def test_tolerances_follow_the_coarsest_float():
    program = named("program p(x[a], n[a]: i32) {\n y = cast(x, f16)\n return cast(y, f32), n\n}")
    assert list(tolerances_of(program).values()) == [4e-3, 0.0]
