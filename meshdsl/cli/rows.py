"""`meshdsl rows`: the legal placements of an operator, derived from its factors."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, flag, option


@option
class RowsOptions(AsData):
    """Options of `rows`."""

    every: bool = flag("--all", "Show every sample call, and valid rules that are not used.")


def command(
    operator: Annotated[
        str,
        typer.Argument(
            metavar="OPERATOR",
            help="An operator, such as einsum, add, + or softmax.",
            autocompletion=complete.operators,
        ),
    ],
    given: RowsOptions,
) -> None:
    """List the sharding rules of an operator."""
    with common.reporting(given.json):
        from meshdsl.report.rule_tables import describe, find, rows_text

        facts = describe(find(operator), given.every)
        if given.json:
            common.print_json(facts)
            return
        typer.echo(rows_text(facts), nl=False)
