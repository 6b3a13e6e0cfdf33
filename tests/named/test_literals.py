"""Numbers, and what is made of numbers alone, take the dtype of the tensors beside them."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.diagnostics import DiagnosticError
from tests.compiling import named, run_text

TEXT = """
dim b = 4, k = 3
program p(x[b], i[b]: i32, j[b]: i64, z[b]: bool) {
  return BODY
}
"""
DTYPES = {
    "i * 2": "i32",
    "j + (7 - 2 * 3)": "i64",
    "i // 2": "i32",
    "i * (b // 2)": "i32",
    "i + where(z, 1, 0)": "i32",
    "i + sum[b](where(z, 1, 0))": "i32",
    "cumsum[b](where(z, 1, 0)) + j": "i64",
    "maximum(max(where(z, 3, 0)) - 1, i)": "i32",
    "broadcast[b](1) + i": "i32",
    "i + cumsum[b](broadcast[b](where(z, 2, 1)), exclusive=1)": "i32",
    "x + sum[b](where(z, 1, 0))": "f32",
    "x * (b / k)": "f32",
    "sum[b](where(z, 1, 0))": "f32",
    "x * (4 / 2)": "f32",
}


@pytest.mark.parametrize("body", DTYPES)
def test_the_dtype_is_that_of_the_tensors_beside(body: str) -> None:
    assert named(TEXT.replace("BODY", body)).outputs[0].value.type.dtype.name == DTYPES[body]


def test_integers_are_computed_exactly() -> None:
    z = np.array([True, False, True, True])
    given = {"x": np.zeros(4, np.float32), "i": np.arange(4, dtype=np.int32), "z": z}
    text = TEXT.replace("BODY", "16777217 + cumsum[b](where(z, 1, 0)) + j")
    found = run_text(text, given | {"j": np.arange(4) + 2**40})["out0"]
    np.testing.assert_array_equal(found, 16777217 + z.cumsum() + np.arange(4) + 2**40)


@pytest.mark.parametrize(
    ("body", "code", "help"),
    [
        ("i / 2", "MD0203", "cast both to f32; `//` rounds down"),
        ("i / i", "MD0203", "cast both to f32; `//` rounds down"),
        ("i * (b / 2)", "MD0257", "`/` makes a float of two integers, `//` rounds down"),
        ("i * (b / k)", "MD0257", "`/` makes a float of two integers, `//` rounds down"),
        ("i + 4 / 2", "MD0257", "write `cast(i, f32)` or `2`"),
        ("i * 3.0", "MD0257", "write `cast(i, f32)` or `3`"),
        ("i + sum[b](where(z, 1.5, 0))", "MD0201", "or `cast(sum[b](where(z, 1.5, 0)), i32)`"),
    ],
)
def test_a_quotient_of_integers_is_told(body: str, code: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        named(TEXT.replace("BODY", body))
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.code == code
    assert help in str(diagnostic.help)
