"""`check`: every program of a file, every layout, and every `expect` block.

An `expect` block makes statements about placements, executed collectives and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.analysis import Analysis, analyse, chosen_layouts, of_another_layout
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Edit,
    Fix,
    Related,
    Source,
    Span,
    advice,
    counted,
)
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations
from meshdsl.named.selectors import TENSOR, selects
from meshdsl.pipeline import (
    DEFAULT_POLICY,
    Compilation,
    Known,
    Options,
    lower_placed,
    place_named,
)
from meshdsl.placed import ir as placed
from meshdsl.placed.expect import KINDS, check_head, expected_number, is_about, no_tensor
from meshdsl.placed.placements import Mesh
from meshdsl.report.explanation import explain
from meshdsl.search.fingerprint import outdated
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.report.schema import CollectiveFacts, ReportFacts


def check_source(source: Source, options: Options, diagnostics: Diagnostics) -> str:
    """Collect the diagnostics of one file; returns a line on the scope of the check.

    Whether a layout fits does not depend on when values are reduced, so no optimum is searched.
    """
    analysis = analyse(source, options)
    diagnostics.add(*analysis.diagnostics)
    if analysis.diagnostics.errors:
        return ""
    if not options.set_dims and options.dtype is None:
        diagnostics.add(*outdated(source, analysis.named))
    for step in placement_checks(analysis, options):
        diagnostics.add(*step)
    held = len(analysis.declarations.expects)
    counts = f"{counted(len(analysis.named), 'program')}, {counted(held, 'expectation')}"
    return f"{source.name}: fine ({counts})"


def placement_checks(found: Analysis, options: Options) -> Iterator[Diagnostics]:
    """What only placing shows of a text without errors: the diagnostics of one step at a time.

    Every program is placed under the chosen layout, then under each of the others, which are noted
    where they cannot be used. Expectations follow if nothing is wrong.
    """
    programs = [program for program in found.named.values() if program is not None]
    wrong = False
    for chosen, name in chosen_layouts(found.declarations, options):
        problems, told = Diagnostics(), Diagnostics()
        for program in programs:
            problems.of(partial(_place, program, found, chosen))
        told.add(*(of_another_layout(name, d, options) if name else d for d in problems))
        wrong = wrong or bool(told.errors)
        yield told
    for expect in () if wrong else found.declarations.expects:
        held = Diagnostics()
        held.of(partial(check_expect, expect, programs, found.declarations, held))
        yield held


def _place(program: named.NamedProgram, found: Analysis, options: Options) -> None:
    """Place a program, which may be refused; the stages of a pipeline may be too.

    What is refused with a plan that is not searched for is so only if it is with the asked one.
    """
    policy = "deferred" if options.reduce == "optimal" else options.reduce
    chosen, declarations = replace(options, reduce=policy), found.declarations
    result = place_named(program, declarations, chosen, Diagnostics())
    if result.pipe is None:
        return
    if result.pipe.use is not None and result.pipe.use.asynchronous:
        _check_asynchronous(program, found, chosen)
        return
    try:
        lower_placed(result)
    except DiagnosticError:
        if policy == options.reduce:
            raise
        lower_placed(place_named(program, declarations, options, Diagnostics()))


def _check_asynchronous(program: named.NamedProgram, found: Analysis, options: Options) -> None:
    """Compile a program with asynchronous updates for devices.

    A schedule that devices cannot run (MD0335) is a note: `train --engine reference` trains it.
    """
    name = program.name
    known_stages = Known(found.tree, found.declarations, found.written[name], program)
    compilation = Compilation(
        found.tree.span.source, replace(options, program=name), Diagnostics(), known_stages
    )
    try:
        compilation.checked()
    except DiagnosticError as error:
        if any(d.code != "MD0335" for d in error.diagnostics):
            raise
        notes = (replace(d, severity="note") for d in error.diagnostics)
        raise DiagnosticError(*notes) from None


# --- expectations ----------------------------------------------------------------------------


def check_expect(
    node: ast.Expect,
    programs: list[named.NamedProgram],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compile the subject of the block and compare; MD0401 where it does not hold.

    It is about every one of the `programs`, or about the one that it names.
    """
    options = _options(node, declarations)
    programs = [p for p in programs if is_about(node, p)]
    told = Diagnostics()
    results = [place_named(p, declarations, options, told) for p in programs]
    without_effect = (d for d in told if d.code in WITHOUT_EFFECT and d.severity == "warning")
    # A rule without effect is a mistake that other figures may follow from.
    first = [f"first correct line {d.span.line}: {d.message}" for d in without_effect if d.span]
    problems = Diagnostics()
    reports = [(result.mesh, explain(lower_placed(result))) for result in results]
    for entry in node.entries:
        if isinstance(entry, ast.ExpectPlacement):
            _check_placement(entry, results, problems)
        else:
            _check_figure(entry, node, reports, declarations, problems)
    for problem in problems:
        if first and problem.code == "MD0401":
            problem = replace(problem, help=first[0], fixes=())
        diagnostics.add(problem)


WITHOUT_EFFECT = frozenset({"MD0304", "MD0305", "MD0306"})
"""Codes of rules that have no effect."""


def _options(node: ast.Expect, declarations: Declarations) -> Options:
    check_head(node, declarations)
    is_sbp = node.layout.text in declarations.sbps
    return Options(
        mesh=node.mesh.text if node.mesh else None,
        layout=None if is_sbp else node.layout.text,
        sbp=node.layout.text if is_sbp else None,
        reduce=node.policy.text if node.policy else DEFAULT_POLICY,
    )


