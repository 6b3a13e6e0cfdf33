"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import (
    check,
    cluster,
    compare,
    compile,
    explain,
    fmt,
    generate,
    lsp,
    new,
    play,
    render,
    rows,
    run,
    schedule,
    search,
    simulate,
    train,
)
from meshdsl.cli.options import Command, spread
from meshdsl.version import __version__

app = typer.Typer(
    name="meshdsl",
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
            "--version", callback=_print_version, is_eager=True, help="Say which version."
        ),
    ] = False,
) -> None:
    """Tensor programs with named dimensions, compiled to one torch program per device."""


for _module in (
    new,
    check,
    fmt,
    explain,
    compile,
    run,
    train,
    generate,
    compare,
    cluster,
    simulate,
    search,
    schedule,
    render,
    rows,
    play,
    lsp,
):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name, cls=Command)(spread(_module.command))
