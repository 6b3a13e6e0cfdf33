"""`meshdsl compare`: one program under several layouts, `sbp` blocks and policies, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import (
    AsData,
    ClusterOptions,
    File,
    Force,
    SearchOptions,
    Sizes,
    Strict,
    Which,
    flag,
    opt,
    option,
    pipeline_options,
)
from meshdsl.diagnostics import Diagnostics
from meshdsl.output_files import write_whole
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.pipeline import Compilation
    from meshdsl.report.document import Block
    from meshdsl.report.schema import ComparisonFacts


@option
class Measured:
    """Options of runs of the columns, and the output page."""

    seed: int = opt("--seed", "S", "The seed of the random values.", 0)
    no_run: bool = flag("--no-run", "Do not execute the columns.")
    html: Path | None = opt("--html", "PAGE.html", "Write an interactive page.")


@option
class Compare(Which, SearchOptions, ClusterOptions, Sizes, Measured, Strict, Force, AsData):
    """Options of `compare`."""

    layouts: str | None = opt(
        "--layouts --layout",
        "A,B",
        "Compare these layouts.",
        completed=complete.declared(ast.LayoutDecl, many=True),
    )
    sbp: str | None = opt(
        "--sbp", "S,T", "Compare these sbp blocks.", completed=complete.declared(ast.Sbp, many=True)
    )
    reduce: str | None = opt(
        "--reduce",
        "P,Q",
        "Compare each under these reduction policies.",
        completed=complete.policies(many=True),
    )


def command(file: File, given: Compare) -> None:
    """Compare layouts side by side, and execute them."""
    with common.reporting(given.json) as diagnostics:
        chosen = pipeline_options(given)
        if given.html is not None:
            common.check_output(given.html, given.force, file)
        compilation = common.compiled(file, chosen, diagnostics, "named")
        compared = compare_columns(compilation, given, diagnostics, measured=not given.no_run)
        if given.html is not None:
            _write(given.html, compared, compilation)
        _show(compared, compilation, given)


def compare_columns(
    made: Compilation, given: Compare, diagnostics: Diagnostics, measured: bool
) -> ComparisonFacts:
    """The comparison of the chosen columns; collects their diagnostics.

    Raises:
        DiagnosticError: an unknown column, one that is requested twice, or none that compiles.
    """
    from meshdsl import columns
    from meshdsl.backends.engines.compare_run import measure
    from meshdsl.report.comparison import NOT_RUN, compare

    asked = columns.wishes(
        made.declarations,
        given.layouts,
        given.sbp,
        given.reduce,
        made.options.reduce,
        made.options.mesh,
    )
    with common.patience(f"compiling {made.source.name} in {len(asked)} columns"):
        compiled = columns.compile_columns(made, asked)
    columns.raise_if_none_works(compiled)
    ran = measure(compiled, given.seed) if measured else NOT_RUN
    for column in compiled:
        diagnostics.add(*column.diagnostics)
    return {**compare(compiled, made.source), "run": ran}


def _show(compared: ComparisonFacts, made: Compilation, given: Compare) -> None:
    from meshdsl.report.comparison import comparison, measured, sentence
    from meshdsl.report.document import line
    from meshdsl.report.terminal import print_document, text

    if given.json:
        common.print_json(compared)
    elif given.html is None:
        print_document((*comparison(compared, made.source), *_others(compared, made, given)))
    else:
        typer.echo(text((line(sentence(compared)), *measured(compared["run"]))))
        common.say(f"wrote {given.html}; open it in a browser")


def _others(compared: ComparisonFacts, made: Compilation, given: Compare) -> Iterator[Block]:
    """The layouts that stand beside those of the columns, where none were named."""
    from meshdsl.columns import layouts_on
    from meshdsl.report.document import Gap, line

    shown = {column["layout"] for column in compared["columns"]}
    others = [n for n in layouts_on(made.declarations, made.options.mesh) if n not in shown]
    if others and not (given.layouts or given.sbp or given.reduce):
        yield Gap()
        yield line(f"Also on this mesh: {', '.join(others)}. `--layouts A,B` chooses.", "muted")


def _write(html: Path, compared: ComparisonFacts, made: Compilation) -> None:
    from meshdsl.report.page import page

    write_whole(html, page(compared, made.source))
