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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

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
    numbers = {name: range(len(each)) for name, each in values.items()}
    rows = _Rows(numbers, [_Rule(values, *rule) for rule in rules.items()], apart).all()
    return [{name: values[name][row[name]] for name in values} for row in rows]


Row = dict[str, int]
"""The number of the value of each factor, of some of them while a case is made."""


class _Rule:
    """A rule about numbers of values; each combination is asked for once."""

    def __init__(
        self, values: Mapping[str, list[Any]], read: Sequence[str], holds: Callable[[Case], bool]
    ) -> None:
        self.read, self.holds, self.values = read, holds, values
        self.known = dict[tuple[int | None, ...], bool]()

    def allows(self, row: Row) -> bool:
        """Whether the case holds it, or has not all that it reads yet."""
        key = tuple(map(row.get, self.read))
        if None not in key and key not in self.known:
            self.known[key] = self.holds({n: self.values[n][row[n]] for n in self.read})
        return self.known.get(key, True)


class _Rows:
    """Cases made one by one, each with as many pairs as a greedy choice finds that are in none.

    That is the way of AETG (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997), without
    draws: of the same factors the same cases come.
    """

    def __init__(
        self, numbers: Mapping[str, range], rules: Sequence[_Rule], apart: tuple[str, ...]
    ) -> None:
        self.numbers = numbers
        self.rules = {name: [rule for rule in rules if name in rule.read] for name in numbers}
        self.open = {(name, value): set[tuple[str, int]]() for name in numbers
                     for value in numbers[name]}  # fmt: skip
        for one, other in itertools.combinations(numbers, 2):
            if not {one, other} <= {*apart}:
                self._pair(itertools.product(numbers[one], numbers[other]), one, other)

    def _pair(self, values: Iterable[tuple[int, int]], one: str, other: str) -> None:
        for a, b in values:
            self.open[one, a].add((other, b))
            self.open[other, b].add((one, a))

    def all(self) -> Iterator[Row]:
        """Cases until no pair is left that some case can have."""
        while left := max(self.open.items(), key=lambda item: len(item[1])):
            first, others = left
            if not others:
                return
            second = min(others, key=lambda pair: (-len(self.open[pair]), pair))
            row = self._begun(first, second)
            if row is None:  # no case has both
                self._close(first, second)
                continue
            for one, other in itertools.combinations(row.items(), 2):
                self._close(one, other)
            yield row

    def _close(self, one: tuple[str, int], other: tuple[str, int]) -> None:
        self.open[one].discard(other)
        self.open[other].discard(one)

    def _begun(self, *pair: tuple[str, int]) -> Row | None:
        row: Row = {}
        for name, value in pair:
            row[name] = value
            if not all(rule.allows(row) for rule in self.rules[name]):
                return None
        return self._filled(row)

    def _filled(self, row: Row) -> Row | None:
        """The case with a value of each factor: what adds most pairs first; None where none is."""
        left = [name for name in self.numbers if name not in row]
        if not left:
            return row
        name, values = max(
            ((name, self._sorted(name, row)) for name in left),
            key=lambda item: (item[1][0][0], len(item[1])),
        )
        for *_, value in values:
            row[name] = -value
            if all(rule.allows(row) for rule in self.rules[name]) and self._filled(row):
                return row
            del row[name]
        return None

    def _sorted(self, name: str, row: Row) -> list[tuple[int, int, int]]:
        """The values of a factor, negative, first that with most pairs: of the case, then of all.

        Of equal ones the first: factors begin with what is small.
        """
        found = []
        for value in self.numbers[name]:
            rest = self.open[name, value]
            found.append((sum(pair in rest for pair in row.items()), len(rest), -value))
        return sorted(found, reverse=True)


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
