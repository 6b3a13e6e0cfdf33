"""`meshdsl explain`: what each device holds and does, per source line; or what a code means."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import fail


class Printed(StrEnum):
    """The representations that have a text form."""

    named = "named"
    placed = "placed"
    device = "device"


def command(
    file: Annotated[
        str, typer.Argument(metavar="FILE|CODE", help="A .mdsl file, or a code such as MD0301.")
    ],
    program: common.Program = None,
    mesh: common.Mesh = None,
    layout: common.Layout = None,
    sbp: common.Sbp = None,
    reduce: common.Reduce = common.POLICY,
    message_bytes: common.MessageBytes = common.MESSAGE,
    no_cache: common.NoCache = False,
    settings: common.Set = None,
    dtype: common.DType = None,
    strict: common.Strict = False,
    json: common.Json = False,
    print_after: Annotated[
        Printed | None,
        typer.Option("--print-after", metavar="STAGE", help="Print named, placed or device."),
    ] = None,
) -> None:
    """Say where communication happens, how much, why, and what would remove it."""
    with common.reporting(json) as diagnostics:
        if re.fullmatch(r"[Mm][Dd]\d{1,6}", file):
            _explain_code(file.upper())
            return
        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        made = common.compiled(Path(file), chosen, diagnostics, print_after or "device")
        if print_after is not None:
            printer = import_module(f"meshdsl.{print_after}.printer")
            typer.echo(printer.print_program(getattr(made, print_after)), nl=False)
            return
        if json:
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
