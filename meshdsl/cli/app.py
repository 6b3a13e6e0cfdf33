"""The table of commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from meshdsl.cli import check, compare, compile, explain, fmt, later, render, rows, run, train
from meshdsl.version import __version__

app = typer.Typer(
    name="meshdsl",
    no_args_is_help=True,
    add_completion=False,
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
            "--version", callback=_print_version, is_eager=True, help="Say which version."
        ),
    ] = False,
) -> None:
    """Tensor programs with named dimensions, compiled to one torch program per device."""


app.command("check")(check.command)
app.command("fmt")(fmt.command)
app.command("explain")(explain.command)
app.command("compile")(compile.command)
app.command("run")(run.command)
app.command("train")(train.command)
app.command("compare")(compare.command)
app.command("render")(render.command)
app.command("rows")(rows.command)
for _name in later.COMMANDS:
    later.add(app, _name)


@functools.cache
def command() -> Callable[..., Any]:
    """The command line as typer makes it of the table."""
    return typer.main.get_command(app)
