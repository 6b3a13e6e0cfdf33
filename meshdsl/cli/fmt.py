"""`meshdsl fmt`: the canonical form of files."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.cli import common
from meshdsl.cli.options import Files, flag, option
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.output_files import write_whole
from meshdsl.syntax.parse import STDIN


@option
class Fmt:
    """Options of `fmt`."""

    check: bool = flag("--check", "List the files that would change, and write nothing.")
    diff: bool = flag("--diff", "Show the changes, and write nothing.")


def command(files: Files, given: Fmt) -> None:
    """Format files; comments are kept."""
    changed = 0
    with common.reporting() as diagnostics:
        for path in files:
            try:
                changed += _format(path, given)
            except DiagnosticError as error:
                diagnostics.add(*error.diagnostics)
    if (given.check or given.diff) and changed:
        raise typer.Exit(1)


def _format(path: Path, given: Fmt) -> bool:
    """Format one file; returns whether it has another form."""
    from meshdsl.syntax.format import format_source
    from meshdsl.syntax.parse import read_source

    source = read_source(path)
    piped = str(path) == STDIN
    text = format_source(source)
    same = text == source.text if piped else text.encode() == read_regular(path)
    if piped and not (given.check or given.diff):
        sys.stdout.write(text)
    elif not same:
        _tell(path, source, text, given)
    return not same


def _tell(path: Path, source: Source, text: str, given: Fmt) -> None:
    """Say what is otherwise, or write it."""
    if given.diff:
        common.print_difference(source, text)
    if given.check or not given.diff:
        common.say(f"{'would change' if given.check else 'formatted'} {source.name}")
    if not (given.check or given.diff):
        write_whole(path, text)
