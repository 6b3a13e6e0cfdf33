"""`meshdsl fmt`: the canonical form of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli.common import reporting
from meshdsl.diagnostics import Diagnostic, DiagnosticError


def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", show_default=False)],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say which files would change.")
    ] = False,
) -> None:
    """Rewrite files in canonical form, comments kept."""
    changed = 0
    with reporting() as diagnostics:
        for path in files:
            try:
                changed += _format(path, check)
            except DiagnosticError as error:
                diagnostics.add(*error.diagnostics)
        if diagnostics.errors:
            raise DiagnosticError
    if check and changed:
        raise typer.Exit(1)


def _format(path: Path, check: bool) -> bool:
    from meshdsl.syntax.format import format_source
    from meshdsl.syntax.parse import read_source

    source = read_source(path)
    text = format_source(source)
    if text.encode() == path.read_bytes():
        return False
    typer.echo(f"{'would change' if check else 'formatted'} {source.name}")
    if not check:
        _write(path, text)
    return True


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        help = "check the space and the permissions there"
        raise DiagnosticError(Diagnostic("MD0501", message, help=help)) from None
