"""The problem of a request, or one for each shape of the mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import counted, did_you_mean, fail
from meshdsl.pipeline import Compilation, timing_of
from meshdsl.placed.layout import resolve_layout, resolve_mesh
from meshdsl.placed.lint import lint
from meshdsl.placed.pipelined import piped
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import Rules, SearchRule
from meshdsl.search.pipeline_search import check
from meshdsl.search.problem import OBJECTIVES, Problem
from meshdsl.search.request import SearchRequest
from meshdsl.search.shapes import shapes, timed


def problems(request: SearchRequest, made: Compilation) -> tuple[Problem, ...]:
    """The problem on the mesh of a program's options, or on each shape of it of `devices`.

    Raises a diagnostic.
    """
    mesh = resolve_mesh(made.declarations, made.options.mesh, made.options.layout or "")
    meshes = [mesh] if request.devices is None else list(shapes(mesh, request.devices))
    if not meshes:
        message = f"{request.devices} devices need a mesh, and the program has none"
        fail("MD0645", message, help="name the axes: `--mesh data:1,model:1`")
    _check_pipeline(request, made, mesh, meshes)
    options = replace(made.options, cluster=request.cluster)
    expired = _expired(request.budget)
    machines = timed(meshes, lambda mesh: timing_of(made.declarations, options, mesh))
    return tuple(_problem(request, made, mesh, timing, expired) for mesh, timing in machines)


def _problem(
    request: SearchRequest,
    made: Compilation,
    mesh: Mesh,
    timing: Timing | None,
    expired: Callable[[], bool],
) -> Problem:
    """The problem on one mesh. Raises MD0302 for rules of the request that contradict."""
    fixed = _rules(request, made, mesh, "--fix", request.fix) if request.fix else ()
    if request.max_rules is not None and len(fixed) > request.max_rules:
        rules = counted(len(fixed), "rule")
        help = f"`--max-rules {len(fixed)}` or more, or fewer rules by `--fix`"
        fail("MD0601", f"`--fix` has {rules}, `--max-rules` allows {request.max_rules}", help=help)
    objective = _objective(request, timing)
    # By time few tensors are waited for: their bound takes no time to speak of.
    certificate = request.certificate or objective == "time"
    # What was not looked at has to be bounded by something.
    limited = request.budget is not None or request.per_tensor
    certificate |= objective == "bytes" and limited
    if request.certificate and objective == "memory":
        help = "leave `--certificate` out, or take `--objective bytes`"
        fail("MD0646", "no bound of memory is known over per-tensor plans", help=help)
    return Problem(
        made.named,
        mesh,
        objective,
        replace(request, certificate=certificate),
        timing,
        fixed=fixed,
        start=_rules(request, made, mesh, "--from", request.start) if request.start else None,
        expired=expired,
    )


def _check_pipeline(
    request: SearchRequest, made: Compilation, mesh: Mesh, meshes: list[Mesh]
) -> None:
    """Raise MD0647 where there can be no pipeline over the axis that is named, if one is."""
    if request.pipeline is None:
        return
    if request.pipeline not in mesh.names:
        names = list(mesh.names)
        help = did_you_mean(request.pipeline, names) or f"there are {', '.join(names) or 'none'}"
        message = f"`--pipeline {request.pipeline}`: the mesh has no such axis"
        fail("MD0647", message, help=help)
    if request.start is not None:
        help = "leave one of them out"
        fail("MD0601", "`--pipeline` looks for stages, `--from` begins without", help=help)
    check(made.named, request.pipeline, meshes)


def _objective(request: SearchRequest, timing: Timing | None) -> str:
    objective = request.objective or ("bytes" if timing is None else "time")
    if objective not in OBJECTIVES:
        help = did_you_mean(objective, list(OBJECTIVES)) or f"there are {', '.join(OBJECTIVES)}"
        fail("MD0602", f"`--objective {objective}`: there is no such objective", help=help)
    if objective == "time" and timing is None:
        help = "name one: `--cluster h100`, or `mesh … on h100`"
        fail("MD0324", "the least time is asked for, but no cluster is named", help=help)
    return objective


def _rules(request: SearchRequest, made: Compilation, mesh: Mesh, option: str, text: str) -> Rules:
    """The rules of a layout by name, or as text. Raises MD0302 for some that contradict."""
    layout = resolve_layout(made.declarations, text, mesh, option=option)
    if layout.schedule is not None or layout.cuts:
        help = "name a layout without a schedule; `--pipeline AXIS` searches for stages"
        fail("MD0601", f"`{option} {text}`: the layout is that of a pipeline", help=help)
    diagnostics = lint(made.named, layout, made.declarations)
    diagnostics.raise_errors()
    made.diagnostics.add(*diagnostics)
    if made.named.goal is not None:  # stages are asked for by `--pipeline` alone
        free = tuple(r for r in layout.rules if r.axes != (request.pipeline,))
        piped(made.named, replace(layout, rules=free))
    split = ((r, mesh.known(r.axes)) for r in layout.rules)
    return tuple(SearchRule(r.dim, axes, r.selector) for r, axes in split if axes or not r.axes)


def _expired(budget: float | None) -> Callable[[], bool]:
    """Whether so many seconds are over, which begin now."""
    if budget is None:
        return lambda: False
    end = time.monotonic() + budget
    return lambda: time.monotonic() >= end
