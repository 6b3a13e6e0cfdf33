"""`meshdsl check`: every diagnostic of files, and whether their expectations hold."""

from __future__ import annotations

from pathlib import Path

import typer

from meshdsl.cli import common
from meshdsl.cli.options import Files, Json, Placing, option, pipeline_options
from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.pipeline import Options


@option
class Check(Placing, Json):
    """Options of `check`."""


def command(files: Files, given: Check) -> None:
    """Report what is wrong with files, and whether their `expect` blocks hold."""
    with common.reporting(given.json) as diagnostics:
        chosen = pipeline_options(given)
        checked = []
        for path in files:
            with common.patience(f"checking {path.name}"):
                checked.append(_check(path, chosen, diagnostics))
        if given.strict:
            diagnostics.promote_warnings()
        if given.json:
            common.print_json({"version": 1, "diagnostics": common.as_dicts(diagnostics)})
        elif not diagnostics.errors:
            typer.echo("\n".join(checked))


def _check(path: Path, chosen: Options, diagnostics: Diagnostics) -> str:
    """Check one file; returns a line on the scope of the check."""
    from meshdsl.report.check import check_source
    from meshdsl.syntax.parse import read_source

    try:
        return check_source(read_source(path), chosen, diagnostics)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ""
