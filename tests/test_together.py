"""Several cases as one test: all run, and a failure names each that failed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.together import run_all, together


def test_all_cases_run_and_each_that_fails_is_named() -> None:
    done = []

    def check(n: int) -> None:
        done.append(n)
        assert n % 2 == 0, f"{n} is odd"
        if n == 4:
            pytest.fail("four")

    with pytest.raises(BaseExceptionGroup, match=r"^3 of 5 cases fail: 1; 3; 4$") as caught:
        run_all({str(n): partial(check, n) for n in range(5)})
    assert done == [*range(5)]
    notes = [error.__notes__ for error in caught.value.exceptions]
    assert notes == [[f"case {n}"] for n in (1, 3, 4)]


def test_a_single_failure_is_raised_as_it_is() -> None:
    def check(table: dict[str, int]) -> None:
        assert table["a"]

    with pytest.raises(KeyError) as caught:
        run_all({"good": partial(check, {"a": 1}), "bad": partial(check, {})})
    assert caught.value.__notes__ == ["case bad"]


def test_no_cases_are_a_failure() -> None:
    with pytest.raises(AssertionError, match="no case"):
        run_all({})


def test_every_combination_is_a_case_and_the_id_counts_them() -> None:
    seen = []
    made: Any = together(n=(1, 2), letter="ab")(lambda n, letter: seen.append((n, letter)))
    (mark,) = made.pytestmark
    (cases,) = mark.args[1]
    assert cases.id == "4 cases"
    made(*cases.values)
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
