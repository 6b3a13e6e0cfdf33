"""`meshdsl fmt`: the canonical form of files."""

from __future__ import annotations

import difflib
import io
import sys
from pathlib import Path

import typer

from meshdsl.cli import common
from meshdsl.cli.options import Files, flag, option
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.syntax.parse import STDIN

COLOURS = {"+": "green", "-": "red", "@": "cyan"}
"""The colours of lines of a difference, by their first sign."""


@option
class Fmt:
    """Options of `fmt`."""

    check: bool = flag("--check", "Write nothing; say which files would change.")
    diff: bool = flag("--diff", "Write nothing; print what would change.")


def command(files: Files, given: Fmt) -> None:
    """Rewrite files in canonical form, comments kept."""
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
    same = text == source.text if piped else text.encode() == path.read_bytes()
    if piped and not (given.check or given.diff):
        sys.stdout.write(text)
    elif not same:
        _tell(path, source, text, given)
    return not same


def _tell(path: Path, source: Source, text: str, given: Fmt) -> None:
    """Say what is otherwise, or write it."""
    if given.diff:
        _print_difference(source, text)
    if given.check or not given.diff:
        typer.echo(f"{'would change' if given.check else 'formatted'} {source.name}")
    if not (given.check or given.diff):
        _write(path, text)


def _print_difference(source: Source, text: str) -> None:
    """Print what leads to the canonical `text`, as `patch` reads it; on a terminal in colour."""
    # Lines end at line feeds alone: a comment may hold other signs that Python splits at.
    before, after = (list(io.StringIO(of, newline="\n")) for of in (source.text, text))
    lines = list(difflib.unified_diff(before, after, source.name, source.name))
    if not lines:
        typer.echo(f"{source.name}: only ends of lines, or the mark at its beginning")
    if not _on_terminal():
        sys.stdout.writelines(map(_ended, lines))
        return
    from rich.console import Console
    from rich.text import Text

    from meshdsl.render import safe

    console = Console(highlight=False)
    for number, line in enumerate("".join(map(_ended, lines)).split("\n")[:-1]):
        style = "bold" if number < 2 else COLOURS.get(line[:1], "")
        console.print(Text("\t".join(map(safe, line.split("\t"))), style), soft_wrap=True)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _ended(line: str) -> str:
    """A line of a difference with its end; one that has none in the file is marked."""
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        common.refuse_writing(path, error)
