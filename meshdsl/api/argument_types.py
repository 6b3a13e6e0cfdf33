"""Python values in words; arguments whose type is not that of their annotation: MD0815.

A function takes what behaves like its types, so nothing is looked at before it runs. Where it
stops with an error of Python, an argument of a wrong type is the cause that its user can mend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from meshdsl.api.source_location import here
from meshdsl.diagnostics import fail

WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "`True` or `False`",
    "None": "`None`",
    "Layout": "a layout",
}
"""The types that are compared, by their names in annotations, in words."""

NUMBERS: dict[str, type] = {"int": Integral, "float": Real}
"""What counts as a number: those of numpy, too."""


def check_arguments(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Raise MD0815 for the first argument whose type its annotation does not have.

    Annotations that name other types than those of `WORDS` are not looked at.
    """
    try:
        bound = inspect.signature(function).bind(*args, **named)
    except TypeError:
        # Python has said which argument is missing or not known.
        return
    for name, value in bound.arguments.items():
        kinds = str(function.__annotations__.get(name, "")).split(" | ")
        if {*kinds} <= WORDS.keys() and not any(_is(value, kind) for kind in kinds):
            takes = " or ".join(WORDS[kind] for kind in kinds)
            fail("MD0815", f"`{name}` takes {takes}, not {kind_of(value)}", here().argument(name))


def _is(value: Any, kind: str) -> bool:
    if kind == "None":
        return value is None
    named = any(base.__name__ == kind for base in type(value).__mro__)
    return named or isinstance(value, NUMBERS.get(kind, ()))


def kind_of(value: Any) -> str:
    """The kind of a Python value, in words."""
    text = repr(value)
    return f"`{text}`" if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"
