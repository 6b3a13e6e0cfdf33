"""The second process of a search changes nothing but how long it takes, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.project import ROOT

SEARCHES = {
    "dlrm by bytes": ("examples/dlrm.mdsl", "--mesh", "data:2,tp:2", "--certificate"),
    "mlp by time in little memory": (
        *("examples/mlp.mdsl", "--mesh", "a:2,b:2", "--cluster", "a100-dgx", "--memory", "4MB"),
    ),
}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def searched(words: tuple[str, ...], cores: list[int]) -> str:
    """What a search prints that may use some cores."""
    text = f"""
        import os; os.sched_setaffinity(0, {cores})
        from meshdsl.search import problem; problem.ALONE = 0
        from meshdsl.cli import main; main()
    """
    command = [sys.executable, "-c", textwrap.dedent(text), "search", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
@pytest.mark.parametrize("name", SEARCHES)
def test_one_core_finds_the_same(name: str) -> None:
    assert searched(SEARCHES[name], CORES) == searched(SEARCHES[name], CORES[:1])


def in_a_process(text: str) -> str:
    """What a program prints; it is without threads, so that it may fork."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


BEGUN = """
    import os, time
    from meshdsl.diagnostics import fail
    from meshdsl.search import speculative as second
    second._has_room = lambda: True
    def answer(question):
        if question < 0:
            fail("MD0302", "cannot be placed")
        return question + 1
    two = second.Second(answer)
"""


def test_answers_come_by_their_keys() -> None:
    text = """
    for number in (1, 2, -3, 4):
        two.ask(f"at {number}", number)
    two.drop("at 2")
    print(two.take("at 4"), two.take("at -3"), two.take("at 2"), two.take("at 1"))
    print(two.take("never asked"), two.is_gone)
    """
    assert in_a_process(BEGUN + text) == "5 None None 2\nNone False\n"


def test_one_that_is_gone_is_done_without() -> None:
    text = """
    two.ask("one", 1)
    os.kill(two.end.peek()[2][0], 9)
    time.sleep(0.1)
    print(two.take("one") in (None, 2))
    for number in range(3):
        two.ask(number, number)
    print([two.take(number) for number in range(3)], two.is_gone)
    """
    assert in_a_process(BEGUN + text) == "True\n[None, None, None] True\n"


def test_one_that_nobody_asks_ends() -> None:
    text = """
    second.IDLE = 1
    two.ask("one", 1)
    print(two.take("one"))
    os.waitpid(two.end.peek()[2][0], 0)
    two.ask("two", 2)
    print(two.take("two"), two.is_gone)
    """
    assert in_a_process(BEGUN + text) == "2\nNone True\n"


@pytest.mark.parametrize("ending", ["two.close()", "pass", "os.kill(os.getpid(), 9)"])
def test_nothing_is_left(ending: str) -> None:
    text = f"""
    two.ask("one", 1)
    print(two.end.peek()[2][0], flush=True)
    {ending}
    """
    command = [sys.executable, "-c", textwrap.dedent(BEGUN + text)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    process = int(done.stdout)
    for _ in range(6000):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        signal.sigtimedwait([], 0.01)
    pytest.fail("the second process goes on")
