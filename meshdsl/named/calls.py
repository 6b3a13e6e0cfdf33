"""Calls: operators of the registry, and `def`s, which are inlined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Edit,
    Fix,
    Poisoned,
    Related,
    Span,
    advice,
    all_of,
    both,
    counted,
    fail,
    spelled_right,
)
from meshdsl.ir.types import DTYPES, Dim, DType
from meshdsl.named.builder import Operand, Scope, need_tensor
from meshdsl.named.call_fixes import NOTHING, WrittenCall, along_a_dim, call_fixes, call_help
from meshdsl.named.count_include_pad import Elements
from meshdsl.named.emit import Emit
from meshdsl.named.expressions import Literals, option_value, surface_name, unknown_function
from meshdsl.named.foreign import RENAMED, row_of
from meshdsl.named.ir import Value
from meshdsl.named.prelude import NUMBERS, definition, form, library, prelude
from meshdsl.named.refused import is_foreign
from meshdsl.ops.opdef import Attrs, OpDef, OpError, load_all
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import around, cast_to, removal, shortened
from meshdsl.syntax.enclosing import called
from meshdsl.syntax.printer import expression

if TYPE_CHECKING:
    from meshdsl.named.from_syntax import ProgramBuilder

MAX_CALL_DEPTH = 64
"""The greatest depth of nested calls."""


@dataclass(slots=True)
class Arguments:
    """Evaluated arguments of a call: operands with their places, and options.

    `places` are those of options that are given by position.
    """

    operands: list[Operand] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Span] = field(default_factory=dict)


class Calls:
    """Resolves the function of a call: a user's `def`, an operator, or a `def` of the prelude."""

    def __init__(self, program: ProgramBuilder) -> None:
        self.program = program
        self.builder = program.builder
        self.open: list[ast.FunctionDecl] = []

    def call(self, node: ast.CallExpr, scope: Scope) -> tuple[Operand | None, ...]:
        """The values that `node` yields; None for one that is wrong, which is reported."""
        name = node.function.text
        if name in scope.declarations.functions and not self._is_of_library(name, scope):
            self._note_shadowing(scope.declarations.functions[name], node)
            return self.inline(scope.declarations.functions[name], node, scope)
        if name == "run_seed" and scope.in_library:
            return (self.program.streams.seed(node.span),)
        if name == "grad":
            return self.program.goals.grad(node, scope)
        if is_foreign(node) and row_of(name) is not None:
            return (self.program.refused.call("operator", node, scope),)
        opdef = load_all().get(name) or scope.declarations.operators.get(name)
        if opdef is not None and opdef.surface.items != "view":
            return self.operator(opdef, node, scope)
        if name in library():
            return self.inline(library()[name], node, scope)
        if name == "not":
            return (self.program.expressions.pointwise("logical_not", node.args, node.span, scope),)
        if row_of(name) is not None or name in RENAMED:
            return (self.program.refused.call("function", node, scope),)
        available = {**load_all(), **scope.declarations.operators}
        operators = [n for n, op in available.items() if op.surface.items != "view"]
        callables = [*scope.declarations.functions, *operators, *prelude().functions]
        unknown = partial(unknown_function, node.function, callables, scope.declarations.packages)
        self._refuse(unknown, node, scope)

    def _is_of_library(self, name: str, scope: Scope) -> bool:
        """Whether a function of the library calls a composite: that is an operator there, too.

        Only the definition of a composite is made of definitions.
        """
        return scope.in_library and bool(self.open) and name in load_all()

    def _refuse(
        self, refusal: Callable[[], NoReturn], node: ast.CallExpr, scope: Scope
    ) -> NoReturn:
        """Raise what is wrong with the function of a call, and with all else in it."""
        if scope.declarations.lacks_packages:  # it may be of one that is missing
            raise Poisoned
        all_of((refusal, partial(self._parts, node, scope)))
        raise AssertionError(node)

    def _parts(self, node: ast.CallExpr, scope: Scope) -> None:
        """Resolve what stands in a call whose function is not known; raises the errors in it."""
        evaluate = self.program.expressions.evaluate
        expressions = (*node.args, *(k.value for k in node.keywords))
        steps: list[Callable[[], object]] = [partial(evaluate, n, scope) for n in expressions]
        steps.append(partial(self.program.views.names, node.items or (), scope))
        steps.append(partial(self.program.expressions.dims, node.out or (), scope))
        all_of(steps)

    def _note_shadowing(self, function: ast.FunctionDecl, node: ast.CallExpr) -> None:
        """Note that a `def` stands before the library's, unless a call can only mean the `def`."""
        name = function.name.text
        library = load_all().get(name)
        if library is not None and library.surface.items in ("dim", "dims") and not node.items:
            return
        if name in load_all() or definition(name) is not None:
            message = f"this `def {name}` stands before the library's `{name}`"
            fixes = called(function.name.span, f"{name}_")
            help = advice(fixes, "if calls of the library's are meant, they have its name then")
            span = function.name.span
            note = Diagnostic("MD0116", message, span, "note", help=help, fixes=fixes)
            self.builder.diagnostics.add(note)

    # --- operators ---------------------------------------------------------------------------

    def operator(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> tuple[Operand, ...]:
        """Apply an operator of the registry by its `surface`."""
        node = self._with_index(opdef, node, scope)
        group = _only_group(opdef, node, scope)
        arguments, attrs = both(
            partial(self._arguments, opdef, node, scope),
            lambda: {} if group else self._items(opdef, node, scope),
        )
        tensors = [x for x in arguments.operands if isinstance(x, Value)]
        if opdef.surface.items == "none" and not opdef.surface.options:
            spans = tuple(arguments.spans)
            operands = arguments.operands
            return (self.program.expressions.apply(opdef.name, operands, spans, node.span, scope),)
        if group:
            return (self._row_major(opdef, group, node.span, scope),)
        if opdef.surface.items == "dims?" and node.items is None:
            attrs = {"dims": tensors[0].type.dims if tensors else ()}
        attrs = {**attrs, **arguments.options}
        if opdef.surface.items == "dims?" and not tensors:
            need_tensor(arguments.operands[0], arguments.spans[0])
        if opdef.surface.items == "dims?" and _changes_nothing(opdef, attrs, tensors[0]):
            return (tensors[0],)
        expressions = self.program.expressions
        dtypes = self._dtypes(opdef, arguments, attrs)
        values = tuple(
            expressions.as_value(expressions.retyped(x, d, scope), d, s, scope)
            for x, d, s in zip(arguments.operands, dtypes, arguments.spans, strict=True)
        )
        if opdef.surface.seeded:
            values, attrs = self.program.streams.drawing(
                opdef, values, attrs, arguments.spans, node, scope
            )
        if opdef.bind is not None:
            try:
                attrs = dict(opdef.bind(attrs, tuple(v.type for v in values)))
            except OpError as error:
                edited = NOTHING if self.builder.site else WrittenCall(node, arguments.places)
                declared = {} if self.builder.site else scope.declarations.dim_spans
                types = [value.type for value in values]
                fixes = call_fixes(error.ways, arguments.spans, types, edited, declared, node.span)
                help = call_help(error, fixes)
                fail(error.code, error.message, node.span, help=help, fixes=fixes)
        spans = (*arguments.spans, *[node.span] * len(values))[: len(values)]
        pad_counts = attrs.pop("pad_counts", 1)
        call = WrittenCall(node, arguments.places)
        results = self.builder.emit(
            opdef.name, values, attrs, node.span, scope, spans, written=call
        )
        written = tuple(arguments.operands)
        if written and len(results) == 1 and all(expressions.is_literal(x) for x in written):
            literals = Literals(opdef.name, written, spans, node.span, attrs)
            expressions.literals[results[0]] = literals
        elements = Elements(Emit(self.builder, node.span, scope))
        return results if pad_counts == 1 else (elements.mean(results[0], attrs, pad_counts),)

    def _with_index(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> ast.CallExpr:
        """`put[mem = pos](x, y)` with the index as last operand; a range is an index of each."""
        if not opdef.surface.indexed or node.items is None or len(node.items) != 1:
            return node
        (item,) = node.items
        match item:
            case ast.PickItem(dim=dim, index=index):
                pass
            case ast.SliceItem(dim=dim):
                index = self._range(opdef, item, scope)
            case _:
                return node
        items = (ast.DimItem(dim, dim.span),)
        return replace(node, items=items, args=(*node.args, index))

    def _range(self, opdef: OpDef, item: ast.SliceItem, scope: Scope) -> ast.Expr:
        """The indices `start + iota[target]` of a range; it may start at a tensor."""
        name, span = item.dim.text, item.span
        if item.target is None:
            help = f"name the dim of what is written: `{opdef.name}[{name} = 0:4 -> part](…)`"
            fail("MD0252", "a slice needs a name for its dim", span, help=help)
        dim = self.program.expressions.dim
        size, part = dim(item.dim, scope).size, dim(item.target, scope)
        start = item.start or ast.Number(0, span)
        stop = item.stop or ast.Number(size, span)
        sizes = [self._known(start, scope), self._known(stop, scope)]
        if None not in sizes:
            first, end = cast(list[int], sizes)
            if not 0 <= first < end <= size:
                message = f"the slice {first}:{end} does not lie in dim `{name}` of size {size}"
                help = f"a slice holds at least one element, and 0 <= start < stop <= {size}"
                fail("MD0210", message, span, help=help)
            count = end - first
        else:
            match stop:
                case ast.Binary(op="+", left=left, right=right) if expression(left) == expression(
                    start
                ):
                    offset = self._known(right, scope)
                case _:
                    offset = None
            if offset is None:
                wanted = f"{expression(start)}:{expression(start)} + {part.size} -> {part}"
                message = "the length of this slice is not known"
                fail("MD0253", message, span, help=f"write `{name} = {wanted}`")
            count = offset
        if count != part.size:
            message = f"the slice has {count} elements, and the dim `{part}` is of size {part.size}"
            help = f"declare `dim {part} = {count}`, or use a dim of that size"
            fail("MD0209", message, span, help=help)
        each = ast.DimItem(item.target, item.target.span)
        indices = ast.CallExpr(ast.Name("iota", span), (each,), (), (), None, span)
        return ast.Binary("+", start, indices, span, span)

    def _known(self, node: ast.Expr, scope: Scope) -> int | None:
        """The number that a bound is; None for a tensor."""
        operand = self.program.expressions.evaluate(node, scope)
        if isinstance(operand, Value):
            return None
        if not isinstance(operand, int):
            help = "use integers, dims, or an integer tensor"
            fail("MD0253", "the bounds of a slice are integers", node.span, help=help)
        return operand

    def _dtypes(self, opdef: OpDef, arguments: Arguments, attrs: Mapping[str, Any]) -> list[DType]:
        """The dtype that a number has as each operand."""
        dtype_of, operands = self.program.expressions.literal_dtype, arguments.operands
        if not opdef.surface.indexed:
            return [dtype_of(opdef.name, operands)] * len(operands)
        index = self._index_dtype(arguments, attrs["dim"])
        written = operands[:-1]
        is_integer = self.program.expressions.may_be(written, index)
        dtype = index if is_integer else dtype_of(opdef.name, written)
        return [*[dtype] * len(written), index]

    def _index_dtype(self, arguments: Arguments, dim: Dim) -> DType:
        """i32, of an index that is a number, which must be one of the dim."""
        index, span = arguments.operands[-1], arguments.spans[-1]
        if isinstance(index, Value):
            return index.type.dtype
        if not isinstance(index, int):
            help = f"write `[{dim.name} = 0]`, or index by a tensor of integers"
            fail("MD0253", "an index is an integer or an integer tensor", span, help=help)
        if not 0 <= index < dim.size:
            message = f"index {index} is out of range for dim `{dim}` of size {dim.size}"
            help = f"indices of `{dim}` run from 0 to {dim.size - 1}"
            fail("MD0210", message, span, help=help)
        return DTYPES["i32"]

    def _arguments(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Arguments:
        """Tensors first, then options by position, then options by name."""
        arguments = Arguments(options=dict(opdef.surface.options))
        names = [name for name, _ in opdef.surface.options]
        operands, options = both(
            lambda: all_of(partial(self.program.expressions.evaluate, a, scope) for a in node.args),
            lambda: all_of(partial(self._keyword, opdef, k, scope) for k in node.keywords),
        )
        positional = 0
        for arg, operand in zip(node.args, operands, strict=True):
            full = len(arguments.operands) >= opdef.surface.arity[0]
            if not isinstance(operand, Value) and full and positional < len(names):
                arguments.options[names[positional]] = option_value(operand, arg.span)
                arguments.places[names[positional]] = arg.span
                positional += 1
                continue
            if opdef.surface.seeded and full and "seed" in names:
                names.remove("seed")  # this one
            arguments.operands.append(operand)
            arguments.spans.append(arg.span)
        arguments.options.update(options)
        _check_options(opdef, arguments.options, node)
        _check_arity(opdef, len(arguments.operands), node)
        return arguments

    def _keyword(self, opdef: OpDef, keyword: ast.Keyword, scope: Scope) -> tuple[str, Any]:
        """The name and the value of an option."""
        if isinstance(keyword.value, ast.Foreign) and keyword.value.kind == "list":
            _no_list(opdef, keyword)
        evaluate = partial(self.program.expressions.evaluate, keyword.value, scope)
        _, operand = both(partial(_check_option, opdef, keyword), evaluate)
        if opdef.surface.seeded and keyword.name.text == "seed":
            return "seed", operand
        return keyword.name.text, option_value(operand, keyword.value.span)

    def _items(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Attrs:
        """The attributes from the bracket (or the arrow) of a call."""
        kind = opdef.surface.items
        if kind == "none":
            _no_items(node, opdef)
            return {}
        if kind == "out":
            if node.out is None:
                help = f"write `{surface_name(opdef)}`: dims missing on the right are summed"
                fail("MD0252", f"`{opdef.name}` needs its result dims", node.span, help=help)
            return {"dims": self.program.expressions.dims(node.out, scope)}
        if kind in ("filter", "slide"):
            return self._windows(opdef, node, scope)
        if kind == "rows":
            return self._rows(opdef, node, scope)
        if node.out is not None:
            _no_result_dims(opdef, node)
        if kind == "dims?" and node.items is None:
            return {}
        joins = kind == "join" and any(isinstance(i, ast.ArrowItem) for i in node.items or ())
        if kind == "arrow" or joins:
            return self._arrow(opdef, node, scope)
        if kind in ("dim", "join"):
            return {"dim": self._one_dim(opdef, node, scope)}
        return {"dims": self._dims(opdef, node, scope)}

    def _one_dim(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Dim:
        dims = self._dims(opdef, node, scope)
        if len(dims) != 1:
            help = f"write `{surface_name(opdef)}`"
            fail("MD0252", f"`{opdef.name}` takes one dim in `[ ]`", node.span, help=help)
        return dims[0]

    def _rows(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Attrs:
        """The `dim` in the brackets and the `dims` of the result, None if they are left out."""
        dim, dims = both(
            partial(self._one_dim, opdef, node, scope),
            lambda: None if node.out is None else self.program.expressions.dims(node.out, scope),
        )
        return {"dim": dim, "dims": dims}

    def _row_major(self, opdef: OpDef, dims: tuple[Dim, ...], span: Span, scope: Scope) -> Value:
        """The row-major index over several dims, of the indices along each."""
        emit = Emit(self.builder, span, scope)
        row_major, *others = (emit(opdef.name, dim=dim) for dim in dims)
        for dim, index in zip(dims[1:], others, strict=True):
            row_major = emit("add", emit("mul", row_major, dim.size), index)
        return row_major

    def _dims(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> tuple[Dim, ...]:
        if not node.items and opdef.surface.items != "maker":
            fixes, written = along_a_dim(node, scope.names), f"write `{surface_name(opdef)}`"
            message, help = f"`{opdef.name}` needs its dims in `[ ]`", advice(fixes) or written
            fail("MD0252", message, node.span, help=help, fixes=fixes)
        names = []
        for item in node.items or ():
            if not isinstance(item, ast.DimItem):
                help = f"write `{surface_name(opdef)}`"
                fail("MD0252", f"`{opdef.name}` takes plain dims in `[ ]`", item.span, help=help)
            names.append(item.dim)
        return self.program.expressions.dims(names, scope)

    def _arrow(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Attrs:
        items = node.items or ()
        if len(items) != 1 or not isinstance(items[0], ast.ArrowItem):
            help = f"write `{surface_name(opdef)}`"
            fail("MD0252", f"`{opdef.name}` takes `[old -> new]`", node.span, help=help)
        dims = self.program.expressions.dims
        sources, targets = both(
            partial(dims, items[0].sources, scope), partial(dims, items[0].targets, scope)
        )
        return {"source": sources, "target": targets}

    def _windows(self, opdef: OpDef, node: ast.CallExpr, scope: Scope) -> Attrs:
        """The dims of `h by kh -> ho, …`: `source`, `window` (or its `size`) and `target`.

        Of a filter also the `dims` of its result, None if they are left out.
        """
        is_filter = opdef.surface.items == "filter"
        if node.out is not None and not is_filter:
            _no_result_dims(opdef, node)
        items = node.items or ()
        if not items or not all(isinstance(item, ast.ByItem) for item in items):
            help = f"write `{surface_name(opdef)}`"
            place = next((i.span for i in items if not isinstance(i, ast.ByItem)), node.span)
            fail("MD0252", f"`{opdef.name}` takes `[dim by window -> new]`", place, help=help)
        windowed = all_of(
            partial(self._window, opdef, item, scope)
            for item in items
            if isinstance(item, ast.ByItem)
        )
        sources, windows, targets = zip(*windowed, strict=True)
        if is_filter:
            out = None if node.out is None else self.program.expressions.dims(node.out, scope)
            return {"source": sources, "window": windows, "target": targets, "dims": out}
        sizes = tuple(w.size if isinstance(w, Dim) else w for w in windows)
        return {"source": sources, "size": sizes, "target": targets}

    def _window(
        self, opdef: OpDef, item: ast.ByItem, scope: Scope
    ) -> tuple[Dim, Dim | int | float, Dim]:
        """The dim, the window and the new dim of an item; the new one is the old if not named."""
        dim = self.program.expressions.dim
        source = dim(item.dim, scope)
        target = source if item.target is None else dim(item.target, scope)
        if isinstance(item.window, ast.Name):
            return source, dim(item.window, scope), target
        if opdef.surface.items == "filter":
            help = f"name the dim of the kernel that slides along `{source}`: `[{source} by kh]`"
            fail("MD0252", f"`{opdef.name}` takes its windows from a kernel", item.span, help=help)
        return source, item.window.value, target

    # --- functions ---------------------------------------------------------------------------

    def inline(
        self, function: ast.FunctionDecl, node: ast.CallExpr, scope: Scope
    ) -> tuple[Operand | None, ...]:
        """Build the body of `function` in place; its parameters belong to this call.

        What is wrong with the call is reported; the body is built nevertheless.
        """
        self._guard_recursion(function, node, scope)
        collect = self.builder.diagnostics.of
        # Arguments first: in `f(f(x))` the inner call comes first, and is called `f`.
        matched, unmatched = self._match(function, node)
        evaluate = self.program.expressions.evaluate
        operands = {n: collect(partial(evaluate, arg, scope)) for n, arg in matched.items()}
        for arg in unmatched:
            collect(partial(evaluate, arg, scope))
        inner = self._enter(function, node, scope)
        self._bind_dims(function, node, scope, inner)
        if unmatched:
            operands = {**dict.fromkeys(p.name.text for p in function.params), **operands}
        told = partial(self.builder.diagnostics.told, how=partial(_outside, node))
        told(partial(self._bind_tensors, function, node, operands, matched, inner))
        self.open.append(function)
        outer = self.builder.site
        if inner.in_library:
            self.builder.site = outer or node.span
        try:
            return told(partial(self.program.function_body, function, inner))
        except DiagnosticError as error:
            if error.is_last or self.builder.site is node.span:
                raise
            raise _at_call(error, node) from None
        finally:
            self.builder.site = outer
            self.open.pop()

    def _guard_recursion(
        self, function: ast.FunctionDecl, node: ast.CallExpr, scope: Scope
    ) -> None:
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

    def _enter(self, function: ast.FunctionDecl, node: ast.CallExpr, scope: Scope) -> Scope:
        is_of_file = function is not definition(function.name.text)
        declarations = scope.declarations if is_of_file else prelude()
        path, functions = scope.enter(function.name.label)
        root = self.program.root_dims if is_of_file else {}
        return Scope(dict(root), {}, declarations, path, functions)

    def _bind_dims(
        self, function: ast.FunctionDecl, node: ast.CallExpr, scope: Scope, inner: Scope
    ) -> None:
        """Bind the dims in the bracket of a call; one that is wrong is reported."""
        items, collect = node.items or (), self.builder.diagnostics.of
        if len(items) != len(function.dims):
            collect(partial(_wrong_dims, function, node))
            collect(partial(self.program.views.names, items, scope))
            inner.wrong_dims.update(d.text for d in function.dims)
            return
        for name, item in zip(function.dims, items, strict=True):
            dim = collect(partial(self._plain_dim, function, item, scope))
            if dim is None:
                inner.wrong_dims.add(name.text)
            else:
                inner.dims[name.text] = dim

    def _plain_dim(self, function: ast.FunctionDecl, item: ast.Item, scope: Scope) -> Dim:
        if not isinstance(item, ast.DimItem):
            names = ", ".join(d.text for d in function.dims)
            help = f"write `{function.name.text}[{names}](…)`"
            fail("MD0252", "a function takes plain dims in `[ ]`", item.span, help=help)
        return self.program.expressions.dim(item.dim, scope)

    def _bind_tensors(
        self,
        function: ast.FunctionDecl,
        node: ast.CallExpr,
        given: dict[str, Operand | None],
        matched: dict[str, ast.Expr],
        inner: Scope,
    ) -> None:
        """Bind the tensors of a call; None for one that is wrong, which is reported."""
        collect = self.builder.diagnostics.of
        for param in function.params:
            name = param.name.text
            numbers = NUMBERS.get((function.name.text, name)) if inner.in_library else None
            dims = collect(partial(self.program.dim_list, param.dims, inner))
            if name not in given:
                inner.names[name] = collect(partial(self._default, function, param, node, inner))
                continue
            value = given[name]
            if value is not None and dims is not None:
                arg = matched[name]
                if numbers is not None:
                    collect(partial(_check_number, numbers, param, value, arg))
                value = collect(partial(self._check_param, param, value, arg, inner))
            inner.names[name] = value
            if _is_open(param):
                self._bind_rest(value if dims is not None else None, dims, inner)

    def _default(
        self, function: ast.FunctionDecl, param: ast.TensorParam, node: ast.CallExpr, inner: Scope
    ) -> Operand:
        """The default of a tensor that a call does not give."""
        if param.default is not None:
            return self.program.expressions.evaluate(param.default, inner)
        where = Related(param.span, "declared here")
        message = f"`{function.name.text}` is called without `{param.name.text}`"
        fail("MD0251", message, node.span, where, help=f"write `{form(function)}`")

    def _bind_rest(
        self, value: Operand | None, dims: tuple[tuple[Dim, ...], bool] | None, inner: Scope
    ) -> None:
        """Bind `...` to the dims of a tensor that its parameter does not name.

        Where several parameters have it, it stands for all of theirs.
        """
        if value is None or dims is None:
            inner.wrong_dims.add("...")
            return
        operand_dims = value.type.dims if isinstance(value, Value) else ()
        remaining = (*inner.groups.get("...", ()), *(d for d in operand_dims if d not in dims[0]))
        inner.groups["..."] = tuple(dict.fromkeys(remaining))

    def _match(
        self, function: ast.FunctionDecl, node: ast.CallExpr
    ) -> tuple[dict[str, ast.Expr], list[ast.Expr]]:
        """The argument of each parameter, and those that are of none, which are reported."""
        names = [p.name.text for p in function.params]
        fixes: tuple[Fix, ...]
        matched, unmatched = dict(zip(names, node.args, strict=False)), [*node.args[len(names) :]]
        if unmatched:
            message = f"`{function.name.text}` takes {counted(len(names), 'tensor')}"
            where = Related(function.name.span, "defined here")
            span = unmatched[0].span.to(unmatched[-1].span)
            fixes = (removal(span, f"leave out `{shortened(span)}`"),)
            help = advice(fixes, f"the form is `{form(function)}`")
            self._report(message, unmatched[0].span, help, where, fixes=fixes)
        for keyword in node.keywords:
            word = keyword.name.text
            if word not in names:
                span = keyword.name.span
                fixes = spelled_right(span, word, names)
                fixes = fixes or (removal(keyword.span, f"leave out `{word}`"),)
                message = f"`{function.name.text}` has no tensor `{word}`"
                help = advice(fixes, f"the form is `{form(function)}`")
                self._report(message, span, help, fixes=fixes)
                unmatched.append(keyword.value)
            elif word in matched:
                where = Related(matched[word].span, "it is given here already")
                fixes, message = (removal(keyword.span),), f"`{word}` is given twice"
                self._report(message, keyword.span, None, where, fixes=fixes)
                unmatched.append(keyword.value)
            else:
                matched[word] = keyword.value
        return matched, unmatched

    def _report(
        self,
        message: str,
        span: Span,
        help: str | None,
        *related: Related,
        fixes: tuple[Fix, ...] = (),
    ) -> None:
        """MD0251, an argument that does not suit."""
        refusal = partial(fail, "MD0251", message, span, *related, help=help, fixes=fixes)
        self.builder.diagnostics.of(refusal)

    def _check_param(
        self, param: ast.TensorParam, value: Operand, arg: ast.Expr, inner: Scope
    ) -> Operand:
        """The value for a parameter. Raises a diagnostic where it does not suit."""
        if isinstance(value, int | float):
            return value
        if not isinstance(value, Value):
            need_tensor(value, arg.span)
        dims, is_open = self.program.dim_list(param.dims, inner)
        message = mismatch(value, dims, is_open)
        where = Related(param.span, "declared here")
        if message:
            fixes = summed(value, dims, arg.span)
            help = advice(fixes, "pass a tensor with the declared dims; `x[a -> b]` renames one")
            message = f"`{param.name.text}`: {message}"
            fail("MD0250", message, arg.span, where, help=help, fixes=fixes)
        if param.dtype and self.program.dtype(param.dtype) != value.type.dtype:
            dtype = self.program.dtype(param.dtype)
            message = f"`{param.name.text}` is {dtype}, and this is {value.type.dtype}"
            fail("MD0250", message, arg.span, where, fixes=(cast_to(arg.span, str(dtype)),))
        return value


def _only_group(opdef: OpDef, node: ast.CallExpr, scope: Scope) -> tuple[Dim, ...] | None:
    """The several dims under one name that a maker of indices is given, in a definition."""
    match node.items:
        case (ast.DimItem(dim=name),) if opdef.surface.items == "dim" and not node.args:
            return scope.groups.get(name.text)
    return None


def _changes_nothing(opdef: OpDef, attrs: Mapping[str, Any], operand: Value) -> bool:
    """Whether a reduction over no dims is its operand; `argmax` is an index even then."""
    if attrs["dims"] or opdef.surface.seeded:
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


def summed(value: Value, dims: tuple[Dim, ...], span: Span) -> tuple[Fix, ...]:
    """The fix that sums a tensor over the dims that it has beside the wanted ones."""
    wanted = {dim.name for dim in dims}
    extra = [name for name in value.type.names if name not in wanted]
    if not extra or not wanted <= {*value.type.names}:
        return ()
    text = f"sum[{', '.join(extra)}]("
    return (around(span, text, ")", f"write `{text}{shortened(span)})`", safe=False),)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _at_call(error: DiagnosticError, node: ast.CallExpr) -> DiagnosticError:
    """The errors inside the function, each with the call as a related place."""
    related = Related(node.span, f"in this call of `{node.function.text}`")
    errors = error.diagnostics
    noted = (replace(d, related=(*d.related, related)) if len(d.related) < 3 else d for d in errors)
    return DiagnosticError(*noted) if errors else Poisoned()


def _outside(node: ast.CallExpr, found: Diagnostic) -> Diagnostic:
    """What is wrong inside a function of the library, told of the program's call of it.

    Nobody can mend the library's line, which is the second place.
    """
    library = prelude().source
    if found.span is None or found.span.source is not library or node.span.source is library:
        return found
    line = Related(found.span, f"in `{node.function.text}` of the library")
    return replace(found, span=node.span, related=(line,), fixes=())


def _check_number(
    numbers: tuple[float, float], param: ast.TensorParam, value: Operand, arg: ast.Expr
) -> None:
    """MD0213 for a number that is not between two; what a tensor holds is not known."""
    least, greatest = numbers
    fits = not isinstance(value, bool)  # which Python alone can give
    if isinstance(value, int | float) and not (fits and least <= value <= greatest):
        message = f"`{param.name.text}` cannot be {value}"
        fail("MD0213", message, arg.span, help=f"give a number from {least} on")


def _wrong_dims(function: ast.FunctionDecl, node: ast.CallExpr) -> NoReturn:
    """Report a call with another number of dims than the function takes."""
    names = ", ".join(d.text for d in function.dims)
    message = f"`{function.name.text}` takes {counted(len(function.dims), 'dim')} in `[ ]`"
    help = f"write `{function.name.text}[{names}](…)`" if names else None
    where = Related(function.name.span, "defined here")
    fixes = () if names else _without_items(node)
    fail("MD0252", message, node.span, where, help=help, fixes=fixes)


def _is_open(param: ast.TensorParam) -> bool:
    """Whether a parameter takes tensors with dims that it does not name."""
    return any(d.dim.text == "..." for d in param.dims)


def _check_option(opdef: OpDef, keyword: ast.Keyword) -> None:
    name = keyword.name
    if name.text not in dict(opdef.surface.options):
        options = ", ".join(f"`{option}`" for option, _ in opdef.surface.options) or "none"
        message = f"`{opdef.name}` has no option `{name.text}`"
        fixes = spelled_right(name.span, name.text, list(dict(opdef.surface.options)))
        fixes = fixes or (removal(keyword.span, f"leave out `{name.text}`"),)
        help = advice(fixes, f"its options: {options}")
        fail("MD0253", message, name.span, help=help, fixes=fixes)


def _no_list(opdef: OpDef, keyword: ast.Keyword) -> NoReturn:
    """Report a list for an option, such as the paddings before and after."""
    name = keyword.name.text
    help = "write one value: it holds for all dims in `[ ]`"
    if name == "pad":
        help += "; where the sides differ, pad before: `pad[h -> hp](x, 1, 2)`"
    message = f"option `{name}` of `{opdef.name}` is no list"
    fail("MD0253", message, keyword.value.span, help=help)


def _no_items(node: ast.CallExpr, opdef: OpDef) -> None:
    if node.items is not None:
        fixes, form = _without_items(node), f"the form is `{surface_name(opdef)}`"
        message = f"`{opdef.name}` takes no `[ ]`"
        fail("MD0252", message, node.span, help=advice(fixes, form), fixes=fixes)
    if node.out is not None:
        _no_result_dims(opdef, node)


def _without_items(node: ast.CallExpr) -> tuple[Fix, ...]:
    """The fix that leaves the brackets of a call out; none if they do not follow its name."""
    text, start = node.span.source.text, node.function.span.end
    last = node.items[-1].span.end if node.items else start + 1
    end = text.find("]", last) + 1
    if text[start : start + 1] != "[" or not end:
        return ()
    return (Fix("leave out the `[ ]`", (Edit(Span(node.span.source, start, end), ""),)),)


def _no_result_dims(opdef: OpDef, node: ast.CallExpr) -> NoReturn:
    last = max((*node.args, *node.keywords), key=lambda part: part.span.end, default=None)
    form = f"the form is `{surface_name(opdef)}`"
    fixes: tuple[Fix, ...] = ()
    if last is not None and not node.span.text.count("\n"):
        arrow = Span(node.span.source, last.span.end, node.span.end - 1)
        fixes = (Fix("leave out the `-> [dims]`", (Edit(arrow, ""),), safe=False),)
    message = f"`{opdef.name}` takes no `-> [dims]`"
    fail("MD0252", message, node.span, help=advice(fixes, form), fixes=fixes)


def _check_arity(opdef: OpDef, count: int, node: ast.CallExpr) -> None:
    low, high = opdef.surface.arity
    if count < low or (high is not None and count > high):
        wanted = (
            str(low) if high == low else f"{low} or more" if high is None else f"{low} to {high}"
        )
        noun = "tensor" if wanted == "1" else "tensors"
        message = f"`{opdef.name}` takes {wanted} {noun}, and {count or 'none'} are given"
        fixes: tuple[Fix, ...] = ()
        if high is not None and len(node.args) > high >= 1:
            extra = node.args[high].span.to(node.args[-1].span)
            fixes = (removal(extra, f"leave out `{shortened(extra)}`"),)
        help = advice(fixes, f"the form is `{surface_name(opdef)}`")
        fail("MD0251", message, node.span, help=help, fixes=fixes)


def _check_options(opdef: OpDef, options: dict[str, Any], node: ast.CallExpr) -> None:
    for name, value in options.items():
        if value is ...:
            help = f"write `{opdef.name}(…, {name}=…)`"
            fail("MD0253", f"`{opdef.name}` needs its option `{name}`", node.span, help=help)
        if isinstance(value, DType) != (name == "dtype"):
            help = "write a number" if name != "dtype" else f"the dtypes are {', '.join(DTYPES)}"
            message = f"option `{name}` of `{opdef.name}` cannot be {value}"
            fail("MD0253", message, node.span, help=help)
