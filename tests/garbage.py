"""How seldom the processes of tests look for cycles of garbage.

A program is some hundred thousand objects, nearly none of them in a cycle. At Python's own
thresholds a seventh of the time of a test that compiles goes into looking for cycles, and a tenth
of that in which tests are collected; at those of a command still a twentieth. What a test has made
is mostly gone before so many objects are alive at once.
"""

from __future__ import annotations

import gc

SELDOM = 2_000_000
"""Objects that are made between two looks."""


def look_seldom() -> None:
    """Look for cycles of garbage after so many objects, and nearly never among the old ones."""
    gc.set_threshold(SELDOM, 10, 50)
