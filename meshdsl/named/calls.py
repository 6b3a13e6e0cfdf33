"""Calls: operators of the registry, and `def`s, which are inlined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Edit,
    Fix,
    Poisoned,
    Related,
    Span,
    counted,
    did_you_mean,
    fail,
    spelled_right,
)
from meshdsl.ir.types import DTYPES, Dim, DType
from meshdsl.named.builder import Operand, Scope, TooLarge, need_tensor
from meshdsl.named.expressions import LATER, option_value, surface_name, unknown_function
from meshdsl.named.ir import Value
from meshdsl.named.prelude import prelude
from meshdsl.ops.opdef import OpDef, OpError, load_all
from meshdsl.syntax import ast
from meshdsl.syntax.edits import cast_to

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

MAX_CALL_DEPTH = 64
"""The greatest depth of nested calls."""


@dataclass(slots=True)
class Arguments:
    """Evaluated arguments of a call: operands with their places, and options."""

    operands: list[Operand] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


class Calls:
    """Resolves the function of a call: a user's `def`, an operator, or a `def` of the prelude."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.open: list[ast.Function] = []

    def call(self, node: ast.Call, scope: Scope) -> tuple[Operand, ...]:
        """The values that `node` yields."""
        name = node.function.text
        if name in scope.declarations.functions:
            self._note_shadowing(scope.declarations.functions[name])
            return self.inline(scope.declarations.functions[name], node, scope)
        if name == "grad":
            return self.program.goals.grad(node, scope)
        if name in LATER:
            help = "compute it outside and pass it as an input"
            fail(LATER[name], f"`{name}` is not supported yet", node.function.span, help=help)
        if name in load_all() and load_all()[name].surface.items != "view":
            return self.operator(load_all()[name], node, scope)
        if name in prelude().functions and name not in load_all():
            return self.inline(prelude().functions[name], node, scope)
        if name == "not":
            return (self.program.expressions.pointwise("logical_not", node.args, node.span, scope),)
        callable_ = [n for n, op in load_all().items() if op.surface.items != "view"]
        known = [*scope.declarations.functions, *callable_, *prelude().functions]
        unknown_function(node.function, known)

    def _note_shadowing(self, function: ast.Function) -> None:
        name = function.name.text
        if name in load_all() or name in prelude().functions:
            message = f"this `def {name}` stands before the library's `{name}`"
            help = "rename it if the library's was meant"
            note = Diagnostic("MD0116", message, function.name.span, "note", help=help)
            self.builder.diagnostics.add(note)

    # --- operators ---------------------------------------------------------------------------

    def operator(self, opdef: OpDef, node: ast.Call, scope: Scope) -> tuple[Operand, ...]:
        """Apply an operator of the registry by its `surface`."""
        try:
            arguments = self._arguments(opdef, node, scope)
        except Poisoned:
            if opdef.surface.items != "none":
                self._items(opdef, node, [], scope)
            raise
        tensors = [x for x in arguments.operands if isinstance(x, Value)]
        _check_arity(opdef, len(arguments.operands), node)
        if opdef.surface.items == "none" and not opdef.surface.options:
            _no_items(node, opdef)
            spans = tuple(arguments.spans)
            operands = arguments.operands
            return (self.program.expressions.apply(opdef.name, operands, spans, node.span, scope),)
        group = _only_group(opdef, node, scope)
        if group:
            return (self._row_major(opdef, group, node.span, scope),)
        attrs = self._items(opdef, node, tensors, scope) | arguments.options
        if opdef.surface.items == "dims?" and not tensors:
            need_tensor(arguments.operands[0], arguments.spans[0])
        if opdef.surface.items == "dims?" and _changes_nothing(opdef, attrs, tensors[0]):
            return (tensors[0],)
        dtype = tensors[0].type.dtype if tensors else DTYPES["f32"]
        values = tuple(
            self.program.expressions.as_value(x, dtype, s, scope)
            for x, s in zip(arguments.operands, arguments.spans, strict=True)
        )
        if opdef.bind is not None:
            try:
                attrs = dict(opdef.bind(attrs, tuple(v.type for v in values)))
            except OpError as error:
                fail(error.code, error.message, node.span, help=error.help)
        spans = tuple(arguments.spans)
        return self.builder.emit(opdef.name, values, attrs, node.span, scope, spans)

    def _arguments(self, opdef: OpDef, node: ast.Call, scope: Scope) -> Arguments:
        """Tensors first, then options by position, then options by name."""
        found = Arguments(options=dict(opdef.surface.options))
        names = [name for name, _ in opdef.surface.options]
        given = 0
        for arg in node.args:
            operand = self.program.expressions.evaluate(arg, scope)
            full = len(found.operands) >= opdef.surface.arity[0]
            if not isinstance(operand, Value) and full and given < len(names):
                found.options[names[given]] = option_value(operand, arg.span)
                given += 1
                continue
            found.operands.append(operand)
            found.spans.append(arg.span)
        for keyword in node.keywords:
            self._keyword(opdef, keyword, found, scope)
        _check_options(opdef, found.options, node)
        return found

    def _keyword(self, opdef: OpDef, keyword: ast.Keyword, found: Arguments, scope: Scope) -> None:
        if keyword.name.text not in found.options:
            known = ", ".join(f"`{name}`" for name, _ in opdef.surface.options) or "none"
            message = f"`{opdef.name}` has no option `{keyword.name.text}`"
            names = [name for name, _ in opdef.surface.options]
            fixes = spelled_right(keyword.name.span, keyword.name.text, names)
            fail("MD0253", message, keyword.name.span, help=f"its options: {known}", fixes=fixes)
        operand = self.program.expressions.evaluate(keyword.value, scope)
        found.options[keyword.name.text] = option_value(operand, keyword.value.span)

    def _items(
        self, opdef: OpDef, node: ast.Call, tensors: list[Value], scope: Scope
    ) -> dict[str, Any]:
        """The attributes from the bracket (or the arrow) of a call."""
        kind = opdef.surface.items
        if kind == "none":
            _no_items(node, opdef)
            return {}
        if kind == "out":
            if node.out is None:
                help = f"write `{surface_name(opdef)}`: dims missing on the right are summed"
                fail("MD0252", f"`{opdef.name}` needs its result dims", node.span, help=help)
            return {"dims": tuple(self.program.expressions.dim(n, scope) for n in node.out)}
        if node.out is not None:
            _no_result_dims(opdef, node)
        if kind == "dims?" and node.items is None:
            return {"dims": tensors[0].type.dims if tensors else ()}
        joins = kind == "join" and any(isinstance(i, ast.ArrowItem) for i in node.items or ())
        if kind == "arrow" or joins:
            return self._arrow(opdef, node, scope)
        dims = self._dims(opdef, node, scope)
        if kind not in ("dim", "join"):
            return {"dims": dims}
        if len(dims) != 1:
            help = f"write `{surface_name(opdef)}`"
            fail("MD0252", f"`{opdef.name}` takes one dim in `[ ]`", node.span, help=help)
        return {"dim": dims[0]}

    def _row_major(self, opdef: OpDef, dims: tuple[Dim, ...], span: Span, scope: Scope) -> Value:
        """The row-major index over several dims, of the indices along each."""
        found, *others = (
            self.builder.emit(opdef.name, (), {"dim": dim}, span, scope)[0] for dim in dims
        )
        for dim, index in zip(dims[1:], others, strict=True):
            size = self.builder.constant(dim.size, index.type.dtype, span, scope)
            found = self.builder.emit("mul", (found, size), {}, span, scope)[0]
            found = self.builder.emit("add", (found, index), {}, span, scope)[0]
        return found

    def _dims(self, opdef: OpDef, node: ast.Call, scope: Scope) -> tuple[Dim, ...]:
        if not node.items and opdef.surface.items != "maker":
            help = f"write `{surface_name(opdef)}`"
            fail("MD0252", f"`{opdef.name}` needs its dims in `[ ]`", node.span, help=help)
        dims: list[Dim] = []
        for item in node.items or ():
            if not isinstance(item, ast.DimItem):
                help = f"write `{surface_name(opdef)}`"
                fail("MD0252", f"`{opdef.name}` takes plain dims in `[ ]`", item.span, help=help)
            group = scope.groups.get(item.dim.text)
            dims += group or (self.program.expressions.dim(item.dim, scope),)
        return tuple(dims)

    def _arrow(self, opdef: OpDef, node: ast.Call, scope: Scope) -> dict[str, Any]:
        items = node.items or ()
        if len(items) != 1 or not isinstance(items[0], ast.ArrowItem):
            help = f"write `{surface_name(opdef)}`"
            fail("MD0252", f"`{opdef.name}` takes `[old -> new]`", node.span, help=help)
        dim = self.program.expressions.dim
        return {
            "source": tuple(dim(n, scope) for n in items[0].sources),
            "target": tuple(dim(n, scope) for n in items[0].targets),
        }

    # --- functions ---------------------------------------------------------------------------

    def inline(self, function: ast.Function, node: ast.Call, scope: Scope) -> tuple[Operand, ...]:
        """Build the body of `function` in place; its parameters belong to this call."""
        self._guard_recursion(function, node, scope)
        # Arguments first: in `f(f(x))` the inner call comes first, and is called `f`.
        matched = self._match(function, node)
        given = {n: self.program.expressions.evaluate(arg, scope) for n, arg in matched.items()}
        inner = self._enter(function, node, scope)
        self._bind_dims(function, node, scope, inner)
        self._bind_tensors(function, node, given, matched, inner)
        self.open.append(function)
        try:
            return self.program.function_body(function, inner)
        except TooLarge:
            raise
        except DiagnosticError as error:
            raise _at_call(error, node) from None
        finally:
            self.open.pop()

    def _guard_recursion(self, function: ast.Function, node: ast.Call, scope: Scope) -> None:
        name = function.name.text
        if len(scope.functions) >= MAX_CALL_DEPTH:
            message = f"calls nest more than {MAX_CALL_DEPTH} deep"
            help = "functions are inlined; use `repeat` for a loop"
            fail("MD0110", message, node.function.span, help=help)
        if any(caller is function for caller in self.open):
            where = Related(function.name.span, "defined here")
            message = f"`{name}` calls itself"
            help = "functions are inlined; use `repeat` for a loop"
            fail("MD0110", message, node.function.span, where, help=help)

    def _enter(self, function: ast.Function, node: ast.Call, scope: Scope) -> Scope:
        own = function is not prelude().functions.get(function.name.text)
        declarations = scope.declarations if own else prelude()
        path, functions = scope.enter(function.name.label)
        root = self.program.root_dims if own else {}
        return Scope(dict(root), {}, declarations, path, functions)

    def _bind_dims(
        self, function: ast.Function, node: ast.Call, scope: Scope, inner: Scope
    ) -> None:
        items = node.items or ()
        if len(items) != len(function.dims):
            names = ", ".join(d.text for d in function.dims)
            message = f"`{function.name.text}` takes {counted(len(function.dims), 'dim')} in `[ ]`"
            help = f"write `{function.name.text}[{names}](…)`" if names else "leave out the `[ ]`"
            where = Related(function.name.span, "defined here")
            fixes = () if names else _without_items(node)
            fail("MD0252", message, node.span, where, help=help, fixes=fixes)
        for name, item in zip(function.dims, items, strict=True):
            if not isinstance(item, ast.DimItem):
                names = ", ".join(d.text for d in function.dims)
                help = f"write `{function.name.text}[{names}](…)`"
                fail("MD0252", "a function takes plain dims in `[ ]`", item.span, help=help)
            inner.dims[name.text] = self.program.expressions.dim(item.dim, scope)

    def _bind_tensors(
        self,
        function: ast.Function,
        node: ast.Call,
        given: dict[str, Operand],
        matched: dict[str, ast.Expr],
        inner: Scope,
    ) -> None:
        for param in function.params:
            if param.name.text in given:
                value = given[param.name.text]
                self._check_param(param, value, matched[param.name.text], inner)
            elif param.default is not None:
                value = self.program.expressions.evaluate(param.default, inner)
            else:
                where = Related(param.span, "declared here")
                message = f"`{function.name.text}` is called without `{param.name.text}`"
                help = f"write `{_form(function)}`"
                fail("MD0251", message, node.span, where, help=help)
            inner.names[param.name.text] = value

    def _match(self, function: ast.Function, node: ast.Call) -> dict[str, ast.Expr]:
        names = [p.name.text for p in function.params]
        if len(node.args) > len(names):
            message = f"`{function.name.text}` takes {counted(len(names), 'tensor')}"
            where = Related(function.name.span, "defined here")
            help = f"write `{_form(function)}`"
            fail("MD0251", message, node.args[len(names)].span, where, help=help)
        given = dict(zip(names, node.args, strict=False))
        for keyword in node.keywords:
            if keyword.name.text not in names:
                message = f"`{function.name.text}` has no tensor `{keyword.name.text}`"
                word, span = keyword.name.text, keyword.name.span
                help = did_you_mean(word, names) or f"write `{_form(function)}`"
                fail("MD0251", message, span, help=help, fixes=spelled_right(span, word, names))
            if keyword.name.text in given:
                where = Related(given[keyword.name.text].span, "it is given here already")
                message, help = f"`{keyword.name.text}` is given twice", "remove one"
                fail("MD0251", message, keyword.span, where, help=help)
            given[keyword.name.text] = keyword.value
        return given

    def _check_param(
        self, param: ast.TensorParam, value: Operand, arg: ast.Expr, inner: Scope
    ) -> None:
        if isinstance(value, int | float):
            return
        if not isinstance(value, Value):
            need_tensor(value, arg.span)
        dims, rest = self.program.dim_list(param.dims, inner)
        message = mismatch(value, dims, rest)
        where = Related(param.span, "declared here")
        if message:
            help = "pass a tensor with the declared dims; `x[a -> b]` renames one"
            fail("MD0250", f"`{param.name.text}`: {message}", arg.span, where, help=help)
        if param.dtype and self.program.dtype(param.dtype) != value.type.dtype:
            dtype = self.program.dtype(param.dtype)
            help = f"cast it: `cast(…, {dtype})`"
            message = f"`{param.name.text}` is {dtype}, and this is {value.type.dtype}"
            fail(
                "MD0250",
                message,
                arg.span,
                where,
                help=help,
                fixes=(cast_to(arg.span, str(dtype)),),
            )


