"""Parse tree to syntax tree, the upper half: statements and declarations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshdsl.diagnostics import Diagnostic, Poisoned, Source, Span, fail
from meshdsl.syntax import ast
from meshdsl.syntax.build_expressions import (
    Maker,
    Makers,
    TreeBuilder,
    make_call,
    make_items,
    make_keywords,
    node_maker,
    tuple_maker,
)
from meshdsl.syntax.foreign_statements import statements

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Tree

MAX_DEPTH = 200
"""The greatest depth of nested operators, calls, views and blocks."""

_DEEPENS = frozenset({"binary", "unary", "call", "view", "bracketed", "block"})


def build_file(source: Source, file: Tree) -> tuple[ast.SourceFile, list[Diagnostic]]:
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

_NAME, _MAYBE_NAME, _NAMES = TreeBuilder.name, TreeBuilder.maybe_name, TreeBuilder.names
_EXPR, _DIMS = TreeBuilder.expr, TreeBuilder.maybe_dims
_target = node_maker(ast.Target, _NAME, _DIMS)


def _assign(b: TreeBuilder, tree: Any) -> ast.Assign:
    *targets, value = tree.children
    return ast.Assign(tuple([_target(b, t) for t in targets]), b.expr(value), b.span(tree))


def _maybe_call(b: TreeBuilder, tree: Any) -> ast.CallExpr | None:
    return None if tree is None else make_call(b, tree)


def _minimize(b: TreeBuilder, tree: Any) -> ast.Minimize:
    value, optimizer, groups = tree.children
    settings = () if groups is None else tuple(_group_settings(b, groups.children))
    return ast.Minimize(b.expr(value), make_call(b, optimizer), settings, b.span(tree))


def _group_settings(
    b: TreeBuilder, trees: list[Any]
) -> Iterator[ast.GroupSetting | ast.GroupOptimizer]:
    """The settings of all groups; one without selectors has those of the setting before it."""
    makers: Makers = {
        "group_setting": _group_setting,
        "group_optimizer": _group_optimizer,
        "more_setting": _more_setting,
    }
    selectors: tuple[tuple[ast.Name, ...], ...] = ()
    for setting in b.all_of(trees, makers):
        selectors = setting.selectors or selectors
        if selectors:
            yield replace(setting, selectors=selectors)
            continue
        if any(tree.data == "broken" for tree in trees):
            continue  # its group may be the broken one
        example = f"NAME: {setting.span.text}"
        b.errors.append(
            Diagnostic(
                "MD0001",
                f"expected what `{setting.name.text}` is for",
                setting.name.span,
                help=f"write `{example}`; options of all parameters are arguments of the optimizer",
            )
        )


def _group_setting(b: TreeBuilder, tree: Any) -> ast.GroupSetting:
    paths, name, value = tree.children
    selectors = tuple([b.names(path) for path in paths.children])
    return ast.GroupSetting(selectors, b.name(name), b.maybe_expr(value), b.span(tree))


def _group_optimizer(b: TreeBuilder, tree: Any) -> ast.GroupOptimizer:
    paths, call = tree.children
    selectors = tuple([b.names(path) for path in paths.children])
    return ast.GroupOptimizer(selectors, make_call(b, call), b.span(tree))


def _more_setting(b: TreeBuilder, tree: Any) -> ast.GroupSetting:
    name, value = tree.children
    return ast.GroupSetting((), b.name(name), b.expr(value), b.span(tree))


def _body(b: TreeBuilder, tree: Any) -> tuple[ast.Statement, ...]:
    return b.all_of(tree.children, _STATEMENTS)


_STATEMENTS: Makers = {
    **statements(_assign, _body),
    "assign": _assign,
    "update": node_maker(ast.UpdateStatement, _NAME, None, _EXPR),
    "param": node_maker(ast.ParamDecl, _target, _MAYBE_NAME, _maybe_call),
    "repeat": node_maker(ast.Repeat, _NAME, _body),
    "recompute": node_maker(ast.Recompute, _body),
    "return_": lambda b, tree: ast.Return(tuple_maker(_EXPR)(b, tree), b.span(tree)),
    "minimize": _minimize,
}


# --- declarations ----------------------------------------------------------------------------


def _entries(makers: Makers) -> Maker:
    """The entries of a block that are right, each made by its rule."""
    return lambda b, tree: b.all_of(tree.children, makers)


_setting = node_maker(ast.SettingDecl, _NAMES, _NAME, _EXPR)


def _layout(b: TreeBuilder, tree: Any) -> ast.LayoutDecl:
    name, base, entries, schedule = tree.children
    nodes = b.all_of(entries.children, {"rule": _rule, "setting": _setting})
    rules = tuple(n for n in nodes if isinstance(n, ast.RuleDecl))
    settings = tuple(n for n in nodes if isinstance(n, ast.SettingDecl))
    used = None if schedule is None else _scheduled(b, schedule)
    return ast.LayoutDecl(b.name(name), b.maybe_name(base), rules, used, b.span(tree), settings)


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


_action = node_maker(ast.ScheduleAction, _NAME, TreeBuilder.maybe_number)


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


def _sbp_entry(b: TreeBuilder, tree: Any) -> ast.SbpEntry:
    tensor, use, *components = tree.children
    reader = b.names(use.children[0]) if use.children else ()
    placements = tuple([b.expr(c) for c in components])
    return ast.SbpEntry(b.names(tensor), reader, placements, b.span(tree))


def _ignored(b: TreeBuilder, tree: Any) -> ast.IgnoredKeys:
    word, pattern = tree.children
    if word != "ignore":
        fail(
            "MD0001",
            f"expected `:` or `.`, found {pattern}",
            b.name(pattern).span,
            help=f"write `{word}: {pattern}[…]` with the dims of the file, or `ignore {pattern}`",
        )
    return ast.IgnoredKeys(b.string(pattern), b.span(tree))


def _weights_group(b: TreeBuilder, tree: Any) -> ast.WeightsGroup:
    word, *prefixes, entries = tree.children
    if word != "under":
        help = 'entries whose keys begin alike are written `under "model." { … }`'
        fail("MD0001", f"expected `under`, found `{word}`", b.name(word).span, help=help)
    texts = tuple([b.string(text) for text in prefixes if text.type == "STRING"])
    return ast.WeightsGroup(texts, _weights_entries(b, entries), b.span(tree))


def _file_dim(b: TreeBuilder, tree: Any) -> ast.FileDim:
    if tree.data == "file_unit":
        unit, *size = (
            b.number(word) if word.type == "NUMBER" else b.name(word)
            for word in tree.children
            if word is not None
        )
        return ast.FileUnit(unit, size[0] if size else None, b.span(tree))
    dims = tuple([_file_dim(b, child) for child in tree.children])
    if tree.data == "file_merged":
        return ast.FileMerged(dims, b.span(tree))
    parts = tuple(dim for dim in dims if not isinstance(dim, ast.FileJoined))
    return ast.FileJoined(parts, b.span(tree))


def _stored(b: TreeBuilder, tree: Any) -> ast.FileTensor | ast.StoredPath:
    if tree.data == "path":
        return ast.StoredPath(b.names(tree), b.span(tree))
    key, *dims = tree.children
    file_dims = tuple([_file_dim(b, dim) for dim in dims])
    return ast.FileTensor(b.string(key), file_dims, b.span(tree))


def _weights_entry(b: TreeBuilder, tree: Any) -> ast.WeightsEntry:
    params, *places = tree.children
    paths = tuple([b.names(path) for path in params.children])
    stored = tuple([_stored(b, place) for place in places if hasattr(place, "data")])
    return ast.WeightsEntry(paths, stored, b.span(tree))


_weights_entries = _entries(
    {"weights_entry": _weights_entry, "ignored": _ignored, "weights_group": _weights_group}
)

_tensors = tuple_maker(
    node_maker(
        ast.TensorParam,
        _NAME,
        lambda b, dims: b.maybe_dims(dims) or (),
        _MAYBE_NAME,
        TreeBuilder.maybe_expr,
    )
)


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
    return ast.ExpectCount(what, b.maybe_names(axes), b.expr(value), b.span(tree))


_expected = _entries(
    {
        "expect_placement": node_maker(ast.ExpectPlacement, _NAMES, TreeBuilder.dims),
        "expect_count": _count,
    }
)

_DECLARATIONS: Makers = {
    "use_decl": node_maker(ast.UseDecl, None, _NAME),
    "dim_decl": node_maker(ast.DimDecl, _NAME, _EXPR),
    "mesh_decl": node_maker(
        ast.MeshDecl,
        _NAME,
        _entries({"mesh_axis": node_maker(ast.MeshAxis, _NAME, _EXPR)}),
        _MAYBE_NAME,
    ),
    "layout_decl": _layout,
    "sbp_decl": node_maker(ast.Sbp, _NAME, _entries({"sbp_entry": _sbp_entry})),
    "schedule_decl": _schedule,
    "weights_decl": node_maker(
        ast.WeightsDecl,
        None,
        _NAME,
        _weights_entries,
    ),
    "function_decl": node_maker(
        ast.FunctionDecl,
        _NAME,
        lambda b, dims: b.maybe_names(dims) or (),
        _tensors,
        _DIMS,
        _body,
    ),
    "program_decl": node_maker(ast.ProgramDecl, _NAME, _tensors, _body),
    "expect_decl": node_maker(
        ast.Expect, _NAME, None, _MAYBE_NAME, _MAYBE_NAME, _MAYBE_NAME, _expected
    ),
}
