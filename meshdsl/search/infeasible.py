"""What to say where no layout fits into the memory: what was tried, and what no layout is below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import DiagnosticError, counted, fail
from meshdsl.ir.types import TensorType
from meshdsl.named import ir as named
from meshdsl.option_edits import give
from meshdsl.placed.placements import Mesh
from meshdsl.report.document import human
from meshdsl.report.memory_kinds import KINDS as MEMORY_KINDS
from meshdsl.report.memory_kinds import at_peak
from meshdsl.search.candidate import Candidate
from meshdsl.search.practice import roles
from meshdsl.search.problem import Problem, SearchResult


def refuse_limit(found: SearchResult, name: str) -> NoReturn:
    """Raise MD0642: the least memory that was found, and what is possible at all."""
    least, problem = found.least, found.problem
    limit = problem.request.memory
    assert limit is not None, "without a limit all fits"
    assert least is not None, "where nothing fits the least memory is searched"
    assert least.plans, "of a layout that can be placed the memory is known"
    best = least.plans[0]
    meshes = [result.problem for result in (least, *least.others)]
    possible = min(map(least_possible, meshes))
    reached = f"{best.peak:,} B, of `{best}` with {best.policy} reduction"
    tried = counted(len(_asked((found, least))), "layout")
    if possible > limit:
        message = (
            f"no layout fits into {limit:,} B on a device: what is stored, split as far as it goes,"
            f" and the least activations hold {possible:,} B; the least found is {reached}"
        )
    else:
        message = (
            f"none of the {tried} tried fits into {limit:,} B on a device: the least found is"
            f" {reached}; no layout holds less than {possible:,} B"
        )
    larger = [f"`{mesh}`: {peak:,} B" for mesh, peak in _larger(best) if peak <= limit]
    fix = give("--memory", f"{best.peak}B", safe=False)
    needed = f"{fix.title}, which is enough for this one"
    if name != "layouts":
        needed += f"; without `--method {name}` less may be found"
    if larger:
        needed += f"; this layout would fit on {' or '.join(larger)}"
    help = f"{needed}; {_largest_part(best, least.problem)}"
    fail("MD0642", message, help=help, fixes=(fix,))


def _largest_part(plan: Candidate, problem: Problem) -> str:
    """What takes the most memory of a plan that does not fit, and what can lower it."""
    kinds, program = at_peak(plan.memory), problem.program
    kind = max(kinds, key=lambda kind: kinds[kind])
    part = f"the largest part is {MEMORY_KINDS[kind]} ({human(kinds[kind])})"
    lower = []
    if kind == "activations" and any(op.phase == "backward" for op in named.walk(program.body)):
        lower.append("a `recompute { … }` block in the program")
    if kind in ("activations", "inputs", "buffers"):
        sizes = {dim: v.type.size(dim) for v in program.inputs for dim in v.type.names}
        batch = max(roles(program).batch, key=lambda dim: sizes[dim], default="")
        if sizes.get(batch, 1) > 1:
            lower.append(f"a smaller `{batch}` (`--set {batch}={sizes[batch] // 2}`)")
    if kind == "state":
        lower.append("`state: memory = host` in the layout")
    if kind in ("params", "grads", "state", "gathered", "new_grads"):
        lower.append(f"more devices (`--devices {2 * plan.mesh.devices}`)")
    return f"{part}, which {' or '.join(lower)} can lower" if lower else part


def _asked(results: Sequence[SearchResult]) -> set[object]:
    """What was placed for some results, each layout once."""
    plans = (p for r in results for p in (*r.every, *r.plans))
    asked: set[object] = {(plan.mesh, plan.asked) for plan in plans}
    for result in results:
        asked |= _asked(result.others)
    return asked


def least_possible(problem: Problem) -> int:
    """The bytes that a device holds at least, whatever the layout.

    Parameters, states and inputs, each split over the axes that leave the least of it, beside the
    largest result of a product, split over all devices. In stages a device may have fewer of them:
    then an even share of what is stored counts, and no activations.
    """
    program, mesh = problem.program, problem.mesh
    if any(setting.name == "memory" for setting in problem.execution.settings):
        stored = [p.value for p in program.params]
    else:
        stored = [*(p.value for p in program.params), *(s.value for s in program.states)]
    types = [v.type for v in (*program.inputs, *stored)]
    if problem.request.pipeline is not None:
        return math.ceil(sum(t.bytes for t in types) / mesh.devices)
    return sum(_split(t, mesh) for t in types) + _activations(program, mesh)


def _split(type_: TensorType, mesh: Mesh) -> int:
    """The bytes of a tensor where each axis splits the dim by which the least is left."""
    axes = [size for _, size in mesh.axes if size > 1]
    least = type_.bytes
    for dims in itertools.product(type_.names, repeat=len(axes)):
        parts = dict.fromkeys(type_.names, 1)
        for dim, size in zip(dims, axes, strict=True):
            parts[dim] *= size
        local = type_.resized({d: -(-type_.size(d) // n) for d, n in parts.items()})
        least = min(least, local.bytes)
    return least


def _activations(program: named.NamedProgram, mesh: Mesh) -> int:
    """The bytes of the largest result of a product of the forward pass, split over all devices."""
    products = (op for op in named.walk(program.body) if op.name == "einsum")
    forward = (op.outs[0].type.bytes for op in products if op.phase == "forward")
    return math.ceil(max(forward, default=0) / mesh.devices)


def _larger(least: Candidate) -> Iterator[tuple[str, int]]:
    """Meshes with one axis of twice the size, and what the same rules hold there."""
    for axis in least.mesh.names:
        axes = tuple((a, 2 * n if a == axis else n) for a, n in least.mesh.axes)
        mesh = replace(least.mesh, axes=axes)
        try:
            yield str(mesh), replace(least, mesh=mesh, timing=None).peak
        except DiagnosticError:
            continue
