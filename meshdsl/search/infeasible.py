"""What to say where no layout fits into the memory: what is reached, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import DiagnosticError, counted, fail
from meshdsl.search.candidate import Candidate
from meshdsl.search.problem import Method, Problem
from meshdsl.search.shapes import solve


def refuse_limit(problems: Sequence[Problem], name: str, method: Method) -> NoReturn:
    """Raise MD0642: the least memory of all plans, and meshes on which their layout would fit."""
    limit = problems[0].request.memory
    assert limit is not None
    free = replace(problems[0].request, memory=None)
    unlimited = solve([replace(p, objective="memory", request=free) for p in problems], method)
    least = unlimited.plans[0]
    of = (
        "" if unlimited.proven else f" of the {counted(unlimited.count.evaluated, 'layout')} placed"
    )
    message = (
        f"no layout{of} fits into {limit:,} B on a device: the least is {least.peak:,} B, "
        f"of `{least}` with {least.policy} reduction"
    )
    larger = [f"`{mesh}`: {peak:,} B" for mesh, peak in _larger(least) if peak <= limit]
    needed = f"`--memory {least.peak}B` is the least limit"
    if name != "layouts":
        needed += f" of `--method {name}`; `layouts` may find less"
    help = f"this layout would fit on {' or '.join(larger)}" if larger else needed
    fail("MD0642", message, help=help)


def _larger(plan: Candidate) -> Iterator[tuple[str, int]]:
    """Meshes with one axis of twice the size, and what the same rules hold there."""
    for axis in plan.mesh.names:
        axes = tuple((a, 2 * n if a == axis else n) for a, n in plan.mesh.axes)
        mesh = replace(plan.mesh, axes=axes)
        try:
            yield str(mesh), replace(plan, mesh=mesh, timing=None).peak
        except DiagnosticError:
            continue
