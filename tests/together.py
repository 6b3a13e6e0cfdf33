"""Many quick cases as one test: one for each takes longer to be collected and told than to run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest

Check = Callable[..., None]
FAILURES = (Exception, pytest.fail.Exception)


def together(**values: Iterable[Any]) -> Callable[[Check], Check]:
    """A check of all combinations of `values` as one test, whose id has the number of them."""
    combinations = [*itertools.product(*values.values())]

    def decorate(check: Check) -> Check:
        named = [dict(zip(values, combination, strict=True)) for combination in combinations]
        cases = {str(case): partial(check, **case) for case in named}

        @pytest.mark.parametrize("cases", [pytest.param(cases, id=f"{len(cases)} cases")])
        def test(cases: Mapping[str, Callable[[], None]]) -> None:
            run_all(cases)

        return named_as(check, test)

    return decorate


def run_all(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run every case, also after one that fails; a failure names each that failed."""
    assert cases, "no case is left to run"
    failures: dict[str, BaseException] = {}
    for name, check in cases.items():
        try:
            check()
        except FAILURES as error:
            error.add_note(f"case {name}")
            failures[name] = error
    if len(failures) == 1:
        raise failures.popitem()[1]
    if failures:
        message = f"{len(failures)} of {len(cases)} cases fail: {'; '.join(failures)}"
        raise BaseExceptionGroup(message, [*failures.values()])


def named_as(check: Check, test: Check) -> Check:
    """The test under the name of its check; pytest is to see only its own parameters."""
    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test
