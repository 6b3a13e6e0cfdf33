"""From the syntax tree to the named program: statements, loops, functions, the program itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
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
)
from meshdsl.ir.types import DTYPES, Dim, DType, TensorType
from meshdsl.named.assignment import AssignmentBuilder
from meshdsl.named.builder import (
    Builder,
    Operand,
    PendingParam,
    Scope,
    kind_of,
    need_tensor,
)
from meshdsl.named.calls import Calls, mismatch
from meshdsl.named.declarations import RESERVED_TENSORS, Declarations, added_dim, unknown
from meshdsl.named.expressions import Expressions
from meshdsl.named.fan_in import finish_params
from meshdsl.named.goals import Goals
from meshdsl.named.ir import Init, NamedProgram, Output, Pin, Value
from meshdsl.named.loops import LoopBuilder, assigned, targets
from meshdsl.named.random_streams import Streams
from meshdsl.named.refused import Refusals
from meshdsl.named.size_formulas import as_float
from meshdsl.named.views import Views
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import removal, without_entry, without_line
from meshdsl.syntax.enclosing import called
from meshdsl.syntax.statement_edits import as_many_names

INITS = {"zeros": 0, "ones": 0, "normal": 1, "uniform": 2, "glorot": 0, "he": 0}
"""The initialisers of parameters, with the numbers that each takes."""


@dataclass(slots=True)
class _Returned:
    """The return of a body: expressions with their values (None for a wrong one), and the place."""

    values: tuple[tuple[ast.Expr, Operand | None], ...]
    span: Span


class ProgramBuilder:
    """Builds one program. `expressions`, `calls`, `views` and `loops` are its parts."""

    def __init__(self, declarations: Declarations, diagnostics: Diagnostics) -> None:
        self.declarations = declarations
        self.root_dims: Mapping[str, Dim] = declarations.dims
        self.diagnostics = diagnostics
        self.builder = Builder(diagnostics, declarations.unsized)
        self.expressions = Expressions(self)
        self.calls = Calls(self)
        self.views = Views(self)
        self.loops = LoopBuilder(self)
        self.refused = Refusals(self)
        self.goals = Goals(self)
        self.states = AssignmentBuilder(self)
        self.streams = Streams(self)
        self.inputs: list[Value] = []

    def build(self, node: ast.ProgramDecl) -> NamedProgram:
        """The program as far as it could be built; errors are in the diagnostics."""
        scope = Scope(dict(self.root_dims), {}, self.declarations)
        for param in node.params:
            self.diagnostics.of(partial(self._input, param, scope))
        returned = self.body(node.body, scope)
        self.refused.rest()
        outputs = self._outputs(returned, node)
        updates = self.states.finish()
        frame = self.builder.frames[0]
        params = tuple(p for p in self.builder.params)
        body = tuple(frame.body)
        finished = finish_params(params, body)
        inputs = (*self.inputs, *self.streams.seeds)
        parts = (inputs, finished, body, outputs, node.name.span)
        goal = self.goals.written() if self.goals.pending else None
        return NamedProgram(node.name.text, *parts, updates=updates, goal=goal)

    def apart(self, node: ast.ProgramDecl, dims: Mapping[str, Dim]) -> NamedProgram:
        """Another program that may call the functions of the file, with dims of this one.

        Raises what is wrong in it.
        """
        diagnostics = Diagnostics()
        other = ProgramBuilder(self.declarations, diagnostics)
        other.root_dims = {**self.declarations.dims, **dims}
        program = other.build(node)
        diagnostics.raise_errors()
        return program

    # --- inputs and outputs ------------------------------------------------------------------

    def _input(self, node: ast.TensorParam, scope: Scope) -> None:
        name = node.name.text
        scope.names.setdefault(name, None)
        if node.default is not None:
            why = "functions have defaults; an input has its value from `run --inputs`"
            gone = Span(node.span.source, _before_default(node), node.default.span.end)
            fixes = (Fix("remove the default", (Edit(gone, ""),), safe=False),)
            message = "an input of a program has no default"
            fail("MD0250", message, node.default.span, help=advice(fixes, why), fixes=fixes)
        old = next((v for v in self.inputs if v.name == name), None)
        if old is not None:
            where, fixes = Related(old.span, "first declared here"), (removal(node.span),)
            message = f"input `{name}` is declared twice"
            fail("MD0104", message, node.name.span, where, fixes=fixes)
        self._check_name(node.name)
        (dims, is_open), dtype = both(
            partial(self.dim_list, node.dims, scope), partial(self.dtype, node.dtype)
        )
        if is_open:
            help = "name every dim of an input"
            fail("MD0250", "`...` stands only in functions", node.span, help=help)
        type_ = TensorType(dims, dtype)
        pins = self.pins(node.dims, scope)
        value = self.builder.value(type_, node.span, name=name, pins=pins, role="input")
        scope.names[name] = value
        self.inputs.append(value)

    def _outputs(self, returned: _Returned | None, node: ast.ProgramDecl) -> tuple[Output, ...]:
        if returned is None:
            if has_return(node.body):
                return ()
            message, fixes = "this program returns nothing", _returning(node.body)
            help = None if fixes else "end it with `return NAME, …`"
            self.diagnostics.add(
                Diagnostic("MD0113", message, node.name.span, help=help, fixes=fixes)
            )
            return ()
        outputs: list[Output] = []
        for index, (expr, operand) in enumerate(returned.values):
            name = expr.name.text if isinstance(expr, ast.Ref) else f"out{index}"
            if operand is None:
                continue
            if not isinstance(operand, Value):
                message = f"a program returns tensors, and this is {kind_of(operand)}"
                fixes = _as_tensor(operand, expr.span)
                help = None if fixes else "return a tensor"
                self.diagnostics.add(
                    Diagnostic("MD0254", message, expr.span, help=help, fixes=fixes)
                )
            elif any(o.name == name for o in outputs):
                message, fixes = f"`{name}` is returned twice", (removal(expr.span),)
                help = advice(fixes, "every output has a name of its own")
                self.diagnostics.add(
                    Diagnostic("MD0104", message, expr.span, help=help, fixes=fixes)
                )
            else:
                outputs.append(Output(name, operand, expr.span))
        return tuple(outputs)

    # --- statements --------------------------------------------------------------------------

    def body(self, statements: tuple[ast.Statement, ...], scope: Scope) -> _Returned | None:
        """Build statements in order; an error in one does not hide those in the next."""
        returned: _Returned | None = None
        for name in targets(statements):
            scope.later.setdefault(name.text, name.span)
        for statement in statements:
            if returned and not isinstance(statement, ast.Minimize):
                where = Related(returned.span, "returned here")
                message = "nothing after `return` is ever reached"
                fixes = (Fix("remove it", (Edit(without_line(statement.span), ""),), safe=False),)
                help = advice(fixes, "or move it before the `return`")
                self.diagnostics.add(
                    Diagnostic(
                        "MD0113",
                        message,
                        statement.span,
                        related=(where,),
                        help=help,
                        fixes=fixes,
                    )
                )
                return returned
            returned = self._tried(statement, scope) or returned
        return returned

    def _tried(self, statement: ast.Statement, scope: Scope) -> _Returned | None:
        """Build a statement; what is wrong is reported, and the names it should bind are wrong."""
        built = self.diagnostics.of(lambda: (self._statement(statement, scope),))
        self.refused.report(statement)
        if built is not None:
            return built[0]
        for name in assigned((statement,)):
            scope.names[name] = None
        return None

    def _statement(self, node: ast.Statement, scope: Scope) -> _Returned | None:
        match node:
            case ast.Assign():
                self._assign(node, scope)
            case ast.UpdateStatement():
                self.states.update(node, scope)
            case ast.ParamDecl():
                self._param(node, scope)
            case ast.Repeat():
                self.loops.repeat(node, scope)
            case ast.Return():
                return self._return(node, scope)
            case ast.Recompute():
                self.goals.recompute(node, scope)
            case ast.Minimize():
                self.goals.minimize(node, scope)
        return None

    def _return(self, node: ast.Return, scope: Scope) -> _Returned:
        collect = self.diagnostics.of
        evaluate = self.expressions.evaluate
        values = tuple((e, collect(partial(evaluate, e, scope))) for e in node.values)
        return _Returned(values, node.span)

    def _assign(self, node: ast.Assign, scope: Scope) -> None:
        _, results = both(
            lambda: all_of(partial(self._check_target, t, scope) for t in node.targets),
            partial(self._results, node, scope),
        )
        if len(results) != len(node.targets):
            message = f"{counted(len(node.targets), 'name')} for {counted(len(results), 'tensor')}"
            fixes = as_many_names(node, len(results))
            help = advice(fixes) or "give every tensor on the right one name on the left"
            fail("MD0258", message, node.span, help=help, fixes=fixes)
        for target, operand in zip(node.targets, results, strict=True):
            bound = operand
            if operand is not None:
                bound = self._bind(target, operand, node.value.span, scope)
            scope.names[target.name.text] = bound

    def _check_target(self, target: ast.Target, scope: Scope) -> None:
        """Refuse a target by its name and its dims alone."""
        all_of(
            (
                partial(self._check_name, target.name),
                partial(self.dim_list, target.dims or (), scope),
            )
        )

    def _results(self, node: ast.Assign, scope: Scope) -> tuple[Operand | None, ...]:
        if len(node.targets) > 1 and isinstance(node.value, ast.CallExpr):
            return self.calls.call(node.value, scope)
        value = self.expressions.evaluate(node.value, scope)
        self.refused.settle(node.value, value, scope)
        return (value,)

    def _bind(self, target: ast.Target, operand: Operand, span: Span, scope: Scope) -> Operand:
        """Name a computed value as the target says: dims checked, transposed, pinned."""
        if not isinstance(operand, Value):
            if target.dims is not None or not isinstance(operand, int | float):
                need_tensor(operand, span)
            return operand
        pins: tuple[Pin, ...] = ()
        if target.dims is not None:
            operand = self._declared(target, operand, span, scope)
            pins = self.pins(target.dims, scope)
        if not target.name.label:
            return operand
        return self.builder.assign(operand, target.name.label, pins, target.span, scope)

    def _declared(self, target: ast.Target, value: Value, span: Span, scope: Scope) -> Value:
        assert target.dims is not None
        dims, is_open = self.dim_list(target.dims, scope)
        problem = mismatch(value, dims, is_open)
        if problem:
            where = Related(span, f"this is {value.type}")
            fixes = (_with_dims(target, value),) if not is_open and target.dims else ()
            help = advice(fixes, "or change what is on the right")
            message = f"`{target.name.text}`: {problem}"
            fail("MD0250", message, target.span, where, help=help, fixes=fixes)
        if is_open or value.type.dims == dims:
            return value
        return self.builder.emit("transpose", (value,), {"dims": dims}, span, scope)[0]

    # --- parameters --------------------------------------------------------------------------

    def _param(self, node: ast.ParamDecl, scope: Scope) -> None:
        """Declare a parameter; it gains the dims of the loops around it."""
        name = node.target.name
        init = self.diagnostics.of(partial(self._init, node, scope)) or Init("normal")
        self._check_name(name)
        if name.text in scope.params:
            where = Related(scope.params[name.text], "first declared here")
            message = f"param `{name.text}` is declared twice"
            fixes = (Fix("remove it", (Edit(without_line(node.span), ""),), safe=False),)
            fail("MD0104", message, name.span, where, fixes=fixes)
        if node.target.dims is None:
            at = Span(name.span.source, name.span.end, name.span.end)
            title = f"write `param {name.text}[]` for a scalar"
            fixes = (Fix(title, (Edit(at, "[]"),), safe=False),)
            help = advice(fixes, f"or name its dims: `param {name.text}[dims]`")
            fail("MD0250", "a parameter needs its dims", node.span, help=help, fixes=fixes)
        (dims, is_open), dtype = both(
            partial(self.dim_list, node.target.dims, scope), partial(self.dtype, node.dtype)
        )
        if is_open:
            dims = self._with_rest(node.target, dims, scope)
        loops = tuple(f.dim for f in self.builder.frames if f.dim is not None)
        for loop in loops:
            if loop in dims:
                message = f"this parameter already gains `{loop}` from the `repeat` around it"
                fail("MD0259", message, node.target.span, fixes=_without(loop, node))
        type_ = TensorType((*loops, *dims), dtype)
        value = self.builder.value(
            type_,
            node.target.span,
            scope,
            name=".".join((*scope.path, name.label)),
            pins=self.pins(node.target.dims, scope),
            role="param",
            declared=tuple(d.name for d in dims),
        )
        self.builder.place(value, 0)
        self.builder.params.append(PendingParam(value, init, node.dtype is not None))
        scope.params[name.text] = name.span
        scope.names[name.text] = value

    def _with_rest(
        self, target: ast.Target, named: tuple[Dim, ...], scope: Scope
    ) -> tuple[Dim, ...]:
        """The dims of a parameter in a function, with those that `...` stands for in this call."""
        if "..." not in scope.groups:
            help = "name its dims instead of `...`"
            fail("MD0250", "a parameter needs every dim by name", target.span, help=help)
        listed = [node.dim.text for node in target.dims or ()]
        at = listed.index("...")
        others = tuple(d for d in scope.groups["..."] if d not in named)
        return (*named[:at], *others, *named[at:])

    def _init(self, node: ast.ParamDecl, scope: Scope) -> Init:
        if node.init is None:
            return Init("normal")
        call, name = node.init, node.init.function
        _, numbers = both(
            partial(_check_initialiser, name),
            lambda: all_of(partial(self.expressions.evaluate, a, scope) for a in call.args),
        )
        values = tuple(as_float(n) for n in numbers if isinstance(n, int | float))
        if len(values) != len(numbers) or node.init.keywords or node.init.items is not None:
            help = f"write `{_init_form(name.text)}`"
            fail("MD0260", f"`{name.text}` takes plain numbers", node.init.span, help=help)
        if len(values) != INITS[name.text]:
            wanted = counted(INITS[name.text], "number")
            message = f"`{name.text}` takes {wanted}, not {len(values)}"
            fail("MD0260", message, node.init.span, help=f"write `{_init_form(name.text)}`")
        return Init(name.text, values)

    # --- functions ---------------------------------------------------------------------------

    def function_body(self, function: ast.FunctionDecl, scope: Scope) -> tuple[Operand | None, ...]:
        """The values that an inlined function returns, in its own scope; None for a wrong one.

        Raises a diagnostic where it returns nothing, or not what it declares.
        """
        result = None
        if function.result is not None:
            result = self.diagnostics.of(partial(self.dim_list, function.result, scope))
        returned = self.body(function.body, scope)
        if returned is None:
            if has_return(function.body):
                raise Poisoned
            message = f"`{function.name.text}` returns nothing"
            fixes = _returning(function.body)
            help = None if fixes else "end it with `return …`"
            fail("MD0113", message, function.name.span, help=help, fixes=fixes)
        values = tuple(operand for _, operand in returned.values)
        if result is None:
            return values
        typed = partial(self._result_type, function, result, returned.span, scope)
        return tuple(typed(value) for value in values)

    def _result_type(
        self,
        function: ast.FunctionDecl,
        declared: tuple[tuple[Dim, ...], bool],
        span: Span,
        scope: Scope,
        value: Operand | None,
    ) -> Operand | None:
        if not isinstance(value, Value):
            return value
        dims, is_open = declared
        problem = mismatch(value, dims, is_open)
        if problem:
            where = Related(function.name.span, "its result is declared here")
            help = "change the declared result, or what is returned"
            fail("MD0250", f"the result: {problem}", span, where, help=help)
        if is_open or value.type.dims == dims:
            return value
        return self.builder.emit("transpose", (value,), {"dims": dims}, span, scope)[0]

    # --- names, dims, dtypes -----------------------------------------------------------------

    def _check_name(self, name: ast.Name) -> None:
        if name.text in RESERVED_TENSORS:
            fixes = called(name.span, f"{name.text}_")
            help = advice(fixes, "layouts use it as a selector")
            fail("MD0109", f"`{name.text}` cannot name a tensor", name.span, help=help, fixes=fixes)

    def dim_list(self, nodes: tuple[ast.DimRef, ...], scope: Scope) -> tuple[tuple[Dim, ...], bool]:
        """The dims of a list in brackets, and whether it has `...`."""
        listed = [node for node in nodes if node.dim.text != "..."]
        dims = all_of(partial(self.expressions.dim, node.dim, scope) for node in listed)
        for index, (node, dim) in enumerate(zip(listed, dims, strict=True)):
            if dim in dims[:index]:
                fixes = _second_dim(node, dim, scope)
                text = f"declare `dim other = {dim.name}`, and write `other` here"
                help = None if fixes else text
                message = f"dim `{dim.name}` stands here twice"
                fail("MD0259", message, node.span, help=help, fixes=fixes)
        return tuple(dims), len(listed) < len(nodes)

    def pins(self, nodes: tuple[ast.DimRef, ...], scope: Scope) -> tuple[Pin, ...]:
        """The pins (`@`) in a list of dims."""
        return tuple(
            Pin(self.expressions.dim(n.dim, scope).name, tuple(a.text for a in n.axes), n.span)
            for n in nodes
            if n.axes is not None
        )

    def dtype(self, name: ast.Name | None) -> DType:
        """The dtype written after a colon; f32 without one."""
        if name is None:
            return DTYPES["f32"]
        if name.text not in DTYPES:
            raise DiagnosticError(unknown("MD0114", "dtype", name, list(DTYPES)))
        return DTYPES[name.text]


def _as_tensor(operand: Operand, span: Span) -> tuple[Fix, ...]:
    """The fix that makes a tensor without dims of a number."""
    if not isinstance(operand, int | float):
        return ()
    return (Fix.write(span, f"ones[]() * ({span.text})", safe=False),)


def _with_dims(target: ast.Target, value: Value) -> Fix:
    """The fix that declares a tensor with the dims that it has."""
    assert target.dims
    text = ", ".join(value.type.names)
    span = target.dims[0].span.to(target.dims[-1].span)
    return Fix(f"write `{target.name.text}[{text}]`", (Edit(span, text),), safe=False)


def _second_dim(node: ast.DimRef, dim: Dim, scope: Scope) -> tuple[Fix, ...]:
    """The fix that declares a further dim of the same size, and writes it here."""
    taken = {*scope.dims, *scope.names}
    new = next(n for i in itertools.count(2) if (n := f"{dim.name}_{i}") not in taken)
    line = f"dim {new} = {dim.name}"
    edit = None if scope.in_library else added_dim(line, scope.declarations)
    if edit is None or node.dim.span.source is not edit.span.source or dim.name not in scope.dims:
        return ()
    edits = (edit, Edit(node.dim.span, new))
    return (Fix(f"declare `{line}`, and write `{new}` here", edits, safe=False),)


def _returning(body: tuple[ast.Statement, ...]) -> tuple[Fix, ...]:
    """The fix that returns what the last statement of a body computes."""
    last = body[-1] if body else None
    if not isinstance(last, ast.Assign):
        return ()
    span, text = last.span, f"return {', '.join(t.name.text for t in last.targets)}"
    start = span.source.bounds(span.line)[0]
    before = span.source.text[start : span.start]
    margin = before[: len(before) - len(before.lstrip())]
    edit = Edit(Span(span.source, span.end, span.end), f"\n{margin}{text}")
    return (Fix(f"add `{text}`", (edit,), safe=False),)


def _before_default(node: ast.TensorParam) -> int:
    """Where what stands before ` = …` in the declaration of a tensor ends."""
    assert node.default is not None
    text = node.span.source.text[: node.default.span.start]
    return len(text[: text.rindex("=")].rstrip())


def _without(dim: Dim, node: ast.ParamDecl) -> tuple[Fix, ...]:
    """The fix that leaves a dim out of those of a parameter."""
    items = node.target.dims or ()
    entry = next((n for n in items if n.dim.text == dim.name), None)
    if entry is None:
        return ()
    edit = Edit(without_entry(entry.span), "")
    return (Fix(f"leave out `{dim.name}`", (edit,)),)


def _check_initialiser(name: ast.Name) -> None:
    if name.text not in INITS:
        raise DiagnosticError(unknown("MD0260", "initialiser", name, list(INITS)))


def has_return(statements: tuple[ast.Statement, ...]) -> bool:
    """Whether a body contains a `return` anywhere, also where it is not legal."""
    blocks = [s.body for s in statements if isinstance(s, ast.Repeat | ast.Recompute)]
    return any(isinstance(s, ast.Return) for s in statements) or any(map(has_return, blocks))


def _init_form(name: str) -> str:
    return f"{name}({', '.join('abc'[: INITS[name]])})"
