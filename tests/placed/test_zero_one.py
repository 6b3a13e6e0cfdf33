"""The solver says nothing of its own, whatever its version prints when it is made."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import highspy
import pytest

from meshdsl.placed import solver
from meshdsl.placed.zero_one import ZeroOne

C = ctypes.CDLL(None)


class Announced(highspy.Highs):
    """A solver that prints a line by C code, buffered, when the first of a process is made."""

    made = 0

    def __init__(self) -> None:
        if not Announced.made:
            C.puts(b"Running")
            os.write(2, b"Running")
        Announced.made += 1
        super().__init__()


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Announced, "made", 0)
    monkeypatch.setattr(highspy, "Highs", Announced)
    monkeypatch.setattr(solver, "_first_is_made", False)
    yield
    C.fflush(None)


def least() -> float:
    """The least of a program of one choice."""
    made = ZeroOne(most=100)
    for cost, option in enumerate(made.choice(3), 2):
        made.pay(option, cost)
    found = made.minimise()
    assert found is not None
    return found.cost


def test_what_the_first_solver_prints_is_lost(
    announced: None, capfd: pytest.CaptureFixture[str]
) -> None:
    C.puts(b"before")
    assert least() == 2
    C.puts(b"after")
    C.fflush(None)
    assert capfd.readouterr() == ("before\nafter\n", "")
    assert Announced.made


def test_in_several_threads(announced: None, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: least(), range(8))] == [2] * 8
    C.fflush(None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_where_streams_are_closed_they_stay_so(
    closed: tuple[int, ...], announced: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a child, whose descriptors are those that the test has before it starts."""
    child = os.fork()
    if not child:
        for number in closed:
            os.close(number)
        found = least()
        C.fflush(None)
        still = [number for number in range(3) if _is_closed(number)]
        os._exit(0 if (found, still) == (2, [*closed]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert capfd.readouterr() == ("", "")


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def test_the_installed_solver_prints_nothing() -> None:
    text = "from tests.placed.test_zero_one import least; print(least())"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("2.0\n", "")
