"""`expect` blocks: checked statements about placements, executed collectives and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Related,
    did_you_mean,
    fail,
)
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations, constant_integer, unknown
from meshdsl.pipeline import Options, check_policy, lower_placed, place_named
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.layout import TENSOR, selects
from meshdsl.report.explain import explain
from meshdsl.syntax import ast

FIGURES = ("wire_bytes", "cluster_wire_bytes", "collectives", "flops_per_device")
KINDS = tuple(kind for kind, c in COLLECTIVES.items() if c.moves)


def check_expect(
    node: ast.Expect,
    programs: list[named.Program],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Compile what the block is about and compare; MD0401 where it does not hold."""
    options = _options(node, declarations)
    results = [place_named(p, declarations, options, Diagnostics()) for p in programs]
    reports = [explain(lower_placed(result)) for result in results]
    for entry in node.entries:
        if isinstance(entry, ast.ExpectPlacement):
            step = partial(_check_placement, entry, results, declarations, diagnostics)
        else:
            step = partial(_check_figure, entry, reports, declarations, diagnostics)
        try:
            step()
        except DiagnosticError as error:
            diagnostics.add(*error.diagnostics)


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
    """MD0108 for a name in the head of an `expect`."""
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
    """How a tensor differs from what is expected of it, or None. Axes of size 1 do not count."""
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
    """What the report says of a figure; MD0402 where it is none."""
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
    """MD0402 for an axis that the mesh does not have."""
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
