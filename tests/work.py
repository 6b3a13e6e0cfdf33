"""The work of a function, in calls: the same on any machine, however busy it is."""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """The calls of functions that were made, of those built in too. Known at the end."""

    calls: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Count the calls that this thread makes meanwhile."""
    work, profile = Work(), cProfile.Profile()
    profile.enable()
    try:
        yield work
    finally:
        profile.disable()
        work.calls = sum(entry.callcount for entry in profile.getstats())


def calls(run: Callable[[], object]) -> int:
    """The calls that `run` makes."""
    with counted() as work:
        run()
    return work.calls
