"""`meshdsl explain`: the report of a program per source line, or the meaning of a code."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli import common
from meshdsl.cli.options import Json, Placing, opt, option, pipeline_options
from meshdsl.diagnostics import fail


class Printed(StrEnum):
    """The representations that have a text form."""

    named = "named"
    placed = "placed"
    device = "device"


@option
class Stage:
    """The stage to print instead of the report."""

    print_after: Printed | None = opt("--print-after", "STAGE", "Print named, placed or device.")


@option
class Explain(Placing, Json, Stage):
    """Options of `explain`."""


def command(
    file: Annotated[
        str, typer.Argument(metavar="FILE|CODE", help="A .mdsl file, or a code such as MD0301.")
    ],
    given: Explain,
) -> None:
    """Say where communication happens, how much, why, and what would remove it."""
    with common.reporting(given.json) as diagnostics:
        if re.fullmatch(r"[Mm][Dd]\d{1,6}", file):
            _explain_code(file.upper())
            return
        stage = given.print_after
        chosen = pipeline_options(given)
        made = common.compiled(Path(file), chosen, diagnostics, stage or "device")
        if stage is not None:
            printer = import_module(f"meshdsl.{stage}.printer")
            typer.echo(printer.print_program(getattr(made, stage)), nl=False)
            return
        if given.json:
            common.print_json(made.report)
            return
        from meshdsl.report.explain import explanation
        from meshdsl.report.terminal import print_document

        # Warnings follow on the error output, with carets.
        report = made.report | {"warnings": []}
        print_document(explanation(report, {made.source.name: made.source}))


def _explain_code(code: str) -> None:
    from meshdsl.codes import CODES

    if code not in CODES:
        help = "codes stand in front of every message, such as `error[MD0301]`"
        fail("MD0603", f"there is no code {code}", help=help)
    typer.echo(CODES[code].explanation.rstrip())
