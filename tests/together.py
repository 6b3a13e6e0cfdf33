"""Many quick cases as one test: one for each takes longer to be collected and told than to run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any


def together(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """A check of all combinations of `values` as one test; a failure names its case."""

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            for combination in itertools.product(*values.values()):
                case = dict(zip(values, combination, strict=True))
                with_note(str(case), check, **case)

        return named_as(check, test)

    return decorate


def with_note(case: str, check: Callable[..., None], /, *values: Any, **named: Any) -> None:
    """Check a case; a failure says which it was."""
    try:
        check(*values, **named)
    except Exception as error:
        error.add_note(f"case {case}")
        raise


def named_as(check: Callable[..., None], test: Callable[..., None]) -> Callable[..., None]:
    """The test under the name of its check; pytest is to see only its own parameters."""
    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test