def _only_group(opdef: OpDef, node: ast.Call, scope: Scope) -> tuple[Dim, ...] | None:
    """The several dims under one name that a maker of indices is given, in a definition."""
    match node.items:
        case (ast.DimItem(dim=name),) if opdef.surface.items == "dim" and not node.args:
            return scope.groups.get(name.text)
    return None


def _changes_nothing(opdef: OpDef, attrs: Mapping[str, Any], operand: Value) -> bool:
    """Whether a reduction over no dims is its operand; `argmax` is an index even then."""
    if attrs["dims"]:
        return False
    try:
        return opdef.infer((operand.type,), attrs) == (operand.type,)
    except OpError:
        return True


def mismatch(value: Value, dims: tuple[Dim, ...], rest: bool) -> str | None:
    """The mismatch of a tensor with `dims` (and any others with `rest`) in words, or None."""
    declared = {d.name for d in dims}
    missing = [d.name for d in dims if not value.type.has(d.name)]
    extra = [] if rest else [n for n in value.type.names if n not in declared]
    if not missing and not extra:
        return None
    parts = [f"it lacks {_names(missing)}"] if missing else []
    parts += [f"it also has {_names(extra)}"] if extra else []
    return f"this tensor is {value.type}; {' and '.join(parts)}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _at_call(error: DiagnosticError, node: ast.Call) -> DiagnosticError:
    """The errors inside the function, each with the call as a related place."""
    related = Related(node.span, f"in this call of `{node.function.text}`")
    found = []
    for d in error.diagnostics:
        notes = (*d.related, related) if len(d.related) < 3 else d.related
        found.append(replace(d, related=notes))
    return DiagnosticError(*found)


