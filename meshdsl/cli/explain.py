"""`meshdsl explain`: the report of a program per source line, or the meaning of a code."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli import common, complete
from meshdsl.cli.options import (
    AsData,
    PlacingOptions,
    flag,
    only_one,
    opt,
    option,
    pipeline_options,
)
from meshdsl.diagnostics import advice, all_closest, fail
from meshdsl.option_edits import replace_argument

if TYPE_CHECKING:
    from meshdsl.codes import DiagnosticCode
    from meshdsl.report.document import Document
    from meshdsl.report.focus import Focus
    from meshdsl.report.schema import ReportFacts


REST = "--all shows every line; --line N, --tensor NAME and --top N a part of them."


class Printed(StrEnum):
    """The representations that have a text form."""

    named = "named"
    placed = "placed"
    device = "device"


@option
class PrintAfter:
    """The stage to print instead of the report."""

    print_after: Printed | None = opt(
        "--print-after", "STAGE", "Print the program after this stage: named, placed or device."
    )


@option
class Shown:
    """Options of the part of the report that is shown."""

    every: bool = flag("--all", "Show every line.")
    top: int | None = opt("--top", "N", "Show the N largest collectives.", min=1)
    line: int | None = opt("--line", "N", "Show what this line of the file computes and sends.")
    tensor: str | None = opt(
        "--tensor",
        "NAME",
        "Show where this tensor is computed and sent.",
        completed=complete.tensors,
    )


@option
class Explain(Shown, PlacingOptions, AsData, PrintAfter):
    """Options of `explain`."""


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|CODE",
            help="A .mdsl file (- reads the standard input), or a code such as MD0301.",
            autocompletion=complete.codes,
        ),
    ],
    given: Explain,
) -> None:
    """Show what each device stores, computes and sends, and why."""
    with common.reporting(given.json) as diagnostics:
        if re.fullmatch(r"[Mm][Dd]\d{1,6}", file):
            _explain_code(file.upper())
            return
        focus = focus_of(given)
        stage = given.print_after
        chosen = pipeline_options(given)
        compilation = common.compiled(Path(file), chosen, diagnostics, stage or "device")
        if stage is not None:
            printer = import_module(f"meshdsl.{stage}.printer")
            common.say_text(printer.print_program(getattr(compilation, stage)))
            return
        if given.json:
            common.print_json(compilation.advised)
            return
        from meshdsl.report.focus import focused
        from meshdsl.report.terminal import print_document

        # Warnings follow on the error output, with carets.
        report: ReportFacts = {**compilation.advised, "warnings": []}
        print_document(focused(report, {compilation.source.name: compilation.source}, focus, REST))


def focus_of(given: Explain) -> Focus:
    """The part of the report to show. Raises MD0601 for options of which one has no effect."""
    from meshdsl.report.focus import Focus

    for part in ("top", "line", "tensor"):
        for other in ("every", "json", "print_after"):
            only_one(given, part, other)
    only_one(given, "json", "print_after")
    only_one(given, "every", "print_after")
    return Focus(given.every, given.top, given.line, given.tensor)


def _explain_code(code: str) -> None:
    from meshdsl.codes import CODES
    from meshdsl.report.terminal import print_document

    if code not in CODES:
        where = "every message begins with its code, such as `error[MD0301]`"
        fixes = [replace_argument(code, near, safe=False) for near in all_closest(code, [*CODES])]
        help = f"{advice(fixes)}; {where}" if fixes else where
        fail("MD0603", f"there is no code {code}", help=help, fixes=tuple(fixes))
    print_document(_explained(CODES[code]))


def _explained(record: DiagnosticCode) -> Document:
    """A code's title and meaning, a wrong example where there is one, and the way out."""
    from meshdsl.report.document import Gap, Listing, line

    wrong = "\n".join(f"    {each}" for each in record.wrong.split("\n"))
    example = (Gap(), Listing.of(wrong)) if record.wrong else ()
    title = line(f"{record.code}: {record.title}", "strong")
    return (title, Gap(), line(record.meaning), *example, Gap(), line(record.way_out))
