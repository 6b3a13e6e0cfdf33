"""`check`: every program of a file, every layout, and every `expect` block.

An `expect` block makes statements about placements, executed collectives and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Related,
    Source,
    counted,
    did_you_mean,
    fail,
)
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations, constant_integer, unknown
from meshdsl.named.uncalled import check_uncalled
from meshdsl.pipeline import Options, build_named, check_policy, front, lower_placed, place_named
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.layout import TENSOR, inherited_rules, mesh_of, selects
from meshdsl.report.explain import explain
from meshdsl.syntax import ast


def check_source(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    """Collect the diagnostics of one file; returns a line on the scope of the check.

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
"""Errors about names whose definition may be in a part of the file that was not parsed."""


def _check(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    declarations = front(source, options.set_dims, diagnostics)
    check_declared(declarations, diagnostics)
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
    """Run a step and collect its errors, so that the next one runs too."""
    try:
        step()
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)


def check_declared(declarations: Declarations, diagnostics: Diagnostics) -> None:
    """Check meshes and layouts by themselves, unused ones too."""
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
    """Check that the chosen layout fits; note the others that do not fit their mesh."""
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
    """A diagnostic of a layout that was not chosen: a note if another mesh or size resolves it."""
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
    """Report errors of one layout in any program; warnings only if every program gives them."""
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


# --- expectations ----------------------------------------------------------------------------

FIGURES = ("wire_bytes", "cluster_wire_bytes", "collectives", "flops_per_device")
KINDS = tuple(kind for kind, c in COLLECTIVES.items() if c.moves)


def check_expect(
    node: ast.Expect,
    programs: list[named.Program],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compile the subject of the block and compare; MD0401 where it does not hold."""
    options = _options(node, declarations)
    results = [place_named(p, declarations, options, Diagnostics()) for p in programs]
    reports = [explain(lower_placed(result)) for result in results]
    for entry in node.entries:
        if isinstance(entry, ast.ExpectPlacement):
            step = partial(_check_placement, entry, results, declarations, diagnostics)
        else:
            step = partial(_check_figure, entry, reports, declarations, diagnostics)
        with_errors(diagnostics, step)


def _options(node: ast.Expect, declarations: Declarations) -> Options:
    for kind, name, known in (
        ("layout", node.layout, [*declarations.layouts, *declarations.sbps]),
        ("mesh", node.mesh, declarations.meshes),
    ):
        if name is not None and name.text not in known:
            raise_unknown(kind, name, list(known))
    is_sbp = node.layout.text in declarations.sbps
    options = Options(
        mesh=node.mesh.text if node.mesh else None,
        layout=None if is_sbp else node.layout.text,
        sbp=node.layout.text if is_sbp else None,
    )
    if node.policy is None:
        return options
    check_policy(node.policy.text, node.policy.span)
    return replace(options, reduce=node.policy.text)


def raise_unknown(kind: str, name: ast.Name, known: list[str]) -> None:
    """Raise MD0108 for a name in the head of an `expect`."""
    raise DiagnosticError(unknown("MD0108", kind, name, known))


def _check_placement(
    entry: ast.ExpectPlacement,
    programs: list[placed.Program],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compare a tensor in every program that has it; MD0402 where none has."""
    for item in entry.dims:
        if item.dim.text not in declarations.dims:
            raise DiagnosticError(unknown("MD0101", "dim", item.dim, list(declarations.dims)))
        _check_axes(item.axes or (), programs[0].mesh.names if programs else ())
    path = tuple(n.text for n in entry.tensor)
    named_ = [(p, t) for p in programs for t in p.tensors if t.value.name]
    found = [(p, t) for p, t in named_ if selects(path, t.value) == TENSOR]
    if not found:
        labels = sorted({t.value.label for _, t in named_})
        help = unknown("MD0402", "tensor", entry.tensor[-1], labels).help
        message = f"`{'.'.join(path)}` is no tensor of the program; nothing is checked"
        diagnostics.add(Diagnostic("MD0402", message, entry.span, "warning", help=help))
    for program, tensor in found:
        problem = _placement_problem(entry, tensor, program)
        if problem:
            where = Related(tensor.value.span, "it is computed here")
            help = "change the layout, or what is expected; `meshdsl explain` shows why it is so"
            diagnostics.add(Diagnostic("MD0401", problem, entry.span, related=(where,), help=help))


def _placement_problem(
    entry: ast.ExpectPlacement, tensor: placed.Tensor, program: placed.Program
) -> str | None:
    """The difference of a tensor from its expectation, or None. Axes of size 1 do not count."""
    names = tuple(d.dim.text for d in entry.dims)
    actual = tensor.placement.show(tensor.value.type)
    if set(names) != set(tensor.value.type.names):
        return f"`{tensor.value.label}` has other dims: it is {actual}"
    for item in entry.dims:
        wanted = tuple(a.text for a in item.axes or () if program.mesh.size_or_one(a.text) > 1)
        if tensor.placement.axes_of(item.dim.text) != wanted:
            return f"`{tensor.value.label}` is placed otherwise: it is {actual}"
    return None


def _check_figure(
    entry: ast.ExpectCount,
    reports: list[dict[str, Any]],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compare a count or an amount in every program."""
    wanted = _number(entry, declarations)
    for report in reports:
        _check_axes(entry.axes or (), report["mesh"])
        actual = _figure(entry, report)
        if actual != wanted:
            over = f" over {', '.join(a.text for a in entry.axes)}" if entry.axes else ""
            message = f"expected {entry.what.text}{over} {wanted:,}, and it is {actual:,}"
            help = "`meshdsl explain` shows each collective and why it is there"
            diagnostics.add(Diagnostic("MD0401", message, entry.span, help=help))


def _figure(entry: ast.ExpectCount, report: dict[str, Any]) -> int:
    """The value of a figure in the report; MD0402 where there is no such figure."""
    what = entry.what.text
    if what in KINDS:
        return sum(c["count"] for c in report["collectives"] if _counts(entry, c))
    if what in FIGURES and entry.axes is None:
        return int(report["totals"][what])
    if what in FIGURES:
        help = f"write `{what}: N`, without `over`"
        fail("MD0402", f"`{what}` is not counted by axis", entry.span, help=help)
    known = [*KINDS, *FIGURES]
    help = did_you_mean(what, known) or f"there are {', '.join(known)}, and `tensor: [dims]`"
    fail("MD0402", f"`{what}` is nothing that can be expected", entry.span, help=help)


def _check_axes(axes: tuple[ast.Name, ...], known: Iterable[str]) -> None:
    """Raise MD0402 for an axis that the mesh does not have."""
    for axis in axes:
        if axis.text not in known:
            raise DiagnosticError(unknown("MD0402", "mesh axis", axis, list(known)))


def _number(entry: ast.ExpectCount, declarations: Declarations) -> int:
    if isinstance(entry.value, ast.Number) and entry.value.value == 0:
        return 0
    sizes = {name: dim.size for name, dim in declarations.dims.items()}
    return constant_integer(entry.value, sizes, 2**63 - 1)


def _counts(entry: ast.ExpectCount, collective: dict[str, Any]) -> bool:
    if collective["kind"] != entry.what.text:
        return False
    return entry.axes is None or {a.text for a in entry.axes} == set(collective["axes"])
