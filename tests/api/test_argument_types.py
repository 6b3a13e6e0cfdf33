"""An argument of a wrong type is told as such, never by an error of Python."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from meshdsl.api.argument_types import WORDS

mlp = md.load(Path(__file__).parents[2] / "examples" / "mlp.mdsl", dims={"batch": 8})


CALLS: dict[str, Callable[..., Any]] = {
    "compile": lambda **named: mlp.compile({"rows": 2, "cols": 2}, **named),
    "search": lambda **named: mlp.search({"rows": 2, "cols": 2}, **named),
    "advise": lambda **named: mlp.advise({"rows": 2, "cols": 2}, **named),
    "schedule": lambda **named: md.schedule("gpipe", **{"stages": 2, "batch": 4, **named}),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(md.Program, name) for name in CALLS if name != "schedule"},
    "schedule": md.schedule,
}


def arguments() -> Iterator[tuple[str, str]]:
    """Each call with each of its arguments whose type is text, a number, a truth or a layout."""
    for name, function in FUNCTIONS.items():
        for argument, kinds in inspect.unwrap(function).__annotations__.items():
            if argument != "return" and {*str(kinds).split(" | ")} <= WORDS.keys():
                yield name, argument


@pytest.mark.parametrize(("name", "argument"), [*arguments()])
def test_a_list_is_refused_or_taken(name: str, argument: str) -> None:
    with contextlib.suppress(md.ProgramError):
        CALLS[name](**{argument: []})


def test_the_message_says_what_is_taken() -> None:
    with pytest.raises(md.ProgramError) as raised:
        mlp.search({"rows": 2, "cols": 2}, fix=3)  # type: ignore[arg-type]
    (said,) = raised.value.diagnostics
    assert said.code == "MD0815"
    assert said.message == "`fix` takes a layout or text or `None`, not `3`"


def test_a_layout_is_a_text_of_rules() -> None:
    of_text = mlp.search({"rows": 2, "cols": 2}, fix="{ batch -> rows }")
    assert mlp.search({"rows": 2, "cols": 2}, fix=md.layout(batch="rows")).layout == of_text.layout
