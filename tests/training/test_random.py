"""Random programs, trained for one step under random layouts: the same numbers as one device.

`MESHDSL_CASES=5000` runs that many instead of 60, and new ones each time.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, seed, settings

from meshdsl.backends.engines.against_reference import errors
from meshdsl.backends.engines.reference import reference_step
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import NamedProgram
from tests.programs.harness import REFUSALS, Case
from tests.programs.test_seeds import said
from tests.project import matching
from tests.training.stepping import Arrays, check_step, compiled_step, hold_to, values
from tests.training.strategy import trained

SEEDS = matching("tests/training/seeds/*.mdsl")
SHARDS = 4
CASES = int(os.environ.get("MESHDSL_CASES", "60")) // SHARDS
MOST = 1e-7
"""max|Δ| / max|ref| in f64."""


def check(case: Case) -> None:
    """`case` runs and passes, or its layout is refused with a reason."""
    try:
        made = compiled_step(case)
    except DiagnosticError as error:
        code = error.diagnostics[0].code
        if code not in REFUSALS:
            raise
        event(f"refused: {code}")
        return
    inputs, params = values(made.named)
    outputs, kept = reference_step(made.named, inputs, params, {})
    step = made.step(inputs, params)
    try:
        hold_to(step, outputs, kept, MOST)
    except AssertionError:
        if not jumps(made.named, inputs, params):
            raise
        event("jumps")
    else:
        event("ran")


def jumps(program: NamedProgram, inputs: Arrays, params: Arrays) -> bool:
    """Whether the answer of one device itself changes much when its inputs change a little.

    So it does where a gradient has a corner: at equal maxima, or a `relu` of what cancels.
    """
    rng = np.random.default_rng(0)

    def moved(arrays: Arrays) -> Arrays:
        return {
            name: a * (1 + 1e-13 * rng.standard_normal(a.shape)) if a.dtype.kind == "f" else a
            for name, a in arrays.items()
        }

    before = reference_step(program, inputs, params, {})
    after = reference_step(program, moved(inputs), moved(params), {})
    pairs = [(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a]
    return any(errors(found, expected)[1] > MOST / 10 for expected, found in pairs)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_steps_are_those_of_one_device(shard: int) -> None:
    test = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))(
        given(case=trained())(lambda case: check(case))
    )
    if "MESHDSL_CASES" not in os.environ:
        test = seed(shard)(test)
    test()


@pytest.mark.parametrize("path", SEEDS, ids=lambda p: p.stem)
def test_seed(path: Path) -> None:
    """Programs that were once trained wrongly."""
    text = path.read_text()
    mesh, layout, reduce = (said(text, key) or "" for key in ("mesh", "layout", "reduce"))
    check_step(Case(text, mesh, layout, reduce))
