"""Numbers that no machine has are refused by every option, before anything is done."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import typer

from meshdsl.cli.app import app

from .command import Cli, write
from .test_set import FILE

HUGE = ("9223372036854775808", "1" + "0" * 23, "-1" + "0" * 23, "9" * 5000, "nan", "inf", "-inf")


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that is none."""
    return get_args(annotation) or (annotation,)


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NUMBERS = [
    (name, option.opts[-1], option.min)
    for name, command in COMMANDS.items()
    for option in command.params
    if getattr(option, "type_descriptor", None) is not None
    and set(_kinds(option.type_descriptor.annotation)) & {int, float}
]
"""Commands, their options that take a number, and the least that each says it takes."""
GIVEN = {
    "render": "--as jax",
    "train": "--data d.npz --steps 1",
    "evaluate": "--data d.npz --params d.npz",
    "generate": "--prompt a --params d.npz",
    "schedule": "gpipe --stages 2 --micro 2",
}
"""What a command needs beside its file."""


def call(command: str, option: str, value: str) -> list[str]:
    """The command with an option, and what else it needs."""
    words = GIVEN.get(command, "").split()
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    file = [] if command in ("schedule",) else ["f.mdsl"]
    return [command, *file, *words, f"{option}={value}"]


def test_there_are_such_options() -> None:
    assert len(NUMBERS) > 30
    assert ("run", "--seed", None) in NUMBERS


@pytest.mark.parametrize(("command", "option", "least"), NUMBERS)
def test_it_is_refused(command: str, option: str, least: int | None, cli: Cli) -> None:
    write(FILE)
    for value in (*HUGE, *(["-1"] if least is not None else [])):
        done = cli(*call(command, option, value))
        assert (done.code, done.codes) == (2, ["error[MD0604]"]), value
        assert option in done.err
        if value.strip("-") in ("nan", "inf"):  # no sentence about a range that it is not beyond
            assert "…" not in done.err, value
            assert "than or equal" not in done.err, value


@pytest.mark.parametrize("size", ["1" + "0" * 23, "00" + "7" * 30, "9" * 5000])
def test_a_size_is_shown_with_the_digits_that_were_typed(size: str, cli: Cli) -> None:
    done = cli("check", write(FILE), "--set", f"a={size}")
    assert (done.code, done.codes) == (2, ["error[MD0106]"])
    shown = f"a={size.lstrip('0')}"
    assert (shown if len(shown) < 80 else shown[:80]) in done.err
