"""`meshdsl rows`: the legal placements of an operator, derived from its factors."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import common


def command(
    operator: Annotated[
        str, typer.Argument(metavar="OPERATOR", help="Such as einsum, add, + or softmax.")
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Every sample call, and rows that hold but are not used.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Say what an operator's operands and results may be along one mesh axis."""
    with common.reporting(json):
        from meshdsl.report.rows import describe, find, rows_text

        found = describe(find(operator), every)
        if json:
            common.print_json(found)
            return
        typer.echo(rows_text(found), nl=False)
