"""Covering arrays: of several options, every pair of values in some case; all of them on request.

What breaks is nearly always one value or a pair of two (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", 2004). A covering array has every pair that is
possible, in about as many cases as its two longest factors have pairs.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from covertable import make

Case = dict[str, Any]
Rules = Mapping[tuple[str, ...], Callable[[Case], bool]]
"""What cases must hold, by the names of the factors that a rule reads."""

Factors = Mapping[str, Iterable[Any]]
MOST = 20_000
"""Of more combinations than these, as many cases are drawn as `MESHDSL_CASES` says."""


def covering(
    factors: Factors, rules: Rules | None = None, apart: tuple[str, ...] = ()
) -> list[Case]:
    """Cases by name of factor: all pairs of values, or with `MESHDSL_CASES` all combinations.

    Pairs that no case which holds the rules has are left out, and those of two factors that are
    `apart`: each of these meets all the others.
    """
    rules = rules or {}
    values = {name: list(each) for name, each in factors.items()}
    if "MESHDSL_CASES" in os.environ:
        cases = _combinations(values)
        return [case for case in cases if all(rule(case) for rule in rules.values())]
    constraints = [
        {"operator": "fn", "requires": list(read), "evaluate": holds}
        for read, holds in rules.items()
    ]
    models = [
        {"fields": [n for n in values if n == one or n not in apart], "strength": 2}
        for one in apart
    ]
    strength = 1 if apart else 2
    rows = make(values, strength=strength, sub_models=models, constraints=constraints)
    return [{name: case[name] for name in values} for case in rows]


def _combinations(values: Mapping[str, list[Any]]) -> Iterator[Case]:
    """All of them; of very many, some at random, the same ones in each process."""
    if math.prod(map(len, values.values())) <= MOST:
        rows: Iterable[Any] = itertools.product(*values.values())
    else:
        rng = random.Random(0)
        count = int(os.environ["MESHDSL_CASES"])
        rows = {tuple(map(rng.choice, values.values())): None for _ in range(count)}
    yield from (dict(zip(values, row, strict=True)) for row in rows)


def turns(factors: Factors) -> list[Case]:
    """As many cases as the longest factor has values: the others take turns.

    Two whose lengths have a common divisor meet in other pairs the next time round.
    """
    values = {name: list(each) for name, each in factors.items()}
    if "MESHDSL_CASES" in os.environ:
        return [*_combinations(values)]
    *shorter, longest = sorted(values, key=lambda name: len(values[name]))
    count, cycle, columns = len(values[longest]), 1, {longest: values[longest]}
    for name in shorter:
        each = values[name]
        again = math.lcm(cycle, len(each)) if math.gcd(cycle, len(each)) > 1 else count
        columns[name] = [each[(row + row // again) % len(each)] for row in range(count)]
        cycle *= len(each)
    return [{name: columns[name][row] for name in values} for row in range(count)]


def some(cases: Iterable[Any], of: int = 2) -> list[Any]:
    """The first of every `of` cases; with `MESHDSL_CASES` all of them.

    For cases that differ in what other tests vary too: what each has of its own, they have.
    """
    return [*cases][:: 1 if "MESHDSL_CASES" in os.environ else of]


def covered(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every two values meet in some case."""
    return _marked(factors, covering(factors))


def in_turn(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every value is in some case: as many as the longest has."""
    return _marked(factors, turns(factors))


def _marked(factors: Factors, cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(tuple(factors), [tuple(case.values()) for case in cases])
