"""Covering arrays: of several options, every pair of values in some case; all of them on request.

What breaks is nearly always one value or a pair of two (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", 2004). A covering array has every pair that is
possible, in about as many cases as its two longest factors have pairs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from covertable import make

Case = dict[str, Any]
Rules = Mapping[tuple[str, ...], Callable[[Case], bool]]
"""What cases must hold, by the names of the factors that a rule reads."""


def covering(
    factors: Mapping[str, Iterable[Any]], rules: Rules | None = None, strength: int = 2
) -> list[Case]:
    """Cases by name of factor: all pairs of values, or with `MESHDSL_CASES` all combinations.

    Pairs that no case which holds the rules has are left out. Of strength 1, every value is in
    some case.
    """
    rules = rules or {}
    names = tuple(factors)
    if "MESHDSL_CASES" in os.environ:
        rows = (dict(zip(names, row, strict=True)) for row in itertools.product(*factors.values()))
        return [row for row in rows if all(holds(row) for holds in rules.values())]
    constraints = [
        {"operator": "fn", "requires": list(read), "evaluate": holds}
        for read, holds in rules.items()
    ]
    values = {name: list(each) for name, each in factors.items()}
    cases = make(values, strength=strength, constraints=constraints)
    return [{name: case[name] for name in names} for case in cases]


def covered(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every two values meet in some case."""
    return _marked(factors, 2)


def in_turn(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every value is in some case: as many as the longest has."""
    return _marked(factors, 1)


def _marked(factors: Mapping[str, Iterable[Any]], strength: int) -> pytest.MarkDecorator:
    cases = covering(factors, strength=strength)
    return pytest.mark.parametrize(tuple(factors), [tuple(case.values()) for case in cases])
