"""Checking a whole file: every program, every layout, every expectation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import Options, build_named, front, place_named
from meshdsl.report.expect import check_expect


def check_source(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    """Collect everything there is to say about one file; returns a line on what was checked."""
    declarations = front(source, options.set_dims, diagnostics)
    programs = list(_programs(declarations, options, diagnostics))
    if diagnostics.errors:
        return ""
    for program in programs:
        _check_layouts(program, declarations, options, diagnostics)
    if not diagnostics.errors:
        for expect in declarations.expects:
            with_errors(
                diagnostics,
                lambda e=expect: check_expect(e, programs, declarations, diagnostics),
            )
    held = len(declarations.expects)
    counts = f"{_count(len(programs), 'program')}, {_count(held, 'expectation')}"
    return f"{source.name}: fine ({counts})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _programs(
    declarations: Declarations, options: Options, diagnostics: Diagnostics
) -> Iterable[named.Program]:
    names = [options.program] if options.program else list(declarations.programs)
    for name in names:
        found: list[named.Program] = []
        with_errors(
            diagnostics,
            lambda n=name, f=found: f.append(
                build_named(declarations, n, options.dtype, diagnostics)
            ),
        )
        yield from found


def with_errors(diagnostics: Diagnostics, step: object) -> None:
    """Run a step and keep what it raises, so that the next one is run too."""
    assert callable(step)
    try:
        step()
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)


def _check_layouts(
    program: named.Program, declarations: Declarations, options: Options, diagnostics: Diagnostics
) -> None:
    """The chosen layout must fit; of the others it is noted where none of the meshes suits them."""
    with_errors(diagnostics, lambda: place_named(program, declarations, options, diagnostics))
    if options.layout is not None:
        return
    for name in list(declarations.layouts)[1:]:
        problem = _problem(program, declarations, replace(options, layout=name))
        if problem is not None and problem.code in _FATAL:
            diagnostics.add(problem)
        elif problem is not None:
            message = f"layout `{name}` cannot be used as it is: {problem.message}"
            diagnostics.add(replace(problem, severity="note", message=message))


_FATAL = ("MD0104", "MD0107", "MD0108", "MD0303")
"""Errors of a layout that no mesh and no size would mend."""


def _problem(
    program: named.Program, declarations: Declarations, options: Options
) -> Diagnostic | None:
    """Why a layout cannot be used on the mesh it would get, or None."""
    own = Diagnostics()
    try:
        place_named(program, declarations, options, own)
    except DiagnosticError as error:
        return error.diagnostics[0]
    return next((d for d in own if d.severity == "warning"), None)
