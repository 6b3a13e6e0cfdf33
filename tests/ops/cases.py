"""Tests of an operator that try all of its cases: a test for each would be thousands to collect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from meshdsl.ops.opdef import Sample, load_all
from meshdsl.prove.torch_run import FLOATS, retyped
from tests.together import Check, named_as, run_all


def of_each_operator(cases: Mapping[str, tuple[Any, ...]]) -> Callable[[Check], Check]:
    """A check of one case, `check(name, …)`, as a test of an operator that goes through its cases.

    `cases` have the names that a failure shows; the first argument of each is the operator's name.
    """
    groups: dict[str, dict[str, tuple[Any, ...]]] = {}
    for label, case in cases.items():
        groups.setdefault(case[0], {})[label] = case

    def decorate(check: Check) -> Check:
        @pytest.mark.parametrize("operator", groups)
        def test(operator: str) -> None:
            run_all({label: partial(check, *case) for label, case in groups[operator].items()})

        return named_as(check, test)

    return decorate


SAMPLES: dict[str, tuple[str, Sample]] = {
    f"{name}-{i}": (name, sample)
    for name, opdef in sorted(load_all().items())
    for i, sample in enumerate(opdef.samples)
}
"""Every sample of every operator."""

IN_EVERY_FLOAT: dict[str, tuple[str, Sample]] = {
    f"{label}-{floats}": (name, retyped(sample, floats))
    for label, (name, sample) in SAMPLES.items()
    for floats in FLOATS
}
"""And with its floats of every width."""
