"""Command lines that typer refuses: what is wrong, and the edits of the arguments that mend it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from meshdsl.diagnostics import Fix, OptionEdit, all_closest
from meshdsl.option_edits import give, leave_out, replace_argument
from meshdsl.records import dataclass

_NO_COMMAND = re.compile(r"no such command '(.*?)'", re.IGNORECASE)
_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((\S+?)[ )]")


_PLAINLY = (
    (r"Input should be a valid integer.*", "it is not a whole number"),
    (r"Input should be a valid number.*", "it is not a number"),
    (r"Input should be greater than or equal to (\S+)", r"it is below \1, the least"),
    (r"Input should be less than or equal to (\S+)", r"it is above \1, the most"),
)
"""How pydantic says what is wrong with a number, and plain words for it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command line that was refused: the message, and fixes of it."""

    message: str
    fixes: tuple[Fix, ...]


def refused(error: Exception, words: tuple[str, ...]) -> Refusal | None:
    """What typer says of a command line of these words; None for any other exception."""
    if not (hasattr(error, "format_message") and hasattr(error, "ctx")):
        return None
    fixes = tuple(_fixes(error, words))
    raw = error.format_message().replace("Value error, ", "")
    if fixes:  # it names the same in words
        raw = re.sub(r"\s*\(Possible options: .*\)|\s*Did you mean .*\?", "", raw)
    for theirs, ours in _PLAINLY:
        raw = re.sub(theirs, ours, raw)
    message = " ".join(raw.split()).rstrip(".")
    return Refusal(message[:1].lower() + message[1:], fixes)


def _fixes(error: Any, words: tuple[str, ...]) -> Iterator[Fix]:
    command = error.ctx.command if error.ctx else None
    message = getattr(error, "message", "")
    if no_command := _NO_COMMAND.search(message):
        yield from _meant(no_command[1], list(getattr(command, "commands", ())))
    elif extra := _EXTRA.match(message):
        title = f"leave out `{extra[1]}`"
        yield Fix(title, safe=False, options=(OptionEdit("", None, extra[1]),))
    elif hasattr(error, "possibilities"):
        options = [
            name for parameter in (command.params if command else ()) for name in parameter.opts
        ]
        yield from _meant(error.option_name, [name for name in options if name.startswith("--")])
    elif hasattr(error, "option_name"):
        yield from _value_of(error.option_name, words)
    elif option := getattr(error, "given_twice", None):
        values = [after for word, after in itertools.pairwise(words) if word == option]
        yield from (leave_out(option, value, safe=False) for value in dict.fromkeys(values))
    elif type(error).__name__ == "BadParameter":
        yield from _number_of(error.param, words)


def _meant(word: str, known: list[str]) -> Iterator[Fix]:
    """The names that are closest to a word."""
    close = all_closest(word, known)
    yield from (replace_argument(word, name, safe=len(close) == 1) for name in close)


def _value_of(option: str, words: tuple[str, ...]) -> Iterator[Fix]:
    """An option without the value that it needs, or with one where it takes none."""
    given = [word for word in words if word.startswith(f"{option}=")]
    yield replace_argument(given[0], option) if given else leave_out(option, safe=False)


def _number_of(parameter: Any, words: tuple[str, ...]) -> Iterator[Fix]:
    """The number that an option takes which is the nearest to the one that is given."""
    info = getattr(parameter, "type_descriptor", None)
    info = getattr(info, "parameter_info", None)
    option = parameter.opts[-1]
    if info is None or not option.startswith("--"):
        return
    least, most = getattr(info, "min", None), getattr(info, "max", None)
    value = next((b for a, b in itertools.pairwise(words) if a == option), "")
    if re.fullmatch(r"-?\d+(\.\d+)?", value) and least is not None and float(value) < least:
        yield give(option, str(least))
    elif re.fullmatch(r"-?\d+(\.\d+)?", value) and most is not None and float(value) > most:
        yield give(option, str(most))
    elif isinstance(parameter.default, int | float):
        yield give(option, str(parameter.default), safe=False)
    elif least is not None:
        yield give(option, str(least), safe=False)
