"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import (
    check,
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
    simulate,
    train,
)
from meshdsl.cli.common import reporting
from meshdsl.cli.options import Command, spread
from meshdsl.diagnostics import fail
from meshdsl.version import __version__

LATER = ("search",)
"""Commands in the language's reference that are not built yet; each reports so."""

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
    simulate,
    render,
    rows,
    play,
    lsp,
):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name, cls=Command)(spread(_module.command))


def _add_later(name: str) -> None:
    """Register a command that always reports MD0909."""

    def command(context: typer.Context) -> None:
        with reporting():
            help = "see `meshdsl --help`"
            fail("MD0909", f"the command `{name}` is not supported yet", help=help)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, context_settings=settings, hidden=True)(command)


for _name in LATER:
    _add_later(_name)
