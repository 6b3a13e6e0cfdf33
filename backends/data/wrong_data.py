"""What is said of files of arrays: one that cannot be used, and values that are rounded."""

from __future__ import annotations

from typing import NoReturn

from meshdsl.backends.runtime.array_files import ArraysRefused
from meshdsl.backends.runtime.user_files import Refused
from meshdsl.diagnostics import Diagnostic
from meshdsl.option_edits import give, path_meant, refuse, set_sizes


def refuse_file(refused: Refused, path: str, *others: str) -> NoReturn:
    """Raise MD0505, whose help names the file that was meant where there is none of this name."""
    refuse("MD0505", str(refused), path_meant(path), *others)


def refuse_arrays(refused: ArraysRefused, other: str) -> NoReturn:
    """Raise MD0504, whose help sets the sizes that the arrays have where these alone differ."""
    fixes = (set_sizes(refused.sizes),) if refused.sizes else ()
    refuse("MD0504", str(refused), fixes, other)


def rounded_note(text: str) -> Diagnostic:
    """MD0506: values have more digits than the program's dtype."""
    return Diagnostic("MD0506", text, severity="note", fixes=(give("--dtype", "f64", safe=False),))
