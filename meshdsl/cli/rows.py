"""`meshdsl rows`: the legal placements of an operator, derived from its factors."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, flag, option
from meshdsl.option_edits import leave_out, refuse


@option
class RowsOptions(AsData):
    """Options of `rows`."""

    every: bool = flag("--all", "Show every sample call, and valid rules that are not used.")


def command(
    given: RowsOptions,
    operator: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATOR",
            help="An operator, such as einsum, add, + or softmax. [default: all of them]",
            show_default=False,
            autocompletion=complete.operators,
        ),
    ] = None,
) -> None:
    """List the sharding rules of an operator, or all operators."""
    with common.reporting(given.json):
        from meshdsl.report.rule_tables import describe, find, meanings, meanings_text, rows_text

        if operator is None:
            if given.every:
                refuse("MD0601", "`--all` needs an operator", leave_out("--all"), "name one")
            listed = meanings()
            if given.json:
                common.print_json(listed)
                return
            typer.echo(meanings_text(listed), nl=False)
            return
        facts = describe(find(operator), given.every)
        if given.json:
            common.print_json(facts)
            return
        typer.echo(rows_text(facts), nl=False)
