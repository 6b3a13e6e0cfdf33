"""Parse tree to syntax tree, the upper half: statements and declarations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Diagnostic, Poisoned, Source, Span, fail
from meshdsl.syntax import ast
from meshdsl.syntax.build_expressions import (
    Makers,
    TreeBuilder,
    make_call,
    make_items,
    make_keywords,
)
from meshdsl.syntax.foreign_statements import statements

if TYPE_CHECKING:
    from lark import Token, Tree

MAX_DEPTH = 200
"""The greatest depth of nested operators, calls, views and blocks."""

_DEEPENS = frozenset({"binary", "unary", "call", "view", "bracketed", "block"})


def build_file(source: Source, file: Tree[Token]) -> tuple[ast.SourceFile, list[Diagnostic]]:
    """The syntax tree of a parsed file, and the errors that the grammar alone cannot find.

    Wrong or broken parts are left out: the smallest statement or declaration.
    """
    builder = TreeBuilder(source)
    fit: list[Any] = []
    for tree in _declarations(file):
        deep = _too_deep(builder, tree)
        if deep is None:
            fit.append(tree)
        else:
            builder.errors.append(deep)
    declarations = builder.all_of(fit, _DECLARATIONS)
    return ast.SourceFile(declarations, Span(source, 0, len(source.text))), builder.errors


def _declarations(file: Any) -> list[Any]:
    """The declarations of a file; one `dim` line gives one per name."""
    declarations: list[Any] = []
    for tree in file.children:
        declarations += tree.children if tree.data == "dims_decl" else [tree]
    return declarations


def _too_deep(b: TreeBuilder, tree: Any) -> Diagnostic | None:
    """A complaint about nodes nested deeper than later passes can walk."""
    todo: list[tuple[Any, int]] = [(tree, 0)]
    while todo:
        node, depth = todo.pop()
        depth += node.data in _DEEPENS
        if depth > MAX_DEPTH:
            return Diagnostic(
                "MD0008",
                f"this expression is more than {MAX_DEPTH} operators deep",
                b.span(node),
                help="give parts of it names of their own",
            )
        todo.extend((child, depth) for child in node.children if hasattr(child, "data"))
    return None


# --- statements ------------------------------------------------------------------------------


def _target(b: TreeBuilder, tree: Any) -> ast.Target:
    name, dims = tree.children
    return ast.Target(b.name(name), b.maybe_dims(dims), b.span(tree))


def _assign(b: TreeBuilder, tree: Any) -> ast.Assign:
    *targets, value = tree.children
    return ast.Assign(tuple([_target(b, t) for t in targets]), b.expr(value), b.span(tree))


def _update(b: TreeBuilder, tree: Any) -> ast.UpdateStatement:
    name, _, value = tree.children
    return ast.UpdateStatement(b.name(name), b.expr(value), b.span(tree))


def _param(b: TreeBuilder, tree: Any) -> ast.ParamDecl:
    target, dtype, init = tree.children
    call = None if init is None else make_call(b, init)
    return ast.ParamDecl(_target(b, target), b.maybe_name(dtype), call, b.span(tree))


def _body(b: TreeBuilder, tree: Any) -> tuple[ast.Statement, ...]:
    return b.all_of(tree.children, _STATEMENTS)


def _repeat(b: TreeBuilder, tree: Any) -> ast.Repeat:
    dim, block = tree.children
    return ast.Repeat(b.name(dim), _body(b, block), b.span(tree))


def _recompute(b: TreeBuilder, tree: Any) -> ast.Recompute:
    return ast.Recompute(_body(b, tree.children[0]), b.span(tree))


def _return(b: TreeBuilder, tree: Any) -> ast.Return:
    return ast.Return(tuple([b.expr(value) for value in tree.children]), b.span(tree))


def _minimize(b: TreeBuilder, tree: Any) -> ast.Minimize:
    value, optimizer = tree.children
    return ast.Minimize(b.expr(value), make_call(b, optimizer), b.span(tree))


_STATEMENTS: Makers = {
    **statements(_assign, _body),
    "assign": _assign,
    "update": _update,
    "param": _param,
    "repeat": _repeat,
    "recompute": _recompute,
    "return_": _return,
    "minimize": _minimize,
}


# --- declarations ----------------------------------------------------------------------------


def _dim(b: TreeBuilder, tree: Any) -> ast.DimDecl:
    name, value = tree.children
    return ast.DimDecl(b.name(name), b.expr(value), b.span(tree))


def _mesh(b: TreeBuilder, tree: Any) -> ast.MeshDecl:
    name, axes, profile = tree.children
    made = b.all_of(axes.children, {"mesh_axis": _mesh_axis})
    return ast.MeshDecl(b.name(name), made, b.maybe_name(profile), b.span(tree))


def _mesh_axis(b: TreeBuilder, tree: Any) -> ast.MeshAxis:
    name, size = tree.children
    return ast.MeshAxis(b.name(name), b.expr(size), b.span(tree))


def _layout(b: TreeBuilder, tree: Any) -> ast.LayoutDecl:
    name, base, entries, schedule = tree.children
    nodes = b.all_of(entries.children, {"rule": _rule, "setting": _setting})
    rules = tuple(n for n in nodes if isinstance(n, ast.RuleDecl))
    settings = tuple(n for n in nodes if isinstance(n, ast.SettingDecl))
    used = None if schedule is None else _scheduled(b, schedule)
    return ast.LayoutDecl(b.name(name), b.maybe_name(base), rules, used, b.span(tree), settings)


def _setting(b: TreeBuilder, tree: Any) -> ast.SettingDecl:
    selector, name, value = tree.children
    return ast.SettingDecl(b.names(selector), b.name(name), b.expr(value), b.span(tree))


def _scheduled(b: TreeBuilder, tree: Any) -> ast.CallExpr:
    """The schedule of a layout: a name, with dims in `[ ]` or without, with a call or without."""
    if tree.data == "call":
        return make_call(b, tree)
    head, *items = tree.children
    dims = make_items(b, items[0]) if items else None
    return ast.CallExpr(b.name(head), dims, (), (), None, b.span(tree))


def _rule(b: TreeBuilder, tree: Any) -> ast.RuleDecl:
    selector, dim, axes, keep = tree.children
    if keep is not None and keep != "keep":
        fail(
            "MD0001",
            f"expected `keep`, `,` or end of line, found the name `{keep}`",
            b.name(keep).span,
            help="`params: model -> data keep` gathers a parameter once, not at every use",
        )
    path = () if selector is None else b.names(selector)
    return ast.RuleDecl(path, b.name(dim), b.axes(axes), keep is not None, b.span(tree))


def _schedule(b: TreeBuilder, tree: Any) -> ast.ScheduleDecl:
    """A schedule; one with a broken row is left out, for its table would not be whole."""
    _, name, arguments, rows = tree.children
    *argument_trees, out = arguments.children
    if out is not None or any(arg.data != "keyword" for arg in argument_trees):
        help = "the head of a schedule is written `schedule mine(stages=2, micro=4)`"
        fail("MD0015", "a schedule has options with names alone", b.span(arguments), help=help)
    if any(child.data == "broken" for child in rows.children):
        raise Poisoned
    schedule_rows = tuple(_rows(b, rows.children))
    return ast.ScheduleDecl(
        b.name(name), make_keywords(b, argument_trees), schedule_rows, b.span(tree)
    )


def _rows(b: TreeBuilder, trees: list[Any]) -> Iterator[ast.ScheduleRow]:
    """The rows of a schedule: each goes from its number to the next one."""
    heads = [at for at, tree in enumerate(trees) if tree.data == "row"]
    if trees and heads[:1] != [0]:
        help = "a row begins with the number of its device: `0: F0 F1 B0 B1`"
        fail("MD0001", "expected the number of a device", b.span(trees[0]), help=help)
    for at, end in itertools.pairwise([*heads, len(trees)]):
        actions = tuple([_action(b, tree) for tree in trees[at + 1 : end]])
        device = b.number(trees[at].children[0])
        yield ast.ScheduleRow(device, actions, b.span(trees[at]).to(b.span(trees[end - 1])))


def _action(b: TreeBuilder, tree: Any) -> ast.ScheduleAction:
    text, stage = tree.children
    number = None if stage is None else b.number(stage)
    return ast.ScheduleAction(b.name(text), number, b.span(tree))


def _sbp(b: TreeBuilder, tree: Any) -> ast.Sbp:
    name, entries = tree.children
    made = b.all_of(entries.children, {"sbp_entry": _sbp_entry})
    return ast.Sbp(b.name(name), made, b.span(tree))


def _sbp_entry(b: TreeBuilder, tree: Any) -> ast.SbpEntry:
    tensor, use, *components = tree.children
    reader = b.names(use.children[0]) if use.children else ()
    placements = tuple([b.expr(c) for c in components])
    return ast.SbpEntry(b.names(tensor), reader, placements, b.span(tree))


def _tensor(b: TreeBuilder, tree: Any) -> ast.TensorParam:
    name, dims, dtype, default = tree.children
    return ast.TensorParam(
        b.name(name),
        b.maybe_dims(dims) or (),
        b.maybe_name(dtype),
        b.maybe_expr(default),
        b.span(tree),
    )


def _tensors(b: TreeBuilder, tree: Any) -> tuple[ast.TensorParam, ...]:
    return tuple([_tensor(b, child) for child in tree.children])


def _function(b: TreeBuilder, tree: Any) -> ast.FunctionDecl:
    name, dims, tensors, result, block = tree.children
    return ast.FunctionDecl(
        b.name(name),
        () if dims is None else b.names(dims),
        _tensors(b, tensors),
        b.maybe_dims(result),
        _body(b, block),
        b.span(tree),
    )


def _program(b: TreeBuilder, tree: Any) -> ast.ProgramDecl:
    name, tensors, block = tree.children
    return ast.ProgramDecl(b.name(name), _tensors(b, tensors), _body(b, block), b.span(tree))


def _expect(b: TreeBuilder, tree: Any) -> ast.Expect:
    layout, mesh, policy, entries = tree.children
    made = b.all_of(entries.children, {"expect_placement": _placement, "expect_count": _count})
    return ast.Expect(b.name(layout), b.maybe_name(mesh), b.maybe_name(policy), made, b.span(tree))


def _placement(b: TreeBuilder, tree: Any) -> ast.ExpectPlacement:
    tensor, dims = tree.children
    return ast.ExpectPlacement(b.names(tensor), b.dims(dims), b.span(tree))


def _count(b: TreeBuilder, tree: Any) -> ast.ExpectCount:
    path, axes, value = tree.children
    what, *dotted = b.names(path)
    if dotted:
        fail(
            "MD0001",
            f"expected `:` or `over` after `{what.text}`, found `.`",
            dotted[0].span,
            help="a tensor's placement is a list of dims: `mlp.h: [batch@data, hidden]`",
        )
    over = None if axes is None else b.names(axes)
    return ast.ExpectCount(what, over, b.expr(value), b.span(tree))


_DECLARATIONS: Makers = {
    "dim_decl": _dim,
    "mesh_decl": _mesh,
    "layout_decl": _layout,
    "sbp_decl": _sbp,
    "schedule_decl": _schedule,
    "function_decl": _function,
    "program_decl": _program,
    "expect_decl": _expect,
}
