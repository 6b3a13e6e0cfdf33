"""`meshdsl check`: every diagnostic of files, and whether their expectations hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import DiagnosticError, Diagnostics
from meshdsl.pipeline import Options


def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", show_default=False)],
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
) -> None:
    """Report what is wrong with files, and whether their `expect` blocks hold."""
    with common.reporting(json) as diagnostics:
        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        checked = []
        for path in files:
            with common.patience(f"checking {path.name}"):
                checked.append(_check(path, chosen, diagnostics))
        if strict:
            diagnostics.promote_warnings()
        if json:
            common.print_json({"version": 1, "diagnostics": common.as_dicts(diagnostics)})
    code = common.exit_code(diagnostics.errors)
    if code:
        raise typer.Exit(code)
    if not json:
        typer.echo("\n".join(checked))


def _check(path: Path, chosen: Options, diagnostics: Diagnostics) -> str:
    """Check one file; what it was checked for, in a line."""
    from meshdsl.report.check import check_source
    from meshdsl.syntax.parse import read_source

    try:
        return check_source(read_source(path), chosen, diagnostics)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ""
