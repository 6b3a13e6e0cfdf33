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
    return [*_Rows(values, rules, apart).drawn()]


TRIES = 10
"""Of as many rows that could come next, the one with most pairs that no row has yet is taken."""


class _Rows:
    """Rows with all pairs. A value is a bit of an integer, and a row the sum of its values."""

    def __init__(
        self, values: Mapping[str, list[Any]], rules: Rules, apart: tuple[str, ...]
    ) -> None:
        bits = (1 << place for place in itertools.count())
        self.columns = {name: {next(bits): v for v in each} for name, each in values.items()}
        self.whole = {name: sum(column) for name, column in self.columns.items()}
        self.of = {bit: name for name, column in self.columns.items() for bit in column}
        self.unmet: dict[int, int] = {}
        for bit, name in self.of.items():
            without = {name, *apart} if name in apart else {name}
            self.unmet[bit] = sum(self.whole[other] for other in self.columns.keys() - without)
        self.rules = [(*self._table(read, rule), {*read}) for read, rule in rules.items()]

    def _table(self, read: tuple[str, ...], rule: Callable[[Case], bool]) -> tuple[int, set[int]]:
        """What a rule reads, and all that a row that is not yet whole may have of it."""
        allowed: set[int] = set()
        for bits in itertools.product(*(self.columns[name] for name in read)):
            if rule({self.of[bit]: self.columns[self.of[bit]][bit] for bit in bits}):
                counts = range(len(bits) + 1)
                allowed |= {sum(s) for n in counts for s in itertools.combinations(bits, n)}
        return sum(self.whole[name] for name in read), allowed

    def _allows(self, row: int, name: str) -> bool:
        return all(row & mask in allowed for mask, allowed, read in self.rules if name in read)

    def _filled(self, row: int, names: list[str]) -> int:
        """The row with a value of each name, of most pairs first; 0 where the rules leave none."""
        if not names:
            return row
        name, *others = names
        for bit in sorted(self.columns[name], key=lambda bit: -(self.unmet[bit] & row).bit_count()):
            if self._allows(row | bit, name) and (whole := self._filled(row | bit, others)):
                return whole
        return 0

    def _with(self, one: int, other: int, rng: random.Random) -> int:
        """The best of some rows with two values; 0 where the rules leave none."""
        pair, best = (self.of[one], self.of[other]), 0
        if not all(self._allows(one | other, name) for name in pair):
            return 0
        names = [name for name in self.columns if name not in pair]
        for _ in range(TRIES):
            best = max(best, self._filled(one | other, names), key=self._met)
            rng.shuffle(names)
        return best

    def _met(self, row: int) -> int:
        return sum((unmet & row).bit_count() for bit, unmet in self.unmet.items() if bit & row)

    def drawn(self) -> Iterator[Case]:
        """Rows until every pair that one can have is in some: each begins with a rare one."""
        rng, unmet = random.Random(0), self.unmet
        while any(unmet.values()):
            one = max(unmet, key=lambda bit: unmet[bit].bit_count())
            partners = (bit for bit in unmet if bit & unmet[one])
            other = max(partners, key=lambda bit: unmet[bit].bit_count())
            row = self._with(one, other, rng)
            met = row or one | other  # a pair that no row has is not asked for again
            for bit in unmet:
                if bit & met:
                    unmet[bit] &= ~met
            if row:
                bits = {self.of[bit]: bit for bit in unmet if bit & row}
                yield {name: column[bits[name]] for name, column in self.columns.items()}


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


def covered(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every two values meet in some case."""
    return _marked(factors, covering(factors))


def in_turn(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """A test's parameters, of which every value is in some case: as many as the longest has."""
    return _marked(factors, turns(factors))


def _marked(factors: Factors, cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(tuple(factors), [tuple(case.values()) for case in cases])
