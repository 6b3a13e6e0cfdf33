"""A plan as text of the language: a layout block with a reason behind each rule."""

from __future__ import annotations

from meshdsl.diagnostics import Edit, Source, Span, fail
from meshdsl.named.declarations import Declarations
from meshdsl.placed.layout import resolve_mesh
from meshdsl.placed.sbp import Mesh
from meshdsl.search.plan import Plan
from meshdsl.syntax import ast
from meshdsl.syntax.edits import apply, without_line
from meshdsl.syntax.format import format_source


def written(mesh: Mesh) -> str:
    """The declaration of a mesh."""
    name = mesh.name if mesh.name.isidentifier() else "found"
    axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.axes)
    return f"mesh {name} = {{ {axes} }}"


def block(name: str, head: str, plan: Plan, told: dict[str, str]) -> str:
    """The layout block of a plan; `told` has the comment behind each rule, `head` that of all."""
    said = ((str(rule), told.get(str(rule))) for rule in plan.rules)
    lines = [f"  {rule}  # {why}" if why else f"  {rule}" for rule, why in said]
    text = "\n".join([f"layout {name} {{  # {head}", *lines, "}"])
    return format_source(Source("searched", text))


def expectation(name: str, plan: Plan, declarations: Declarations) -> str:
    """An `expect` block that holds as long as the plan sends what it sends now.

    Raises MD0644 where the mesh is none of the file.
    """
    declared = plan.mesh.name in declarations.meshes
    if not declared or resolve_mesh(declarations, plan.mesh.name).axes != plan.mesh.axes:
        help = f"declare it: `{written(plan.mesh)}`"
        fail("MD0644", "an expectation is about a mesh of the file", help=help)
    head = f"expect {name} on {plan.mesh.name} with {plan.policy}"
    return f"\n{head} {{\n  wire_bytes: {plan.sent}\n}}\n"


def inserted(source: Source, tree: ast.File, name: str, text: str, force: bool) -> str:
    """A file with a layout block of this name, in canonical form.

    It stands behind the last layout or mesh. With `force` it replaces one that is there, and what
    is expected of that. Raises MD0643 for a name that is taken.
    """
    taken = [d for d in tree.declarations if _is_named(d, name)]
    if taken and not force:
        help = "choose another name, or replace it by `--force`"
        fail("MD0643", f"`{name}` is declared already", taken[0].span, help=help)
    edits = [Edit(without_line(d.span), "") for d in taken]
    heads = [d for d in tree.declarations if isinstance(d, ast.Dim | ast.Mesh | ast.Layout)]
    end = max((d.span.end for d in heads), default=0)
    end = source.text.find("\n", end) + 1 or len(source.text)
    edits.append(Edit(Span(source, end, end), f"\n{text}\n" if heads else f"{text}\n"))
    return format_source(Source(source.name, apply(source.text, edits)))


def _is_named(node: ast.Declaration, name: str) -> bool:
    if isinstance(node, ast.Expect):
        return node.layout.text == name
    return isinstance(node, ast.Layout | ast.Sbp) and node.name.text == name
