"""Trees as short text without spans, for tables of cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshdsl.diagnostics import Source
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse


def tree(text: str) -> ast.SourceFile:
    """The tree of a text without errors."""
    file, errors = parse(Source("t", text))
    assert not errors, errors
    return file


def shown(text: str) -> list[str]:
    """Every declaration of a text."""
    return [show(declaration) for declaration in tree(text).declarations]


def declaration(text: str) -> tuple[ast.Declaration, ...]:
    """All declarations of a text."""
    return tree(text).declarations


def statement(text: str) -> ast.Statement:
    """One statement."""
    (program,) = declaration(f"program p() {{\n{text}\n}}")
    assert isinstance(program, ast.ProgramDecl)
    (only,) = program.body
    return only


def expression(text: str) -> ast.Expr:
    """One expression."""
    only = statement(f"it = {text}")
    assert isinstance(only, ast.Assign)
    return only.value


def show(node: Any) -> str:
    """A node as text, without its spans."""
    return str(_SHOW[type(node)](node))


def _list(nodes: Iterable[Any], between: str = ", ") -> str:
    return between.join(show(node) for node in nodes)


def _tuple(names: tuple[ast.Name, ...] | None) -> str:
    return "" if names is None else f"({_list(names)})"


def _call(n: ast.CallExpr) -> str:
    items = "" if n.items is None else f"[{_list(n.items)}]"
    out = "" if n.out is None else " > " + _list(n.out, " ")
    return f"{show(n.function)}{items}({_list([*n.args, *n.keywords])}{out})"


def _slice(n: ast.SliceItem) -> str:
    start, stop = (show(e) if e else "" for e in (n.start, n.stop))
    return f"{show(n.dim)}={start}:{stop}" + (f">{show(n.target)}" if n.target else "")


def _dims(dims: tuple[ast.DimRef, ...] | None) -> str:
    return "" if dims is None else f"[{_list(dims)}]"


def _dim_ref(n: ast.DimRef) -> str:
    return show(n.dim) + ("" if n.axes is None else "@" + _tuple(n.axes))


def _maybe(before: str, node: Any) -> str:
    return "" if node is None else before + show(node)


def _rule(n: ast.RuleDecl) -> str:
    selector = f"{_list(n.selector, '.')}: " if n.selector else ""
    return f"{selector}{show(n.dim)} -> {_tuple(n.axes)}{' keep' if n.keep else ''}"


def _function(n: ast.FunctionDecl) -> str:
    result = None if n.result is None else _dims(n.result)
    head = f"def {show(n.name)}[{_list(n.dims)}]({_list(n.params)}) -> {result}"
    return f"{head} {{ {_list(n.body, '; ')} }}"


def _tensor(n: ast.TensorParam) -> str:
    return show(n.name) + _dims(n.dims) + _maybe(": ", n.dtype) + _maybe(" = ", n.default)


def _expect(n: ast.Expect) -> str:
    mesh, policy = (None if x is None else show(x) for x in (n.mesh, n.policy))
    about = show(n.layout) + _maybe(" for ", n.program)
    return f"expect {about} on {mesh} with {policy}: {_list(n.entries)}"


def _count(n: ast.ExpectCount) -> str:
    over = "" if n.axes is None else f" over {_tuple(n.axes)}"
    return f"{show(n.what)}{over}: {show(n.value)}"


def _setting(n: ast.SettingDecl) -> str:
    return f"{_list(n.selector, '.')}: {show(n.name)} = {show(n.value)}"


def _mesh(n: ast.MeshDecl) -> str:
    profile = None if n.profile is None else show(n.profile)
    return f"mesh {show(n.name)} = {_list(n.axes)} on {profile}"


def _layout(n: ast.LayoutDecl) -> str:
    base = None if n.base is None else show(n.base)
    inside = _list((*n.rules, *n.settings))
    return f"layout {show(n.name)} extends {base}: {inside}{_maybe(' with ', n.schedule)}"


def _minimize(n: ast.Minimize) -> str:
    groups = f" {{ {_list(n.groups)} }}" if n.groups else ""
    return f"minimize {show(n.value)} with {show(n.optimizer)}{groups}"


def _paths(paths: tuple[tuple[ast.Name, ...], ...]) -> str:
    return f"({', '.join(_list(path, '.') for path in paths)})"


def _row(n: ast.ScheduleRow) -> str:
    return f"{show(n.device)}: {_list(n.actions, ' ')}"


_SHOW: dict[type, Any] = {
    ast.UseDecl: lambda n: f"use {show(n.name)}",
    ast.Name: lambda n: n.text,
    ast.Number: lambda n: repr(n.value),
    ast.String: lambda n: repr(n.value),
    ast.Ref: lambda n: show(n.name),
    ast.Unary: lambda n: f"({n.op} {show(n.operand)})",
    ast.Binary: lambda n: f"({show(n.left)} {n.op} {show(n.right)})",
    ast.DimItem: lambda n: show(n.dim),
    ast.ArrowItem: lambda n: f"{_list(n.sources, '+')}>{_list(n.targets, '+')}",
    ast.ByItem: lambda n: (
        f"{show(n.dim)} by {show(n.window)}" + ("" if n.target is None else f">{show(n.target)}")
    ),
    ast.PickItem: lambda n: f"{show(n.dim)}={show(n.index)}",
    ast.SliceItem: _slice,
    ast.Keyword: lambda n: f"{show(n.name)}={show(n.value)}",
    ast.CallExpr: _call,
    ast.ViewExpr: lambda n: f"{show(n.tensor)}[{_list(n.items)}]",
    ast.Foreign: lambda n: f"{n.kind} {n.word.text} {_list([*n.parts, *n.keywords])}",
    ast.DimRef: _dim_ref,
    ast.Target: lambda n: show(n.name) + _dims(n.dims),
    ast.Assign: lambda n: f"{_list(n.targets)} = {show(n.value)}",
    ast.UpdateStatement: lambda n: f"{show(n.name)} := {show(n.value)}",
    ast.ParamDecl: lambda n: (
        f"param {show(n.target)}{_maybe(': ', n.dtype)}{_maybe(' = ', n.init)}"
    ),
    ast.Repeat: lambda n: f"repeat {show(n.dim)} {{ {_list(n.body, '; ')} }}",
    ast.Recompute: lambda n: f"recompute {{ {_list(n.body, '; ')} }}",
    ast.Return: lambda n: f"return {_list(n.values)}",
    ast.GroupSetting: lambda n: f"{_paths(n.selectors)}: {show(n.name)}{_maybe(' = ', n.value)}",
    ast.GroupOptimizer: lambda n: f"{_paths(n.selectors)}: {show(n.optimizer)}",
    ast.Minimize: _minimize,
    ast.DimDecl: lambda n: f"dim {show(n.name)} = {show(n.value)}",
    ast.MeshAxis: lambda n: f"{show(n.name)}: {show(n.size)}",
    ast.MeshDecl: _mesh,
    ast.RuleDecl: _rule,
    ast.SettingDecl: _setting,
    ast.LayoutDecl: _layout,
    ast.SbpEntry: lambda n: f"{_list(n.tensor, '.')}: ({_list(n.components)})",
    ast.Sbp: lambda n: f"sbp {show(n.name)}: {_list(n.entries)}",
    ast.ScheduleAction: lambda n: show(n.text) + _maybe("@", n.stage),
    ast.ScheduleRow: _row,
    ast.ScheduleDecl: lambda n: (
        f"schedule {show(n.name)}({_list(n.options)}): {_list(n.rows, '; ')}"
    ),
    ast.FileUnit: lambda n: show(n.dim) + _maybe("=", n.size),
    ast.FileMerged: lambda n: f"({_list(n.dims)})",
    ast.FileJoined: lambda n: _list(n.parts, " + "),
    ast.FileTensor: lambda n: f"{show(n.key)}[{_list(n.dims)}]",
    ast.StoredPath: lambda n: _list(n.path, "."),
    ast.WeightsEntry: lambda n: f"{_paths(n.params)}: {_list(n.places, ' or ')}",
    ast.IgnoredKeys: lambda n: f"ignore {show(n.pattern)}",
    ast.WeightsGroup: lambda n: f"under {_list(n.prefixes, ' or ')}: {_list(n.entries)}",
    ast.WeightsDecl: lambda n: f"weights {show(n.name)}: {_list(n.entries)}",
    ast.TensorParam: _tensor,
    ast.FunctionDecl: _function,
    ast.ProgramDecl: lambda n: (
        f"program {show(n.name)}({_list(n.params)}) {{ {_list(n.body, '; ')} }}"
    ),
    ast.ExpectPlacement: lambda n: f"{_list(n.tensor, '.')}: {_dims(n.dims)}",
    ast.ExpectCount: _count,
    ast.Expect: _expect,
}
