"""Checks of functions that no program calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from meshdsl.diagnostics import Diagnostics, both
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.builder import Scope
from meshdsl.named.declarations import Declarations
from meshdsl.named.from_syntax import ProgramBuilder
from meshdsl.named.ir import Value
from meshdsl.syntax import ast

SURE = ("MD01", "MD0260", "MD09")
"""Sections of the codes of errors that do not depend on the dims of a call."""


def check_uncalled(declarations: Declarations, diagnostics: Diagnostics) -> None:
    """Build every `def` that no program reaches on tensors as it declares them.

    For one that works on any dims (`[d]`, `...`) only wrong names are reported.
    """
    for function in uncalled(declarations):
        problems = Diagnostics()
        _build(function, declarations, problems)
        generic = bool(function.dims) or any(_is_open(p.dims) for p in function.params)
        diagnostics.add(*(d for d in problems if not generic or d.code.startswith(SURE)))


def uncalled(declarations: Declarations) -> list[ast.FunctionDecl]:
    """The functions that are not called from a program, directly or through others."""
    functions = declarations.functions
    if not functions:
        return []
    waiting: list[ast.ProgramDecl | ast.FunctionDecl] = list(declarations.programs.values())
    reached: set[str] = set()
    while waiting:
        inside = ast.walk(waiting.pop())
        names = {node.function.text for node in inside if isinstance(node, ast.CallExpr)}
        new = {name for name in names if name in functions} - reached
        reached |= new
        waiting += [functions[name] for name in new]
    return [f for name, f in functions.items() if name not in reached]


def _is_open(dims: Iterable[ast.DimRef]) -> bool:
    return any(d.dim.text == "..." for d in dims)


def _build(
    function: ast.FunctionDecl, declarations: Declarations, diagnostics: Diagnostics
) -> None:
    program = ProgramBuilder(declarations, diagnostics)
    dims = {d.text: Dim(d.text, 1) for d in function.dims}
    name = function.name.text
    scope = Scope({**declarations.dims, **dims}, {}, declarations, (name,), (name,))
    for param in function.params:
        name = param.name.text
        scope.names[name] = diagnostics.of(partial(_given, param, program, scope))
        if scope.names[name] is None:
            scope.wrong_dims.add("...")
    if "..." not in scope.wrong_dims:
        scope.groups["..."] = ()
    diagnostics.of(partial(program.function_body, function, scope))


def _given(param: ast.TensorParam, program: ProgramBuilder, scope: Scope) -> Value:
    """A tensor as a parameter declares it."""
    (dims, _), dtype = both(
        partial(program.dim_list, param.dims, scope), partial(program.dtype, param.dtype)
    )
    return program.builder.value(TensorType(dims, dtype), param.span)
