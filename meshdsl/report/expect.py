"""`expect` blocks: checked statements about placements, executed collectives and bytes."""

from __future__ import annotations

from typing import Any

from meshdsl.diagnostics import Diagnostic, Diagnostics, Related, fail
from meshdsl.named import ir as named
from meshdsl.named.declarations import Declarations, constant_integer, unknown
from meshdsl.pipeline import Options, check_policy, lower_placed, place_named
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.layout import selects
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
    if node.layout.text in declarations.sbps:
        message = "expectations about `sbp` blocks are not supported yet; this one is left aside"
        diagnostics.add(Diagnostic("MD0905", message, node.layout.span, "warning"))
        return
    options = _options(node, declarations)
    for program in programs:
        result = place_named(program, declarations, options, Diagnostics())
        report = explain(lower_placed(result))
        for entry in node.entries:
            if isinstance(entry, ast.ExpectPlacement):
                _check_placement(entry, result, diagnostics)
            else:
                _check_figure(entry, report, declarations, diagnostics)


def _options(node: ast.Expect, declarations: Declarations) -> Options:
    for kind, name, known in (
        ("layout", node.layout, declarations.layouts),
        ("mesh", node.mesh, declarations.meshes),
    ):
        if name is not None and name.text not in known:
            raise_unknown(kind, name, list(known))
    options = Options(layout=node.layout.text, mesh=node.mesh.text if node.mesh else None)
    if node.policy is None:
        return options
    check_policy(node.policy.text, node.policy.span)
    return Options(layout=options.layout, mesh=options.mesh, reduce=node.policy.text)


def raise_unknown(kind: str, name: ast.Name, known: list[str]) -> None:
    """MD0108 for a name in the head of an `expect`."""
    from meshdsl.diagnostics import DiagnosticError

    raise DiagnosticError(unknown("MD0108", kind, name, known))


def _check_placement(
    entry: ast.ExpectPlacement, program: placed.Program, diagnostics: Diagnostics
) -> None:
    path = tuple(n.text for n in entry.tensor)
    found = [t for t in program.tensors if t.value.name and selects(path, t.value) == 3]
    if not found:
        labels = sorted({t.value.label for t in program.tensors if t.value.name})
        help = (unknown("MD0402", "tensor", entry.tensor[-1], labels)).help
        message = f"`{'.'.join(path)}` is no tensor of the program"
        diagnostics.add(Diagnostic("MD0402", message, entry.span, help=help))
    for tensor in found:
        problem = _placement_problem(entry, tensor, program)
        if problem:
            where = Related(tensor.value.span, "it is computed here")
            diagnostics.add(Diagnostic("MD0401", problem, entry.span, related=(where,)))


def _placement_problem(
    entry: ast.ExpectPlacement, tensor: placed.Tensor, program: placed.Program
) -> str | None:
    """How a tensor differs from what is expected of it, or None. Axes of size 1 do not count."""
    names = tuple(d.dim.text for d in entry.dims)
    actual = tensor.placement.show(tensor.value.type)
    if set(names) != set(tensor.value.type.names):
        return f"`{tensor.value.label}` has the dims {actual}"
    for item in entry.dims:
        wanted = tuple(a.text for a in item.axes or () if program.mesh.size_or_one(a.text) > 1)
        if tensor.placement.axes_of(item.dim.text) != wanted:
            return f"`{tensor.value.label}` is {actual}"
    return None


def _check_figure(
    entry: ast.ExpectCount,
    report: dict[str, Any],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    wanted = _number(entry, declarations)
    related: tuple[Related, ...] = ()
    if entry.what.text in KINDS:
        actual = sum(c["count"] for c in report["collectives"] if _counts(entry, c))
    elif entry.what.text in FIGURES and entry.axes is None:
        actual = report["totals"][entry.what.text]
    else:
        known = [*KINDS, *FIGURES]
        fail(
            "MD0402",
            f"`{entry.what.text}` is nothing that can be expected",
            entry.span,
            help=f"there are {', '.join(known)}, and `tensor: [dims]`",
        )
    if actual != wanted:
        over = f" over {', '.join(a.text for a in entry.axes)}" if entry.axes else ""
        message = f"expected {entry.what.text}{over} {wanted:,}, and it is {actual:,}"
        help = "`meshdsl explain` shows each collective and why it is there"
        diagnostics.add(Diagnostic("MD0401", message, entry.span, related=related, help=help))


def _number(entry: ast.ExpectCount, declarations: Declarations) -> int:
    if isinstance(entry.value, ast.Number) and entry.value.value == 0:
        return 0
    sizes = {name: dim.size for name, dim in declarations.dims.items()}
    return constant_integer(entry.value, sizes, 2**63)


def _counts(entry: ast.ExpectCount, collective: dict[str, Any]) -> bool:
    if collective["kind"] != entry.what.text:
        return False
    return entry.axes is None or {a.text for a in entry.axes} == set(collective["axes"])
