"""`top_k` and `sort` are stable under every layout; only the best of each block are exchanged."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.ir import Reshard, walk
from tests.compiling import compile_text, run_text
from tests.covering import in_turn

PROGRAM = """
dim a = 4, d = 8, k = {k}
mesh grid = {{ p: 2, q: 2 }}
layout whole {{ a -> p }}
layout parts {{ d -> (q, p) }}
layout both {{ a -> p, d -> q }}
program test(x[a, d]: {dtype}, c[a, k]: {dtype}) {{
  values, which = top_k[d -> k](x)
  ordered, places = sort[d](x)
  return values, which, ordered, places{more}
}}
"""
GRADIENT = "\n  dx = grad(sum(values * c) + sum(ordered * ordered), x)\n  return"
LAYOUTS = ("whole", "parts", "both")


def ties(dtype: str) -> Array:
    """Few different numbers, both zeros, infinities and a NaN."""
    rng = np.random.default_rng(2)
    if dtype.startswith("i"):
        x = rng.integers(-2, 3, (4, 8)).astype({"i32": np.int32, "i64": np.int64}[dtype])
        x[0, :3] = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max, np.iinfo(x.dtype).max
        return x
    x = rng.integers(-1, 2, (4, 8)).astype({"f32": np.float32, "f64": np.float64}[dtype])
    x[0, 2], x[1, 1], x[1, 6], x[2] = -0.0, np.inf, np.nan, 1
    return x


@in_turn(dtype=("f32", "f64", "i32", "i64"), k=(3, 1, 8))
def test_equals_come_in_the_order_of_their_indices(k: int, dtype: str) -> None:
    """3 are more than a block of `parts` has, 8 are all."""
    x = ties(dtype)
    down = [sorted(range(8), key=lambda i: (not np.isnan(r[i]), -int_or(r[i]))) for r in x]
    up = [sorted(range(8), key=lambda i: (bool(np.isnan(r[i])), int_or(r[i]))) for r in x]
    for layout in LAYOUTS:
        text = PROGRAM.format(k=k, dtype=dtype, more="")
        found = run_text(text, {"x": x, "c": x[:, :k]}, layout=layout)
        np.testing.assert_array_equal(found["which"], np.array(down)[:, :k])
        np.testing.assert_array_equal(found["places"], up)
        np.testing.assert_array_equal(found["values"], np.take_along_axis(x, found["which"], 1))
        np.testing.assert_array_equal(found["ordered"], np.take_along_axis(x, found["places"], 1))


def int_or(number: np.generic) -> int | float:
    """A number that is compared exactly."""
    return int(number) if np.issubdtype(number.dtype, np.integer) else float(number)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_goes_to_where_the_values_come_from(layout: str) -> None:
    rng = np.random.default_rng(3)
    x, c = np.round(rng.normal(size=(4, 8))), rng.normal(size=(4, 3))
    text = PROGRAM.format(k=3, dtype="f32", more=", dx").replace("\n  return", GRADIENT)
    inputs = {"x": x.astype(np.float32), "c": c.astype(np.float32)}
    found = run_text(text, inputs, layout=layout)
    expected = 2 * x
    np.put_along_axis(
        expected, found["which"], np.take_along_axis(expected, found["which"], 1) + c, 1
    )
    np.testing.assert_allclose(found["dx"], expected, rtol=1e-6)


@pytest.mark.parametrize(("k", "size"), [(1, 1), (2, 2), (3, 2), (8, 2)])
def test_a_block_sends_its_best_with_their_indices(k: int, size: int) -> None:
    text = PROGRAM.format(k=k, dtype="f32", more="")
    text = text.replace("  ordered, places = sort[d](x)\n", "").replace(", ordered, places", "")
    sent = {}
    for policy in ("immediate", "optimal"):
        made = compile_text(text, layout="parts", reduce=policy).placed
        moves = [n for n, _ in walk(made.body) if isinstance(n, Reshard)]
        sent[policy] = sum(m.route.wire_bytes for m in moves)
    assert sent["optimal"] <= sent["immediate"] == 2 * 3 * size * 4 * 4


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(DiagnosticError) as error:
        compile_text(PROGRAM.format(k=9, dtype="f32", more=""))
    assert [d.code for d in error.value.diagnostics] == ["MD0235"]
