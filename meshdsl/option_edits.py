"""Ways out that change a command: made, and told.

A help that names an option is printed from the fix that changes it, so what it says can be tried:
`meshdsl/cli/corrected.py` carries fixes out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from meshdsl.diagnostics import (
    Diagnostic,
    Fix,
    OptionEdit,
    Related,
    Span,
    advice,
    all_closest,
    fail,
)


def give(option: str, value: str | bool = True, old: str | None = None, safe: bool = True) -> Fix:
    """The fix that gives an option with this value, in place of any that it has (or of `old`)."""
    edit = OptionEdit(option, value, old)
    return Fix(f"{_verb(edit)} `{shown(edit)}`", safe=safe, options=(edit,))


def set_size(dim: str, size: int, safe: bool = False) -> Fix:
    """The fix that gives a dim another size."""
    return give("--set", f"{dim}={size}", safe=safe)


def set_sizes(sizes: Mapping[str, int]) -> Fix:
    """The fix that gives several dims other sizes."""
    edits = tuple(OptionEdit("--set", f"{dim}={size}") for dim, size in sizes.items())
    text = " ".join(str(edit.value) for edit in edits)
    return Fix(f"write `--set {text}`", safe=False, options=edits)


def numbers(option: str, least: int, most: int) -> tuple[Fix, ...]:
    """The fixes that give an option a number of a range, both ends where it has too many."""
    every = range(least, most + 1)
    return one_of(option, map(str, every if len(every) <= FEW else (least, most)))


def path_meant(path: str) -> tuple[Fix, ...]:
    """The fixes that name an existing file in place of one that is not there.

    They have the name that is closest in the folder; where the folder is missing, they name the
    closest one.
    """
    parts = Path(path).parts
    for at, part in enumerate(parts):
        if os.path.exists(Path(*parts[: at + 1])):
            continue
        here = Path(*parts[:at])
        try:
            near = _names_like(Path(part), sorted(os.listdir(here))[:MANY])
        except OSError:
            return ()
        meant = [Path(here, name, *parts[at + 1 :]) for name in near]
        there = [p for p in meant if os.path.exists(p)]
        return tuple(replace_argument(path, str(p), safe=len(there) == 1) for p in there)
    return ()


def _names_like(name: Path, there: list[str]) -> list[str]:
    """The names of the same suffix whose stem is closest; else those of the same stem."""
    alike = {Path(other).stem: other for other in there if Path(other).suffix == name.suffix}
    close = [alike[stem] for stem in all_closest(name.stem, list(alike))]
    return close or [other for other in there if Path(other).stem == name.stem]


MANY = 1000
"""So many names of a folder are compared with one that is not there."""


def leave_out(option: str, old: str | None = None, safe: bool = True) -> Fix:
    """The fix that removes an option; of one that is given several times, that with `old`."""
    edit = OptionEdit(option, None, old)
    return Fix(f"{_verb(edit)} `{shown(edit)}`", safe=safe, options=(edit,))


def replace_argument(old: str, new: str, safe: bool = True) -> Fix:
    """The fix that writes another argument, which belongs to no option."""
    edit = OptionEdit("", new, old)
    return Fix(f"{_verb(edit)} `{shown(edit)}`", safe=safe, options=(edit,))


def one_of(option: str, values: Iterable[str], old: str | None = None) -> tuple[Fix, ...]:
    """The fixes that give an option one of several values, each a choice unless it is the only."""
    named = list(values)
    return tuple(give(option, value, old, safe=len(named) == 1) for value in named)


FEW = 6
"""So many values of an option are offered each as a fix; of more the help has the names."""


def known_values(
    option: str, value: str, known: Iterable[str], few: int = FEW
) -> tuple[tuple[Fix, ...], str]:
    """The fixes that write what was meant by `value`, and the help that offers them.

    They are the values that are closest; where none is close all values, if there are no more than
    `few`. Without an `option` they replace the argument.
    """
    values = list(known)
    close = all_closest(value, values) or (values if len(values) <= few else [])
    if option:
        fixes = one_of(option, close)
    else:
        fixes = tuple(replace_argument(value, word, safe=len(close) == 1) for word in close)
    return fixes, advice(fixes) or f"there are {', '.join(values) or 'none'}"


def unknown_value(
    code: str, message: str, option: str, value: str, known: Iterable[str], span: Span | None = None
) -> Diagnostic:
    """The error for a value that an option does not know, or an argument without an `option`."""
    fixes, help = known_values(option, value, known)
    return Diagnostic(code, message, span, help=help, fixes=fixes)


def _verb(edit: OptionEdit) -> str:
    if edit.value is None:
        return "leave out"
    return "add" if edit.value is True else "write"


def shown(edit: OptionEdit) -> str:
    """What an edit writes or leaves out, as it is on the command line."""
    if edit.value is None:
        return edit.option if edit.old is None else f"{edit.option} {shlex.quote(edit.old)}"
    if edit.value is True:
        return edit.option
    return f"{edit.option} {shlex.quote(str(edit.value))}".lstrip()


def in_python(edit: OptionEdit) -> str:
    """The same as an argument of a call of the package."""
    name = _PYTHON.get(edit.option, edit.option.removeprefix("--").replace("-", "_"))
    if not edit.option:
        return shown(edit)
    if edit.value is None:
        return name
    if edit.option == "--set":
        return str(edit.value)
    number = isinstance(edit.value, str) and edit.value.replace(".", "", 1).isdigit()
    return f"{name}={edit.value}" if number or edit.value is True else f'{name}="{edit.value}"'


_PYTHON = {"--as": "weights", "--torch-csv": "torch"}
"""Options whose argument in Python has another name."""


def refuse(
    code: str,
    message: str,
    fixes: Fix | Sequence[Fix],
    *others: str,
    span: Span | None = None,
    related: tuple[Related, ...] = (),
) -> NoReturn:
    """Raise the error whose help offers these fixes of the command, then `others` in words."""
    offered = (fixes,) if isinstance(fixes, Fix) else tuple(fixes)
    words = (f"or {other}" if offered or at else other for at, other in enumerate(others))
    help = advice(offered, *words)
    fail(code, message, span, *related, help=help, fixes=offered)
