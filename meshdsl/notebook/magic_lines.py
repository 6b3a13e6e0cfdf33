"""The line of a magic: its words, read by the parser of the command line.

A line takes the options of a command, without its file; those about files and the terminal are
refused, with the notebook's alternative.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, NoReturn

import typer

from meshdsl.cli import usage
from meshdsl.cli.compare import Compare
from meshdsl.cli.compile import Compile
from meshdsl.cli.explain import Explain
from meshdsl.cli.options import (
    Command,
    PlacingOptions,
    flag,
    opt,
    option,
    run_words,
    spread,
)
from meshdsl.cli.run import RunOptions
from meshdsl.cli.schedule import Draw
from meshdsl.cli.search import SearchLayouts
from meshdsl.cli.simulate import Simulate
from meshdsl.diagnostics import Fix, Source, Span, advice, did_you_mean, fail
from meshdsl.records import dataclass


@option
class CompareHere(Compare):
    """Options of `%mdsl compare`; values are compared only on request."""

    run: bool = flag("--run", "Execute the columns and compare their values.")


@option
class CellOptions(Explain):
    """Options of `%%mdsl`."""

    name: str | None = opt("--as", "NAME", "Another name for the program in Python.")
    quiet: bool = flag("--quiet -q", "Show nothing.")


@option
class Nothing:
    """No options."""


VERBS: dict[str, tuple[str, type]] = {
    "explain": ("what each line holds and sends, and why", Explain),
    "compare": ("the program under several layouts, side by side", CompareHere),
    "run": ("run it and compare with the reference", RunOptions),
    "code": ("the torch program that every device runs", Compile),
    "collectives": ("what is sent, drawn on the mesh", PlacingOptions),
    "memory": ("what a device holds, as bars", PlacingOptions),
    "tensor": ("who holds what of a tensor", PlacingOptions),
    "search": ("the best layout of the program on a mesh", SearchLayouts),
    "simulate": ("a step in time on a cluster", Simulate),
    "schedule": ("a pipeline schedule over time, without a program", Draw),
    "mesh": ("a mesh with its devices", Nothing),
    "show": ("what the cells have defined", Nothing),
    "reset": ("forget all of it", Nothing),
}
"""The verbs of `%mdsl`: description and class of options."""

INSTEAD = {
    "json": "what the line yields has it as `.json`",
    "print_after": "`meshdsl explain` prints it of a file",
    "output": "what the line yields is a `str`: write it with Python",
    "html": '`.save("F.html")` of what the line yields writes the page',
    "out": "what the line yields has the values as `.outputs`",
    "force": "a line writes no files",
    "write": "`.layout` of what the line yields is the block: copy it into a cell",
    "expect": "write an `expect` into a cell with the layout",
    "trace": '`.trace("F.json")` of what the line yields writes it',
    "svg": '`.save("F.svg")` of what the line yields writes it',
    "csv": '`.csv("F.csv")` of what the line yields writes it',
    "torch_csv": '`.csv("F.csv", torch=True)` of what the line yields writes it',
}
"""Options of commands that every line refuses, and their alternatives."""

OF_GRAPHS = "`meshdsl search --graph FILE.json` takes it with the file of a graph"
INSTEAD_OF = {"search": {"graph": OF_GRAPHS, "bandwidth": OF_GRAPHS, "stages": OF_GRAPHS}}
"""More of them, of some lines."""

WANTED = {"--layout", "--mesh", "--sbp", "--reduce", "--dtype", "--set"}
WANTED |= {"--all", "--top", "--line", "--tensor"}
"""Options with which a cell shows the report of `explain`."""

Name = Annotated[str | None, typer.Argument(help="A program, a mesh, a tensor, a schedule.")]


@dataclass(frozen=True, slots=True)
class MagicLine:
    """`explain mlp --layout hybrid`: a verb, a name or none, and options of the verb's class."""

    verb: str
    name: str | None
    given: Any


def read_line(line: str) -> MagicLine:
    """The parsed words behind `%mdsl`. Raises MD0604."""
    verb, _, words = line.strip().partition(" ")
    if verb not in VERBS:
        help = did_you_mean(verb, list(VERBS)) or f"there are {', '.join(VERBS)}"
        asked = f"%mdsl {verb}".rstrip()
        _refuse(f"%mdsl {line}", f"`{asked}` is none of its commands", help)

    def read(given: Any, name: Name = None) -> MagicLine:
        return MagicLine(verb, name, given)

    parsed: MagicLine = _read(read, VERBS[verb][1], f"%mdsl {verb}", words, instead_of(verb))
    return parsed


def read_cell(line: str) -> tuple[CellOptions, bool]:
    """The options behind `%%mdsl`, and whether the cell is explained. Raises MD0604."""
    found = _read(lambda given: given, CellOptions, "%%mdsl", line, INSTEAD)
    return found, any(word.partition("=")[0] in WANTED for word in shlex.split(line))


def instead_of(verb: str) -> Mapping[str, str]:
    """The options that the line of a verb refuses, and their alternatives."""
    return {**INSTEAD, **INSTEAD_OF.get(verb, {})}


def _read(
    function: Callable[..., Any], options: Any, magic: str, line: str, refused: Mapping[str, str]
) -> Any:
    """The result of `function` on the words of a line, read as those of a command.

    Options that are `refused` have an alternative.
    """
    full_line = f"{magic} {line}".rstrip()
    names = {f.name: f.metadata["names"] for f in fields(options) if f.name not in refused}
    takes = f"`{magic}` takes {', '.join(sorted(names.values())) or 'no options'}"
    function.__annotations__["given"] = options
    app = typer.Typer(add_completion=False)
    app.command(cls=Command, context_settings={"help_option_names": []})(spread(function))
    try:
        words = shlex.split(line)
    except ValueError as error:
        _refuse(full_line, str(error), takes)
    try:
        parsed = run_words(app, words, magic)
    except Exception as error:
        refusal = usage.refused(error, tuple(words))
        if refusal is None:
            raise
        _refuse(full_line, refusal.message, takes, refusal.fixes)
    given_options = parsed.given if isinstance(parsed, MagicLine) else parsed
    for f in fields(options):
        if f.name in refused and getattr(given_options, f.name) != f.default:
            name = f.metadata["names"].split()[-1]
            _refuse(full_line, f"`{name}` is not for notebooks", refused[f.name])
    return parsed


def _refuse(line: str, message: str, help: str, fixes: tuple[Fix, ...] = ()) -> NoReturn:
    """Raise MD0604 at a line; `help` is for where there are no fixes."""
    place = Span(Source("the line of the magic", line), 0, len(line))
    fail("MD0604", message, place, help=advice(fixes) if fixes else help, fixes=fixes)