def _check_placement(
    entry: ast.ExpectPlacement, programs: list[placed.PlacedProgram], diagnostics: Diagnostics
) -> None:
    """Compare a tensor in every program that has it; MD0402 where none has.

    In a loop a name has values with its dim and without: those of the expected dims are meant.
    """
    path = tuple(n.text for n in entry.tensor)
    with_names = [(p, t) for p in programs for t in p.tensors if t.value.name]
    tensors = [(p, t) for p, t in with_names if selects(path, t.value) == TENSOR]
    if not tensors:
        diagnostics.add(no_tensor(entry, (t.value.label for _, t in with_names)))
    names = {d.dim.text for d in entry.dims}
    meant = [(p, t) for p, t in tensors if set(t.value.type.names) == names]
    if any(t.value.declared is not None for _, t in tensors):
        tensors = meant or tensors
    for program, tensor in tensors:
        problem = _placement_problem(entry, tensor, program)
        if problem:
            where = Related(tensor.value.span, "it is computed here")
            told = f"{'.'.join(path)}: {_shown(tensor, program.mesh)}"
            fixes = () if tensor.placement.op else _expected(entry.span, told)
            why = "or change the layout; `meshdsl explain` shows why it is so"
            help = advice(fixes, why) if fixes else f"change the layout, {why[3:]}"
            diagnostics.add(
                Diagnostic("MD0401", problem, entry.span, related=(where,), help=help, fixes=fixes)
            )


def _shown(tensor: placed.PlacedTensor, mesh: Mesh) -> str:
    """The placement of a tensor, as an expectation is written."""
    return tensor.placement.show(tensor.value.type, mesh)


def _placement_problem(
    entry: ast.ExpectPlacement, tensor: placed.PlacedTensor, program: placed.PlacedProgram
) -> str | None:
    """The difference of a tensor from its expectation, or None. Axes of size 1 do not count."""
    names = tuple(d.dim.text for d in entry.dims)
    actual = _shown(tensor, program.mesh)
    if set(names) != set(tensor.value.type.names):
        return f"`{tensor.value.label}` has other dims: it is {actual}"
    for item in entry.dims:
        asked = tuple(a.text for a in item.axes or () if program.mesh.size_or_one(a.text) > 1)
        wanted = program.mesh.known(asked)
        if tensor.placement.axes_of(item.dim.text) != wanted:
            return f"`{tensor.value.label}` is placed differently: it is {actual}"
    return None


def _check_figure(
    entry: ast.ExpectCount,
    node: ast.Expect,
    reports: list[tuple[Mesh, ReportFacts]],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compare a count or an amount in every program."""
    wanted = expected_number(entry, declarations)
    figures = {report["program"]: _figure(entry, report, mesh) for mesh, report in reports}
    right = [program for program, actual in figures.items() if actual == wanted]
    for program, actual in figures.items():
        if actual != wanted:
            over = f" over {', '.join(a.text for a in entry.axes)}" if entry.axes else ""
            where = f" in `{program}`" if len(figures) > 1 else ""
            what = "bubble (idle share)" if entry.what.text == "bubble" else entry.what.text
            message = f"expected {what}{over} {_said(wanted)}, but it is {_said(actual)}"
            why: str | None = "`meshdsl explain` shows where it comes from"
            fixes = _expected(entry.value.span, str(actual))
            if right:
                why = f"`{right[0]}` meets it"
                fixes = _about_one(node, right[0], ())
            elif len({*figures.values()}) > 1:
                fixes = _about_one(node, program, fixes)
            help = advice(fixes, why)
            problem = Diagnostic("MD0401", f"{message}{where}", entry.span, help=help, fixes=fixes)
            diagnostics.add(problem)


def _about_one(node: ast.Expect, program: str, fixes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """The fix that lets a block be about one program, with the edits of `fixes`."""
    name = node.layout.span
    about = Edit(Span(name.source, name.end, name.end), f" for {program}")
    edits = (about, *(edit for fix in fixes for edit in fix.edits))
    title = f"write `expect {node.layout.text} for {program}`"
    return (Fix(title, edits, safe=False),)


def _expected(span: Span, text: str) -> tuple[Fix, ...]:
    """The fix that expects what there is."""
    return (Fix(f"expect `{text}`", (Edit(span, text),), safe=False),)


def _said(number: int | Fraction) -> str:
    return f"{number:,}" if isinstance(number, int) else str(number)


def _figure(entry: ast.ExpectCount, report: ReportFacts, mesh: Mesh) -> int | Fraction:
    """The value of a figure in the report; without a pipeline nothing is idle or in flight."""
    what = entry.what.text
    if what in KINDS:
        return sum(int(c["count"]) for c in report["collectives"] if _counts(entry, c, mesh))
    pipeline = report.get("pipeline")
    match what:
        case "memory":
            return report["memory"]["peak"]
        case "bubble":
            return Fraction(pipeline["bubble"] if pipeline else 0)
        case "in_flight":
            return max(pipeline["in_flight"]) if pipeline else 0
    totals = report["totals"]
    figures = {
        "wire_bytes": totals["wire_bytes"],
        "cluster_wire_bytes": totals["cluster_wire_bytes"],
        "collectives": totals["collectives"],
        "flops_per_device": totals["flops_per_device"],
    }
    return figures[what]


def _counts(entry: ast.ExpectCount, collective: CollectiveFacts, mesh: Mesh) -> bool:
    if collective["kind"] != entry.what.text:
        return False
    if entry.axes is None:
        return True
    asked = tuple(axis.text for axis in entry.axes)
    return {*mesh.known(asked)} == {*mesh.known(tuple(collective["axes"]))}
