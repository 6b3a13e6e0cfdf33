"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli.options import Commands, LazyGroup
from meshdsl.version import __version__

NAMES = (
    "new",
    "check",
    "fmt",
    "explain",
    "compile",
    "run",
    "train",
    "evaluate",
    "export",
    "tokenize",
    "generate",
    "weights",
    "compare",
    "cluster",
    "simulate",
    "search",
    "advise",
    "schedule",
    "render",
    "rows",
    "prove",
    "play",
    "lsp",
)
"""The commands in the order of the help, each a module beside this one."""


class _Commands(LazyGroup):
    of = Commands("meshdsl.cli", NAMES)


app = typer.Typer(
    name="meshdsl",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshdsl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Compile tensor programs with named dimensions for many devices."""
