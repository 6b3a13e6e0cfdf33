"""The cases of tests: what meets what, and how many there are."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import Rules, covering, turns

FACTORS = {"a": "abcde", "b": "wxyz", "c": "pq"}
RULES: Rules = {("a", "b"): lambda case: (case["a"], case["b"]) != ("a", "x")}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHDSL_CASES", raising=False)


@pytest.mark.parametrize("apart", [(), ("a", "b")])
def test_all_pairs_meet_but_those_that_are_apart(apart: tuple[str, ...]) -> None:
    cases = covering(FACTORS, RULES, apart)
    assert all(rule(case) for case in cases for rule in RULES.values())
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(case[one], case[other]) for case in cases}
        wanted = {*itertools.product(FACTORS[one], FACTORS[other])} - {("a", "x")}
        assert met == wanted or {one, other} == {*apart}
    assert len(cases) < (15 if apart else 25)


def test_values_take_turns() -> None:
    cases = turns({**FACTORS, "d": "uv"})
    assert [case["a"] for case in cases] == [*"abcde"]
    assert {(case["c"], case["d"]) for case in cases} == {*itertools.product("pq", "uv")}
    assert all({case[name] for case in cases} == {*values} for name, values in FACTORS.items())


def test_combinations_are_all_or_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDSL_CASES", "30")
    assert len(covering(FACTORS)) == len(turns(FACTORS)) == 40
    many = {str(number): range(9) for number in range(9)}
    cases = covering(many)
    assert cases == covering(many)
    assert 20 < len(cases) <= 30
