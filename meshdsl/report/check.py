"""Checking a whole file: every program, every layout, every expectation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source, counted
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations
from meshdsl.named.uncalled import check_uncalled
from meshdsl.pipeline import Options, build_named, front, place_named
from meshdsl.placed.layout import inherited_rules, mesh_of
from meshdsl.report.expect import check_expect


def check_source(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    """Collect everything there is to say about one file; returns a line on what was checked.

    Whether a layout fits does not depend on when values are reduced, so no optimum is searched.
    """
    if options.reduce == "optimal":
        options = replace(options, reduce="deferred")
    own = Diagnostics()
    line = _check(source, options, own)
    broken = any(d.code.startswith("MD00") for d in own.errors)
    diagnostics.add(*(d for d in own if not (broken and d.code in CONSEQUENCES)))
    return line


CONSEQUENCES = ("MD0101", "MD0102", "MD0103", "MD0108", "MD0111", "MD0112", "MD0113")
"""Errors about names that a part of the file may define which could not be read."""


def _check(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    declarations = front(source, options.set_dims, diagnostics)
    _check_declared(declarations, diagnostics)
    programs = list(_programs(declarations, options, diagnostics))
    check_uncalled(declarations, diagnostics)
    if diagnostics.errors:
        return ""
    _check_layouts(programs, declarations, options, diagnostics)
    if not diagnostics.errors:
        for expect in declarations.expects:
            step = partial(check_expect, expect, programs, declarations, diagnostics)
            with_errors(diagnostics, step)
    held = len(declarations.expects)
    counts = f"{counted(len(programs), 'program')}, {counted(held, 'expectation')}"
    return f"{source.name}: fine ({counts})"


def _programs(
    declarations: Declarations, options: Options, diagnostics: Diagnostics
) -> Iterable[named.Program]:
    names = [options.program] if options.program else list(declarations.programs)
    for name in names:
        try:
            yield build_named(declarations, name, options.dtype, diagnostics)
        except DiagnosticError as error:
            diagnostics.add(*error.diagnostics)


def with_errors(diagnostics: Diagnostics, step: Callable[[], object]) -> None:
    """Run a step and keep what it raises, so that the next one is run too."""
    try:
        step()
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)


def _check_declared(declarations: Declarations, diagnostics: Diagnostics) -> None:
    """What meshes and layouts say by themselves, those too that nothing uses."""
    for mesh in declarations.meshes.values():
        with_errors(diagnostics, partial(mesh_of, mesh, declarations))
    for layout in declarations.layouts.values():
        with_errors(diagnostics, partial(inherited_rules, layout, declarations))


def _check_layouts(
    programs: list[named.Program],
    declarations: Declarations,
    options: Options,
    diagnostics: Diagnostics,
) -> None:
    """The chosen layout must fit; of the others it is noted where their mesh does not suit them."""
    _check_layout(programs, declarations, options, diagnostics)
    if options.layout is not None or options.sbp is not None:
        return
    others = [(f"layout `{n}`", replace(options, layout=n)) for n in declarations.layouts]
    others = others[1:] + [(f"sbp `{n}`", replace(options, sbp=n)) for n in declarations.sbps]
    for name, chosen in others:
        own = Diagnostics()
        _check_layout(programs, declarations, chosen, own)
        diagnostics.add(*(_of_another_layout(name, d, options) for d in own))


def _of_another_layout(name: str, diagnostic: Diagnostic, options: Options) -> Diagnostic:
    """What a layout that was not chosen has wrong: a note where other meshes or sizes mend it."""
    on_chosen_mesh = diagnostic.code == "MD0304" and options.mesh is not None
    if diagnostic.severity != "error" and not on_chosen_mesh:
        return diagnostic
    message = f"{name} cannot be used as it is: {diagnostic.message}"
    return replace(diagnostic, severity="note", message=message)


def _check_layout(
    programs: list[named.Program],
    declarations: Declarations,
    options: Options,
    diagnostics: Diagnostics,
) -> None:
    """Errors of one layout in any program; warnings only where every program gives them."""
    found = [Diagnostics() for _ in programs]
    for program, own in zip(programs, found, strict=True):
        with_errors(own, partial(place_named, program, declarations, options, own))
    for own in found:
        diagnostics.add(*own.errors)
    places = [{(d.code, d.span) for d in own} for own in found]
    for diagnostic in found[0] if found else ():
        everywhere = all((diagnostic.code, diagnostic.span) in own for own in places)
        if diagnostic.severity != "error" and everywhere:
            diagnostics.add(diagnostic)
