"""`meshdsl check`: every diagnostic of files, and whether their expectations hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from meshdsl.cli import common
from meshdsl.cli.options import Files, Json, Placing, flag, option, pipeline_options
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Fix,
    Source,
    counted,
    fail,
)
from meshdsl.pipeline import Options


@option
class Check(Placing, Json):
    """Options of `check`."""

    fix: bool = flag("--fix", "Carry out the fixes that leave no choice, in the files.")
    diff: bool = flag("--diff", "With --fix: write nothing, show what would change.")


def command(files: Files, given: Check) -> None:
    """Report what is wrong with files, and whether their `expect` blocks hold."""
    with common.reporting(given.json) as diagnostics:
        if given.diff and not given.fix:
            fail("MD0601", "`--diff` goes with `--fix`", help="write `--fix --diff`")
        chosen = pipeline_options(given)
        checked: list[str] = []
        done: list[tuple[Diagnostic, Fix]] = []
        for path in files:
            with common.patience(f"checking {path.name}"):
                if given.fix:
                    done += _fix(path, chosen, given, diagnostics, checked)
                else:
                    checked.append(_check(path, chosen, diagnostics))
        if given.strict:
            diagnostics.promote_warnings()
        if given.json:
            common.print_json(_data(diagnostics, done if given.fix else None))
        elif not diagnostics.errors:
            typer.echo("\n".join(filter(None, checked)))


def _check(path: Path, chosen: Options, diagnostics: Diagnostics) -> str:
    """Check one file; returns a line on the scope of the check."""
    from meshdsl.report.check import check_source
    from meshdsl.syntax.parse import read_source

    try:
        return check_source(read_source(path), chosen, diagnostics)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ""


def _data(diagnostics: Diagnostics, done: list[tuple[Diagnostic, Fix]] | None) -> dict[str, Any]:
    """What `--json` prints; with `--fix`, what was done too."""
    data: dict[str, Any] = {"version": 1, "diagnostics": common.as_dicts(diagnostics)}
    if done is not None:
        data["fixed"] = [{"title": fix.title, **common.as_dicts([of])[0]} for of, fix in done]
    return data


# --- fixes -----------------------------------------------------------------------------------


def _fix(
    path: Path, chosen: Options, given: Check, diagnostics: Diagnostics, checked: list[str]
) -> tuple[tuple[Diagnostic, Fix], ...]:
    """Carry out the fixes of one file, or show them; returns them."""
    from meshdsl.report.check import check_source
    from meshdsl.report.fix import fixed, with_line_ends_of
    from meshdsl.syntax.parse import read_source

    def check(source: Source) -> Diagnostics:
        found = Diagnostics()
        lines[source.text] = check_source(source, chosen, found)
        return found

    lines: dict[str, str] = {}
    try:
        source = read_source(path)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ()
    found = fixed(source, check)
    if found.text != source.text and not given.diff:
        raw = path.read_bytes().decode("utf-8")
        common.write_whole(path, with_line_ends_of(raw, found.text))
    text = source.text if given.diff else found.text
    diagnostics.add(*(check(source) if given.diff else found.left))
    checked.append(lines[text])
    if given.diff and not given.json:
        typer.echo(common.unified_diff(source, found.text), nl=False)
    elif not given.json:
        _tell(source.name, found.done, found.left)
    return found.done


def _tell(name: str, done: tuple[tuple[Diagnostic, Fix], ...], left: Diagnostics) -> None:
    """Say what was fixed; places are those in the text before each fix."""
    for diagnostic, fix in done:
        assert diagnostic.span is not None
        place = f"{name}:{diagnostic.span.line}:{diagnostic.span.column}"
        typer.echo(f"{place}: {diagnostic.code}: {fix.title}")
    others = sum(d.severity != "note" for d in left)
    if done or others:
        typer.echo(f"{name}: fixed {len(done)} of {counted(len(done) + others, 'problem')}")
