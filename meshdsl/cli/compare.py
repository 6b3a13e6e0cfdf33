"""`meshdsl compare`: one program under several layouts, `sbp` blocks and policies, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import Diagnostics

if TYPE_CHECKING:
    from meshdsl.pipeline import Compilation
    from meshdsl.report.columns import Column


def command(
    file: common.File,
    layouts: Annotated[
        str | None,
        typer.Option("--layouts", "--layout", metavar="A,B", help="Columns: layouts."),
    ] = None,
    sbp: Annotated[
        str | None, typer.Option("--sbp", metavar="S,T", help="Columns: sbp blocks.")
    ] = None,
    reduce: Annotated[
        str | None, typer.Option("--reduce", metavar="P,Q", help="Each under these policies.")
    ] = None,
    program: common.Program = None,
    mesh: common.Mesh = None,
    message_bytes: common.MessageBytes = common.MESSAGE,
    no_cache: common.NoCache = False,
    settings: common.Set = None,
    dtype: common.DType = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="For made-up values.")] = 0,
    no_run: Annotated[bool, typer.Option("--no-run", help="Execute nothing.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PAGE.html", help="Write a page.")
    ] = None,
    strict: common.Strict = False,
    force: common.Force = False,
    json: common.Json = False,
) -> None:
    """Show one program in columns: placements, routes, bytes, and whether the values agree."""
    with common.reporting(json) as diagnostics:
        from meshdsl.report.columns import compile_columns, raise_if_none_works, wishes

        chosen = common.options(
            program,
            mesh,
            None,
            None,
            common.POLICY,
            settings,
            dtype,
            strict,
            message_bytes,
            no_cache,
        )
        if html is not None:
            _check_page(html, force)
        made = common.compiled(file, chosen, diagnostics, "named")
        asked = wishes(made.declarations, layouts, sbp, reduce, common.POLICY)
        with common.patience(f"compiling {file.name} in {len(asked)} columns"):
            columns = compile_columns(made, asked)
        raise_if_none_works(columns)
        compared = _compared(columns, made, None if no_run else seed)
        if html is not None:
            _write(html, compared, made)
        _show(compared, made, json, html)
        _collect(columns, diagnostics)
    code = common.exit_code(diagnostics.errors)
    if code:
        raise typer.Exit(code)


def _check_page(page: Path, force: bool) -> None:
    from meshdsl.cli.compile import check_output

    check_output(page, force)


def _compared(columns: Sequence[Column], made: Compilation, seed: int | None) -> dict[str, Any]:
    """The comparison with what was measured; nothing is run without a seed."""
    from meshdsl.report.columns import NOT_RUN, measure
    from meshdsl.report.compare import compare

    run = NOT_RUN if seed is None else measure(columns, seed)
    return {**compare(columns, made.source), "run": run}


def _show(compared: dict[str, Any], made: Compilation, json: bool, html: Path | None) -> None:
    from meshdsl.report.compare import comparison, measured, sentence
    from meshdsl.report.document import line
    from meshdsl.report.terminal import print_document, text

    if json:
        common.print_json(compared)
    elif html is None:
        print_document(comparison(compared, made.source))
    else:
        typer.echo(text((line(sentence(compared)), *measured(compared))))
        typer.echo(f"wrote {html}; open it in a browser")


def _write(html: Path, compared: dict[str, Any], made: Compilation) -> None:
    from meshdsl.cli.compile import write_whole
    from meshdsl.report.page import page

    write_whole(html, page(compared, made.source))


def _collect(columns: Sequence[Column], diagnostics: Diagnostics) -> None:
    """What the columns had to say, shown at the end; columns under one layout say it once."""
    for column in columns:
        diagnostics.add(*column.diagnostics)
