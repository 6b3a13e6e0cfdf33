"""`meshdsl prove`: whether the operators of a package are right, tried on small samples."""

from __future__ import annotations

from typing import Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import AsData, Strict, option


@option
class ProveOptions(Strict, AsData):
    """Options of `prove`."""


def command(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE",
            help="The package's name after `use`: its entry point.",
            autocompletion=complete.packages,
        ),
    ],
    given: ProveOptions,
) -> None:
    """Test the operators of a package on small samples."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.named.packages import load

        loaded = load(package)
        with common.patience(f"proving {package}"):
            from meshdsl.prove.verdicts import PackageFacts, of_package, verdict_text

            verdicts = of_package(loaded)
        for verdict in verdicts:
            diagnostics.add(*verdict.diagnostics)
        if given.strict:
            diagnostics.promote_warnings()
        if given.json:
            facts: PackageFacts = {
                "version": 1,
                "package": loaded.name,
                "operators": [verdict.facts for verdict in verdicts],
                "diagnostics": common.as_dicts(diagnostics),
            }
            common.print_json(facts)
            return
        for verdict in verdicts:
            common.say_text(verdict_text(verdict))
