"""What only looks like a batch norm stays as it is written."""

from __future__ import annotations

import itertools

import pytest

from tests.programs.harness import Case, run_case

FACTORS = ("x", "w", "(x - m)", "rsqrt(m * m + 1.0)")


@pytest.mark.parametrize("factors", [*itertools.product(FACTORS, repeat=3)], ids=" * ".join)
def test_three_factors_and_a_term_are_what_is_written(factors: tuple[str, ...]) -> None:
    text = f"""
dim batch = 4, io = 2
layout l {{ batch -> d }}
program p(x[batch, io], w[io], b[io]) {{
  m = mean[batch](x)
  return {" * ".join(factors)} + b, rsqrt(m * m + 1.0)
}}
"""
    run_case(Case(text, "d:2", "l"))
