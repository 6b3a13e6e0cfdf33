"""Random programs under random layouts: the same numbers as one device, and the bytes predicted.

`MESHDSL_CASES=5000` runs that many instead of 52, and new ones each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, event, given, seed, settings

from meshdsl.diagnostics import DiagnosticError
from tests.programs.harness import REFUSALS, Case, run_case
from tests.programs.strategy import cases

SHARDS = 4
CASES = int(os.environ.get("MESHDSL_CASES", "52")) // SHARDS


def check(case: Case) -> None:
    """`case` runs and passes, or its layout is refused with a reason."""
    try:
        run_case(case)
    except DiagnosticError as error:
        code = error.diagnostics[0].code
        if code not in REFUSALS:
            raise
        event(f"refused: {code}")
    else:
        event("ran")


def one_shard(number: int) -> None:
    """A part of the cases, so that they run side by side."""
    test = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))(
        given(case=cases())(lambda case: check(case))
    )
    if "MESHDSL_CASES" not in os.environ:
        test = seed(number)(test)
    test()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_programs_run_as_on_one_device(shard: int) -> None:
    one_shard(shard)
