"""`meshdsl fmt`: the canonical form of files."""

from __future__ import annotations

from pathlib import Path

import typer

from meshdsl.cli import common
from meshdsl.cli.options import Files, flag, option
from meshdsl.diagnostics import DiagnosticError


@option
class Fmt:
    """Options of `fmt`."""

    check: bool = flag("--check", "Write nothing; say which files would change.")


def command(files: Files, given: Fmt) -> None:
    """Rewrite files in canonical form, comments kept."""
    changed = 0
    with common.reporting() as diagnostics:
        for path in files:
            try:
                changed += _format(path, given.check)
            except DiagnosticError as error:
                diagnostics.add(*error.diagnostics)
    if given.check and changed:
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
        common.refuse_writing(path, error)