def _no_items(node: ast.Call, opdef: OpDef) -> None:
    if node.items is not None:
        help = f"write `{surface_name(opdef)}`"
        message = f"`{opdef.name}` takes no `[ ]`"
        fail("MD0252", message, node.span, help=help, fixes=_without_items(node))
    if node.out is not None:
        _no_result_dims(opdef, node)


def _without_items(node: ast.Call) -> tuple[Fix, ...]:
    """The fix that leaves the brackets of a call out; none if they do not follow its name."""
    text, start = node.span.source.text, node.function.span.end
    last = node.items[-1].span.end if node.items else start + 1
    end = text.find("]", last) + 1
    if text[start : start + 1] != "[" or not end:
        return ()
    return (Fix("leave out the `[ ]`", (Edit(Span(node.span.source, start, end), ""),)),)


def _no_result_dims(opdef: OpDef, node: ast.Call) -> NoReturn:
    help = f"write `{surface_name(opdef)}`"
    fail("MD0252", f"`{opdef.name}` takes no `-> [dims]`", node.span, help=help)


def _form(function: ast.Function) -> str:
    """The form of a call of a function."""
    dims = f"[{', '.join(d.text for d in function.dims)}]" if function.dims else ""
    return f"{function.name.text}{dims}({', '.join(p.name.text for p in function.params)})"


def _check_arity(opdef: OpDef, count: int, node: ast.Call) -> None:
    low, high = opdef.surface.arity
    if count < low or (high is not None and count > high):
        wanted = (
            str(low) if high == low else f"{low} or more" if high is None else f"{low} to {high}"
        )
        noun = "tensor" if wanted == "1" else "tensors"
        message = f"`{opdef.name}` takes {wanted} {noun}, and {count or 'none'} are given"
        fail("MD0251", message, node.span, help=f"write `{surface_name(opdef)}`")


def _check_options(opdef: OpDef, options: dict[str, Any], node: ast.Call) -> None:
    for name, value in options.items():
        if value is ...:
            help = f"write `{opdef.name}(…, {name}=…)`"
            fail("MD0253", f"`{opdef.name}` needs its option `{name}`", node.span, help=help)
        if isinstance(value, DType) != (name == "dtype"):
            help = "write a number" if name != "dtype" else f"the dtypes are {', '.join(DTYPES)}"
            message = f"option `{name}` of `{opdef.name}` cannot be {value}"
            fail("MD0253", message, node.span, help=help)
