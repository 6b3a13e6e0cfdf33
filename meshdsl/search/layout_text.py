"""A plan as text of the language: a layout block with a reason behind each rule."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshdsl.diagnostics import Edit, Source, Span
from meshdsl.named.declarations import Declarations
from meshdsl.option_edits import give, refuse
from meshdsl.placed.layout import resolve_mesh, rule_text
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import Candidate
from meshdsl.syntax import ast
from meshdsl.syntax.edits import apply, without_line
from meshdsl.syntax.format import format_source
from meshdsl.syntax.tokens import is_name


def written(mesh: Mesh) -> str:
    """The declaration of a mesh."""
    name = mesh.name if mesh.name.isidentifier() else "found"
    return f"mesh {name} = {mesh}"


def block(name: str, head: str, plan: Candidate, told: dict[str, str]) -> str:
    """The layout block of a plan; `told` has the comment behind each rule, `head` that of all."""
    on = plan.placed.mesh
    texts = {rule: rule_text(rule.selector, rule.dim, on.written(rule.axes)) for rule in plan.rules}
    said = ((text, told.get(str(rule))) for rule, text in texts.items())
    lines = [f"  {rule}  # {why}" if why else f"  {rule}" for rule, why in said]
    lines += [f"  {line}" for line in (*plan.cuts, *plan.execution.settings)]
    used = f" with {plan.schedule}" if plan.schedule else ""
    text = "\n".join([f"layout {name} {{  # {head}", *lines, f"}}{used}"])
    return format_source(Source("searched", text))


def placed_on(name: str, mesh: Mesh, declarations: Declarations) -> tuple[str, str]:
    """The name of a mesh of the file with these axes, and the declaration that it lacks, if any."""
    same = [m for m in declarations.meshes if resolve_mesh(declarations, m).axes == mesh.declared]
    if same:
        return mesh.name if mesh.name in same else same[0], ""
    named = replace(mesh, name=f"{name}_mesh")
    return named.name, f"{written(named)}\n\n"


def expectation(name: str, program: str, mesh: str, plan: Candidate) -> str:
    """An `expect` block that holds as long as the plan places and sends what it does now.

    It has what is read and learnt where that is split, and the bytes. `program` is empty in a file
    of one program.
    """
    about = f"{name} for {program}" if program else name
    stored = (*plan.placed.inputs, *(p.tensor for p in plan.placed.params))
    split, on = [t for t in stored if t.placement.splits], plan.placed.mesh
    lines = [f"{t.value.label}: {t.placement.show(t.type, on)}" for t in split]
    text = "\n".join(f"  {line}" for line in (*lines, f"wire_bytes: {plan.sent}"))
    return f"\nexpect {about} on {mesh} with {plan.policy} {{\n{text}\n}}\n"


def refuse_name(name: str, tree: ast.SourceFile, force: bool) -> None:
    """Raise MD0601 for what is no name of a layout, MD0643 for one that is taken."""
    if not is_name(name):
        span = Span(Source("--write", name), 0, len(name))
        fix = give("--write", "best", safe=False)
        refuse("MD0601", "this cannot be the name of a layout", fix, span=span)
    if not force:
        _refuse_taken(tree, {name})


def _refuse_taken(tree: ast.SourceFile, names: set[str]) -> None:
    taken = next((d for d in tree.declarations if _name(d) in names), None)
    if taken is not None:
        message, replaced = f"`{_name(taken)}` is declared already", give("--force", safe=False)
        refuse("MD0643", message, replaced, "choose another name", span=taken.span)


def inserted(source: Source, tree: ast.SourceFile, names: set[str], text: str, force: bool) -> str:
    """A file with declarations of these names, in canonical form.

    They stand behind the last layout or mesh. With `force` they replace those that are there, and
    what is expected of those. Raises MD0643 for a name that is taken.
    """
    if not force:
        _refuse_taken(tree, names)
    taken = [d for d in tree.declarations if _name(d) in names]
    edits = [Edit(without_line(d.span), "") for d in taken]
    edits.append(insertion(source, tree, text))
    return format_source(Source(source.name, apply(source.text, edits)))


def insertion(source: Source, tree: ast.SourceFile, text: str) -> Edit:
    """The edit that puts a declaration behind the last layout, mesh or dim of a file."""
    heads = [
        d for d in tree.declarations if isinstance(d, ast.DimDecl | ast.MeshDecl | ast.LayoutDecl)
    ]
    end = max((d.span.end for d in heads), default=0)
    end = source.text.find("\n", end) + 1 or len(source.text)
    return Edit(Span(source, end, end), f"\n{text}\n" if heads else f"{text}\n")


def free_name(name: str, tree: ast.SourceFile) -> str:
    """This name, or it with the first number that makes it that of no layout or mesh of a file."""
    taken = set(map(_name, tree.declarations))
    numbered = (f"{name}{number}" for number in itertools.count(2))
    return name if name not in taken else next(n for n in numbered if n not in taken)


def _name(node: ast.Declaration) -> str | None:
    """The name of a layout, an sbp block or a mesh; of what is expected, that of its layout."""
    match node:
        case ast.Expect():
            return node.layout.text
        case ast.LayoutDecl() | ast.Sbp() | ast.MeshDecl():
            return node.name.text
    return None
