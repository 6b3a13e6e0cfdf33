"""The problem of a request, or one for each shape of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from meshdsl.cluster.profile import refuse_unnamed
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import (
    DiagnosticError,
    Diagnostics,
    Source,
    Span,
    counted,
)
from meshdsl.named.ir import loops_of
from meshdsl.option_edits import give, leave_out, refuse, unknown_value
from meshdsl.pipeline import Compilation, timing_of
from meshdsl.placed.layout import resolve_layout, resolve_mesh
from meshdsl.placed.lint import lint
from meshdsl.placed.pipelined import piped
from meshdsl.placed.placements import Mesh
from meshdsl.search.budget import Budget
from meshdsl.search.candidate import PLAIN, Execution, Rules, SearchRule, StageStart, StartLayout
from meshdsl.search.pipeline_search import check
from meshdsl.search.problem import OBJECTIVES, Problem
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import shapes, timed
from meshdsl.syntax.symbols import ROLES

BY_LAYOUTS = (None, "layouts", "exhaustive")
"""The methods beside which the layouts of the file are looked at."""


def problems(request: SearchRequest, made: Compilation) -> tuple[Problem, ...]:
    """The problem on the mesh of a program's options, or on each shape of it of `devices`.

    Raises a diagnostic.
    """
    mesh = _axes_of(request, made)
    meshes = [mesh] if request.devices is None else list(shapes(mesh, request.devices))
    if not meshes:
        message = f"{request.devices} devices need a mesh, and the program has none"
        refuse("MD0645", message, give("--mesh", "data:1,model:1", safe=False), "name other axes")
    meshes = _in_parts(request, made, meshes)
    _check_pipeline(request, made, mesh, meshes)
    options = replace(made.options, cluster=request.cluster)
    machines = timed(meshes, lambda mesh: timing_of(made.declarations, options, mesh))
    if request.fix:  # What is kept speaks of tensors, as it does where the result is compiled.
        made = made.under(replace(made.options, layout=request.fix), made.diagnostics)
    budget = Budget()
    return tuple(_problem(request, made, mesh, timing, budget) for mesh, timing in machines)


def _axes_of(request: SearchRequest, made: Compilation) -> Mesh:
    """The mesh that is asked for.

    Where its sizes are searched and none is named, the first of most axes of those of the file:
    over one axis few dims are divided by a large number of devices.
    """
    declared, options = made.declarations, made.options
    if request.devices is not None and options.mesh is None and declared.meshes:
        return max((resolve_mesh(declared, name) for name in declared.meshes), key=_axes)
    return resolve_mesh(declared, options.mesh, options.layout or "")


def _in_parts(request: SearchRequest, made: Compilation, meshes: list[Mesh]) -> list[Mesh]:
    """The meshes with the parts of axes that the layouts of the request name.

    Without those on which there are no such parts. Raises MD0318 where there are on none.
    """
    options = (("--fix", request.fix), ("--from", request.start))
    texts = [(option, text) for option, text in options if text]
    in_parts, problems = list[Mesh](), Diagnostics()
    for mesh in meshes:
        refined = problems.of(partial(_with_parts, texts, made, mesh))
        in_parts += [] if refined is None else [refined]
    if not in_parts:
        problems.raise_errors()
    return in_parts


def _with_parts(texts: list[tuple[str, str]], made: Compilation, mesh: Mesh) -> Mesh:
    """A mesh with the parts that layouts name, each given by an option."""
    for option, text in texts:
        mesh = resolve_layout(made.declarations, text, mesh, option=option).mesh
    return mesh


def _axes(mesh: Mesh) -> int:
    return len(mesh.axes)


def _problem(
    request: SearchRequest,
    made: Compilation,
    mesh: Mesh,
    timing: Timing | None,
    budget: Budget,
) -> Problem:
    """The problem on one mesh. Raises MD0302 for rules of the request that contradict."""
    fix = StartLayout("none", ())
    if request.fix:
        fix = _start(request, made, mesh, "--fix", request.fix)
    fixed = fix.rules
    if request.max_rules is not None and len(fixed) > request.max_rules:
        rules = counted(len(fixed), "rule")
        message = f"`--fix` has {rules}, `--max-rules` allows {request.max_rules}"
        more = give("--max-rules", str(len(fixed)), safe=False)
        refuse("MD0601", message, more, "fix fewer rules")
    objective = _objective(request, timing)
    # By time few tensors are waited for: their bound takes no time to speak of.
    certificate = request.certificate or objective == "time"
    # What was not looked at has to be bounded by something.
    limited = request.budget is not None or request.per_tensor
    certificate |= objective == "bytes" and limited
    if request.certificate and objective == "memory":
        fixes = [give("--objective", "bytes", safe=False), leave_out("--certificate", safe=False)]
        refuse("MD0646", "no bound of memory is known over per-tensor plans", fixes)
    request = replace(request, certificate=certificate)
    if fix.execution.schedule is not None:
        request = replace(request, pipeline=_checked_axis(request, made, mesh, fix))
    start = _start(request, made, mesh, "--from", request.start) if request.start else None
    return Problem(
        made.named,
        mesh,
        objective,
        request,
        timing,
        fixed=fixed,
        execution=fix.execution,
        start=start,
        declared=tuple(_declared(request, made, mesh, fix)),
        budget=budget,
    )


def _checked_axis(
    request: SearchRequest, made: Compilation, mesh: Mesh, kept: StartLayout
) -> str | None:
    """The axis that the stages of a layout to be kept are on.

    Raises MD0601 for another one than is asked for, MD0647 where none can be searched.
    """
    axis = _stage_axis(made, mesh, kept.rules, kept.execution.cuts)
    assert axis is not None, "a layout without stages has no schedule"
    if request.pipeline not in (None, axis):
        span = Span(Source("--fix", request.fix or ""), 0, len(request.fix or ""))
        message = f"this layout has its stages on `{axis}`"
        fixes = [give("--pipeline", axis, safe=False), leave_out("--pipeline", safe=False)]
        refuse("MD0601", message, fixes, span=span)
    check(made.named, axis, [mesh])
    return axis


def _stage_axis(
    made: Compilation, mesh: Mesh, rules: Rules, cuts: tuple[StageStart, ...]
) -> str | None:
    """The axis that the stages of a layout are on; None where it has none on this mesh."""
    loops = {loop.dim.name for loop in loops_of(made.named)}
    axes = [cut.axis for cut in cuts]
    axes += [a for r in rules if r.dim in loops and not r.selector for a in r.axes]
    return next((a for a in axes if a in mesh.names and mesh.size(a) > 1), None)


def _declared(
    request: SearchRequest, made: Compilation, mesh: Mesh, kept: StartLayout
) -> Iterator[StartLayout]:
    """The layouts of the file that the request allows, and that this mesh can follow."""
    # Other methods are there to be compared: what they find is theirs alone.
    names = made.declarations.layouts if request.method in BY_LAYOUTS else ()
    # Rules may be kept in a pipeline; a layout is kept as it is executed.
    is_free = kept.execution == PLAIN and request.fix not in made.declarations.layouts
    for name in names:
        try:
            if resolve_layout(made.declarations, name, mesh).mesh.axes != mesh.axes:
                continue  # it has parts of axes that the rules of this problem do not have
            layout = _resolved(request, made, mesh, "--from", name, Diagnostics())
        except DiagnosticError:
            continue
        is_short = request.max_rules is None or len(layout.rules) <= request.max_rules
        is_kept = {*kept.rules} <= {*layout.rules}
        is_kept &= is_free or str(kept.execution) == str(layout.execution)
        is_stored = any(rule.selector[:1] and rule.selector[0] in ROLES for rule in layout.rules)
        if is_short and is_kept and (request.storage or not is_stored):
            yield layout


def _check_pipeline(
    request: SearchRequest, made: Compilation, mesh: Mesh, meshes: list[Mesh]
) -> None:
    """Raise MD0647 where there can be no pipeline over the axis that is named, if one is."""
    if request.pipeline is None:
        return
    if request.pipeline not in mesh.names:
        message, asked = (
            f"`--pipeline {request.pipeline}`: the mesh has no such axis",
            request.pipeline,
        )
        raise DiagnosticError(unknown_value("MD0647", message, "--pipeline", asked, mesh.names))
    check(made.named, request.pipeline, meshes)


def _objective(request: SearchRequest, timing: Timing | None) -> str:
    objective = request.objective or ("bytes" if timing is None else "time")
    if objective not in OBJECTIVES:
        message = f"`--objective {objective}`: there is no such objective"
        wrong = unknown_value("MD0602", message, "--objective", objective, OBJECTIVES)
        raise DiagnosticError(wrong)
    if objective == "time" and timing is None:
        message = "the least time is asked for, but no cluster is named"
        refuse_unnamed("MD0324", message)
    return objective


def _start(
    request: SearchRequest, made: Compilation, mesh: Mesh, option: str, text: str
) -> StartLayout:
    """A layout by name, or as text. Raises MD0302 for rules that contradict."""
    return _resolved(request, made, mesh, option, text, made.diagnostics)


def _resolved(
    request: SearchRequest,
    made: Compilation,
    mesh: Mesh,
    option: str,
    text: str,
    told: Diagnostics,
) -> StartLayout:
    """A layout by name, or as text; warnings go to `told`. Raises what is wrong with it."""
    layout = resolve_layout(made.declarations, text, mesh, option=option)
    mesh = layout.mesh
    diagnostics = lint(made.named, layout, made.declarations)
    diagnostics.raise_errors()
    told.add(*diagnostics)
    if made.named.goal is not None:  # stages are asked for by `--pipeline`, or by a schedule
        free = tuple(r for r in layout.rules if r.axes != (request.pipeline,))
        piped(made.named, replace(layout, rules=free))
    split = ((r, mesh.known(r.axes)) for r in layout.rules)
    rules = tuple(SearchRule(r.dim, axes, r.selector) for r, axes in split if axes or not r.axes)
    cuts = tuple(StageStart(cut.selector, cut.axis, cut.stage) for cut in layout.cuts)
    is_staged = layout.schedule is not None and _stage_axis(made, mesh, rules, cuts) is not None
    schedule, cuts = (layout.schedule, cuts) if is_staged else (None, ())
    execution = Execution(schedule, cuts, layout.settings)
    return StartLayout(text, rules, PLAIN if execution == PLAIN else execution)
