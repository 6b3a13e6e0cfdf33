"""`meshdsl check`: every diagnostic of files, and whether their expectations hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.carets import DiagnosticFacts
from meshdsl.cli import common
from meshdsl.cli.options import AsData, Files, PlacingOptions, flag, option, pipeline_options
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Fix,
    Source,
    counted,
)
from meshdsl.option_edits import give, refuse
from meshdsl.output_files import write_whole
from meshdsl.pipeline import Options
from meshdsl.syntax.parse import STDIN

if TYPE_CHECKING:
    from meshdsl.report.autofix import Fixed


@option
class Check(PlacingOptions, AsData):
    """Options of `check`."""

    fix: bool = flag("--fix", "Apply unambiguous fixes in place.")
    diff: bool = flag("--diff", "With --fix: show the changes, and write nothing.")


def command(files: Files, given: Check) -> None:
    """Report errors in files, and test their `expect` blocks."""
    with common.reporting(given.json) as diagnostics:
        if given.diff and not given.fix:
            refuse("MD0601", "`--diff` shows what `--fix` would change", give("--fix"))
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
        elif not diagnostics.errors and not _prints_program(files, given):
            for line in filter(None, checked):
                common.say(line)


def _prints_program(files: list[Path], given: Check) -> bool:
    """Whether the standard output is a fixed program, and nothing else may stand there."""
    return given.fix and not given.diff and any(str(path) == STDIN for path in files)


def _check(path: Path, chosen: Options, diagnostics: Diagnostics) -> str:
    """Check one file; returns a line on the scope of the check."""
    from meshdsl.report.checks import check_source
    from meshdsl.syntax.parse import read_source

    try:
        return check_source(read_source(path), chosen, diagnostics)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ""


class FixedFacts(DiagnosticFacts):
    """A diagnostic that was fixed, and how."""

    title: str


class CheckFacts(TypedDict):
    """`check`: what is wrong; with `--fix`, what was done too."""

    version: int
    diagnostics: list[DiagnosticFacts]
    fixed: NotRequired[list[FixedFacts]]


def _data(diagnostics: Diagnostics, done: list[tuple[Diagnostic, Fix]] | None) -> CheckFacts:
    """What `--json` prints; with `--fix`, what was done too."""
    data: CheckFacts = {"version": 1, "diagnostics": common.as_dicts(diagnostics)}
    if done is not None:
        data["fixed"] = [{"title": fix.title, **common.as_dicts([of])[0]} for of, fix in done]
    return data


# --- fixes -----------------------------------------------------------------------------------


def _fix(
    path: Path, chosen: Options, given: Check, diagnostics: Diagnostics, checked: list[str]
) -> tuple[tuple[Diagnostic, Fix], ...]:
    """Carry out the fixes of one file, or show them; returns them."""
    from meshdsl.report.autofix import fixed
    from meshdsl.report.checks import check_source
    from meshdsl.syntax.parse import read_source

    def check(source: Source) -> Diagnostics:
        result = Diagnostics()
        lines[source.text] = check_source(source, chosen, result)
        return result

    lines: dict[str, str] = {}
    try:
        source = read_source(path)
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        return ()
    result = fixed(source, check)
    diagnostics.add(*(check(source) if given.diff else result.left))
    checked.append(lines[source.text if given.diff else result.text])
    if given.diff:
        if result.done and not given.json:
            common.print_difference(source, result.text)
        return result.done
    if str(path) != STDIN and result.done:
        _write(path.resolve(), result.text)
    elif str(path) == STDIN and not given.json:
        sys.stdout.write(result.text)
    if not given.json:
        _tell(source.name, result, to_errors=str(path) == STDIN)
    return result.done


def _write(path: Path, text: str) -> None:
    """Write a fixed file, with the line ends that it has."""
    from meshdsl.report.autofix import with_line_ends_of

    raw = read_regular(path).decode("utf-8")
    write_whole(path, with_line_ends_of(raw, text))


def _tell(name: str, found: Fixed, to_errors: bool) -> None:
    """Say what was fixed; places are those in the text before each fix."""
    for diagnostic, fix in found.done:
        assert diagnostic.span is not None
        place = f"{name}:{diagnostic.span.line}:{diagnostic.span.column}"
        common.say(f"{place}: {diagnostic.code}: {fix.title}", to_errors)
    every = len(found.done) + sum(d.severity != "note" for d in found.left)
    if every:
        said = f"{name}: fixed {len(found.done)} of {counted(every, 'problem')}"
        common.say(said, to_errors)
