"""`expect` blocks before anything is placed: whether the names in them mean anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean, fail, spelled_right
from meshdsl.named.declarations import Declarations, declared_integer, unknown
from meshdsl.named.ir import NamedProgram, values_of
from meshdsl.named.selectors import TENSOR, selects
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.layout import collect_layout, collect_mesh
from meshdsl.placed.lint import declared_names
from meshdsl.placed.place import check_policy
from meshdsl.syntax import ast

TOTALS = ("wire_bytes", "cluster_wire_bytes", "collectives", "flops_per_device")
FIGURES = (*TOTALS, "memory", "bubble", "in_flight")
"""Of one device, of a pipeline of the stage with the most; `bubble` is a fraction, `3/11`."""
LARGEST = 2**63 - 1
KINDS = tuple(kind for kind, c in COLLECTIVES.items() if c.moves)


def lint_expect(
    node: ast.Expect,
    programs: Sequence[NamedProgram | None],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    """Report the names in a block that mean nothing; `programs` are None where they have errors."""
    problems = Diagnostics()
    problems.of(partial(check_head, node, declarations))
    if not node.entries:
        help = "write what is expected, such as `all_reduce: 0`, or remove the block"
        problems.add(
            Diagnostic("MD0402", "the block expects nothing", node.span, "warning", help=help)
        )
    programs = [p for p in programs if p is None or is_about(node, p)]
    axes = _axes(node, declarations)
    for entry in node.entries:
        _lint_axes(entry, axes, problems)
        if isinstance(entry, ast.ExpectPlacement):
            _lint_placement(entry, programs, declarations, problems)
        else:
            problems.of(partial(check_figure, entry))
            problems.of(partial(expected_number, entry, declarations))
    diagnostics.add(*problems)


def is_about(node: ast.Expect, program: NamedProgram) -> bool:
    """Whether a block is about a program: the one that it names, or every one."""
    return node.program is None or node.program.text == program.name


def check_head(node: ast.Expect, declarations: Declarations) -> None:
    """Raise MD0108 for a layout, a program, a mesh or a policy that there is not."""
    problems = Diagnostics()
    subjects = [*declarations.layouts, *declarations.sbps]
    if node.layout.text not in subjects:
        problems.add(unknown("MD0108", "layout", node.layout, subjects))
    if node.program is not None and node.program.text not in declarations.programs:
        problems.add(unknown("MD0108", "program", node.program, list(declarations.programs)))
    if node.mesh is not None and node.mesh.text not in declarations.meshes:
        problems.add(unknown("MD0108", "mesh", node.mesh, list(declarations.meshes)))
    if node.policy is not None:
        problems.of(partial(check_policy, node.policy.text, node.policy.span))
    problems.raise_errors()


def _axes(node: ast.Expect, declarations: Declarations) -> list[str]:
    """The axes of the mesh that a block is about; those of every mesh where it is not known."""
    meshes, name = declarations.meshes, node.layout.text
    if node.mesh is not None and node.mesh.text not in meshes:
        return list(dict.fromkeys(a.name.text for m in meshes.values() for a in m.axes))
    mesh = node.mesh.text if node.mesh is not None else None
    layout = name if name in declarations.layouts else ""
    sbp = name if name in declarations.sbps else None
    on = collect_mesh(declarations, mesh, layout, sbp, Diagnostics())
    if sbp is not None or not layout:
        return list(on.names)
    in_parts = collect_layout(declarations, layout, on, Diagnostics()).mesh
    return [*on.names, *(name for name in in_parts.names if name not in on.names)]


def _lint_axes(
    entry: ast.ExpectPlacement | ast.ExpectCount, known: list[str], diagnostics: Diagnostics
) -> None:
    """Report MD0402 for every axis that the mesh does not have, whole or as a part."""
    items = entry.dims if isinstance(entry, ast.ExpectPlacement) else (entry,)
    for axis in (axis for item in items for axis in item.axes or ()):
        if axis.text not in known:
            diagnostics.add(unknown("MD0402", "mesh axis", axis, known))


def _lint_placement(
    entry: ast.ExpectPlacement,
    programs: Sequence[NamedProgram | None],
    declarations: Declarations,
    diagnostics: Diagnostics,
) -> None:
    for item in entry.dims:
        if item.dim.text not in declarations.dims:
            diagnostics.add(unknown("MD0101", "dim", item.dim, list(declarations.dims)))
    if None in programs:
        names = declared_names(declarations)
        if not {n.text for n in entry.tensor} <= names:
            diagnostics.add(no_tensor(entry, names))
        return
    path = tuple(n.text for n in entry.tensor)
    values = [v for p in programs if p is not None for v in values_of(p) if v.name]
    if programs and not any(selects(path, v) == TENSOR for v in values):
        diagnostics.add(no_tensor(entry, (v.label for v in values)))


def no_tensor(entry: ast.ExpectPlacement, labels: Iterable[str]) -> Diagnostic:
    """MD0402: an expectation of a tensor that no program has."""
    diagnostic = unknown("MD0402", "tensor", entry.tensor[-1], sorted(set(labels)))
    name = ".".join(n.text for n in entry.tensor)
    message = f"`{name}` is no tensor of the program; nothing is checked"
    return replace(diagnostic, message=message, span=entry.span, severity="warning")


def check_figure(entry: ast.ExpectCount) -> None:
    """Raise MD0402 for something that is not counted, or not by axis."""
    what = entry.what.text
    if what in KINDS or (what in FIGURES and entry.axes is None):
        return
    if what in FIGURES:
        help = f"write `{what}: N`, without `over`"
        fail("MD0402", f"`{what}` is not counted by axis", entry.span, help=help)
    expectable = [*KINDS, *FIGURES]
    help = (
        did_you_mean(what, expectable) or f"there are {', '.join(expectable)}, and `tensor: [dims]`"
    )
    fixes = spelled_right(entry.what.span, what, expectable)
    message = f"`{what}` is nothing that can be expected"
    fail("MD0402", message, entry.span, help=help, fixes=fixes)


def expected_number(entry: ast.ExpectCount, declarations: Declarations) -> int | Fraction:
    """The number that is expected: a whole one, but of a `bubble` and of what nobody knows.

    Raises a diagnostic where it is none.
    """
    value, what = entry.value, entry.what.text
    integral = what in (*KINDS, *FIGURES) and what != "bubble"
    if isinstance(value, ast.Number) and value.value == 0:
        return 0
    if not integral and isinstance(value, ast.Binary) and value.op == "/":
        parts = (declared_integer(v, declarations, LARGEST) for v in (value.left, value.right))
        return Fraction(*parts)
    return declared_integer(value, declarations, LARGEST)
