"""Commands of the language's reference that are not built yet: each says so."""

from __future__ import annotations

import typer

from meshdsl.cli.common import reporting
from meshdsl.diagnostics import fail

COMMANDS = ("search", "simulate", "new")


def add(app: typer.Typer, name: str) -> None:
    """Register a command that reports MD0909 whatever it is given."""

    def command(context: typer.Context) -> None:
        with reporting():
            help = "see `meshdsl --help`"
            fail("MD0909", f"the command `{name}` is not supported yet", help=help)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, context_settings=settings, hidden=True)(command)
