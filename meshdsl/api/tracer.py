"""The program under construction while its Python function runs.

A `Tracer` records the syntax of what Python does (`recorded.py`), and builds it at once with the
builder that all programs share: Python knows the type of every tensor, and an error is reported at
its line. A value at hand takes the place of a name (`Read`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import Arrow, By, Dim, DType, Pinned, TensorType, need_dim
from meshdsl.api.recorded import (
    Block,
    Read,
    RecordedCall,
    RecordedResult,
    RecordedVariable,
    note_read,
)
from meshdsl.api.sizes import Moment, Size, SizeArithmetic, computed, number_of, tick
from meshdsl.api.source_location import Names, Site
from meshdsl.api.tensor import Tensor
from meshdsl.diagnostics import Immediate, Related, Span, counted, fail
from meshdsl.ir import types
from meshdsl.named import ir
from meshdsl.named.builder import Operand, Scope
from meshdsl.named.declarations import RESERVED_TENSORS, Declarations
from meshdsl.named.expressions import OperandRef
from meshdsl.named.from_syntax import ProgramBuilder, _Returned
from meshdsl.named.size_formulas import dims_of, operators_of
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.tokens import is_name


@dataclass(frozen=True, slots=True)
class PythonBody(ast.Assign):
    """A body that is a Python function; its targets are what a loop carries."""

    run: Callable[[Scope], _Returned | None]


@dataclass(frozen=True, slots=True)
class Form:
    """A call kept as syntax, not applied: an initialiser, an optimizer, a schedule."""

    name: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    span: Span
    computed: tuple[Moment, ...] = ()

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.options)
        return f"{self.name}({', '.join([*map(repr, self.args), *options])})"

    def inside(self) -> Iterator[Any]:
        """This form, and all values given to it and to the forms inside it."""
        yield self
        for value in (*self.args, *(v for _, v in self.options)):
            yield from value.inside() if isinstance(value, Form) else (value,)

    def syntax(self) -> ast.CallExpr:
        """The call as the parser would read it."""
        args = tuple(self._constant(a) for a in self.args)
        keywords = tuple(
            ast.Keyword(ast.Name(n, self.span), self._constant(v), self.span)
            for n, v in self.options
        )
        return ast.CallExpr(ast.Name(self.name, self.span), None, args, keywords, None, self.span)

    def _constant(self, value: Any) -> ast.Expr:
        if isinstance(value, Form):
            return value.syntax()
        if isinstance(value, DType):
            value = value.name
        if isinstance(value, str):
            return ast.String(value, self.span)
        number = number_of(value)
        if number is not None:
            return ast.Number(number, self.span)
        help = f"write `md.{self.name}(…)` with numbers"
        message = f"`{self.name}` takes numbers and strings, not {kind_of(value)}"
        fail("MD0815", message, self.span, help=help)


class Tracer(ProgramBuilder):
    """Builds one program from Python. `scope` is that of the function being run."""

    def __init__(self, declarations: Declarations, diagnostics: Immediate) -> None:
        super().__init__(declarations, diagnostics)
        self.dims: dict[str, Dim] = {}
        self.known: dict[str, types.Dim] = {}
        self.scopes: list[Scope] = []
        self.blocks: list[Block] = [[]]
        self.inner: RecordedCall | None = None
        self.called: set[str] = set()
        self.sizes: set[str] = set()
        self.started = tick()
        self.computed: list[Moment] = []

    @property
    def scope(self) -> Scope:
        """The innermost scope."""
        return self.scopes[-1]

    def body(self, statements: tuple[ast.Statement, ...], scope: Scope) -> _Returned | None:
        """Run a Python body; anything else is a library function in the language itself."""
        if statements and isinstance(statements[0], PythonBody):
            self.diagnostics.raise_errors()
            with self.inside(scope):
                return statements[0].run(scope)
        return super().body(statements, scope)

    @contextmanager
    def inside(self, scope: Scope) -> Iterator[None]:
        """Run Python in `scope`."""
        scope.dims = self.known
        self.scopes.append(scope)
        try:
            yield
        finally:
            self.scopes.pop()

    # --- recording ---------------------------------------------------------------------------

    @property
    def block(self) -> Block:
        """The record of the innermost block."""
        return self.blocks[-1]

    @contextmanager
    def recording(self, block: Block) -> Iterator[None]:
        """Record in `block`."""
        self.blocks.append(block)
        try:
            yield
        finally:
            self.blocks.pop()

    @contextmanager
    def calling(self, call: RecordedCall, scope: Scope) -> Iterator[None]:
        """Run the function that is called, in its `scope`, and record it in the call."""
        self.inner = call
        try:
            with self.inside(scope), self.recording(call.block):
                yield
        finally:
            self.inner = call.caller

    def variable(self, span: Span, label: str | None = None) -> RecordedVariable:
        """A new variable of the innermost function."""
        return RecordedVariable(span, self.inner, label)

    # --- values of Python --------------------------------------------------------------------

    def tensor(self, value: ir.Value, variable: RecordedVariable) -> Tensor:
        """The Python tensor of a value."""
        return Tensor(self, value, self.builder.frames[-1], variable)

    def operand(self, found: Any, span: Span) -> Operand:
        """The operand that a Python value is in an expression."""
        if isinstance(found, Tensor):
            return self.value(found, span)
        if isinstance(found, DType):
            return types.DTYPES[found.name]
        if isinstance(found, str):
            return found
        number = number_of(found)
        if number is not None:
            self.note(computed(found, span))
            self._note_sizes(found, span)
            return number
        help = "operators take tensors, numbers and dims"
        what = kind_of(found)
        if hasattr(found, "__array__"):
            help = "give arrays to the program as inputs, or as its parameters"
            what = f"an array ({type(found).__name__})"
        fail("MD0815", f"{what} is no tensor of the program", span, help=help)

    def _note_sizes(self, found: Any, span: Span) -> None:
        """Record the dims of which a number is computed, and the operators that do it."""
        if isinstance(found, SizeArithmetic):
            self.sizes.update(self.dim(dim, span).name for dim in found._dims())
            self.called.update(operators_of(found._number()))

    def note(self, *found: Moment | None) -> None:
        """Record numbers that Python has computed."""
        self.computed += [c for c in found if c is not None]

    def form(self, form: Form) -> ast.CallExpr:
        """The call of a form, as the parser would read it."""
        for part in form.inside():
            self.note(*(part.computed if isinstance(part, Form) else ()))
            self._note_sizes(part, form.span)
        return form.syntax()

    def value(self, tensor: Tensor, span: Span) -> ir.Value:
        """The value of a tensor, which must be of this program and in scope here."""
        origin = Related(tensor._value.span, "made here")
        if tensor._tracer is not self:
            message = f"`{tensor._value.label}` is a tensor of another program"
            help = "make it an input, or compute it in this program too"
            fail("MD0811", message, span, origin, help=help)
        if not any(frame is tensor._frame for frame in self.builder.frames):
            message = f"`{tensor._value.label}` exists only inside the `repeat`"
            help = (
                "let the body return it after the carried values: it comes out with the loop's dim"
            )
            fail("MD0112", message, span, origin, help=help)
        return self.builder.current(tensor._value)

    def given(self, found: Any, span: Span) -> ast.Expr:
        """The expression of a Python value."""
        operand = self.operand(found, span)
        if isinstance(found, Tensor):
            assert isinstance(operand, ir.Value), "a tensor is a value"
            read = Read(ast.Name(operand.label, span), span, operand, found._variable)
            note_read(read, self.inner)
            return read
        if isinstance(operand, int | float):
            return ast.Number(operand, span)
        if isinstance(operand, str):
            return ast.String(operand, span)
        return OperandRef(ast.Name("_", span), span, operand)

    def dim(self, found: Any, span: Span) -> types.Dim:
        """The program's dim for a Python dim; it has one size throughout."""
        dim = need_dim(found, span, self.dims)
        old = self.dims.setdefault(dim.name, dim)
        if old != dim:
            message = f"the dim `{dim.name}` is used with two sizes: {old._size} and {dim._size}"
            places = (
                Related(old.span, f"{old._size} here"),
                Related(dim.span, f"{dim._size} here"),
            )
            help = "a dim has one size in a program; give one of them another name"
            fail("MD0810", message, span, *places, help=help)
        return self.known.setdefault(dim.name, types.Dim(dim.name, dim._size))

    def dim_name(self, found: Any, span: Span) -> ast.Name:
        """The name of a dim in brackets."""
        return ast.Name(self.dim(found, span).name, span)

    def dim_refs(self, dims: Sequence[Any], span: Span) -> tuple[ast.DimRef, ...]:
        """The dims of a list such as `[batch @ "data", io]`."""
        refs = []
        for item in dims:
            if item is ...:
                refs.append(ast.DimRef(ast.Name("...", span), None, span))
                continue
            axes = None
            if isinstance(item, Pinned):
                axes = tuple(ast.Name(a, span) for a in item.axes)
                item = item.dim
            refs.append(ast.DimRef(self.dim_name(item, span), axes, span))
        return tuple(refs)

    def tensor_param(self, name: str, type_: TensorType, span: Span) -> ast.TensorParam:
        """A declared input of a program or a function."""
        dtype = ast.Name(type_.dtype, span) if type_.dtype else None
        return ast.TensorParam(
            ast.Name(name, span), self.dim_refs(type_.dims, span), dtype, None, span
        )

    # --- operators ---------------------------------------------------------------------------

    def binary(self, op: str, left: Any, right: Any, site: Site) -> Tensor:
        """The tensor `left op right`."""
        one, other = (self.given(x, site.operand(i)) for i, x in enumerate((left, right)))
        node = ast.Binary(op, one, other, site.span, site.span)
        return self._one(node, site)

    def unary(self, op: str, operand: Tensor, site: Site) -> Tensor:
        """The tensor `-x` or `not x`."""
        node = ast.Unary(op, self.given(operand, site.operand(0)), site.span)
        return self._one(node, site)

    def view(self, tensor: Tensor, items: list[tuple[Any, ...]], site: Site) -> Tensor:
        """The view of a tensor; `items` are arrows, picks and slices."""
        recorded = self.given(tensor, site.receiver())
        node = ast.ViewExpr(recorded, tuple(self._item(*i, site=site) for i in items), site.span)
        return self._one(node, site)

    def _one(self, node: ast.Expr, site: Site) -> Tensor:
        """The tensor of an expression."""
        tensor = self.finish(node, (self.expressions.evaluate(node, self.scope),), site)
        assert isinstance(tensor, Tensor), "operators and views of tensors are tensors"
        return tensor

    def _item(self, kind: str, what: Any, *rest: Any, site: Site) -> ast.Item:
        span = site.span
        if kind == "arrow":
            return self.bracket_item(what, span)
        dim = self.dim_name(what, span)
        if kind == "pick":
            return ast.PickItem(dim, self.given(rest[0], site.operand(1)), span)
        start, stop = (
            None if n is None else self.given(n, site.operand(i)) for i, n in enumerate(rest[:2], 1)
        )
        return ast.SliceItem(dim, start, stop, self.dim_name(rest[2], span), span)

    def bracket_item(self, item: Any, span: Span) -> ast.Item:
        """The syntax of an item in the brackets of an operator or a view: dim, arrow or window."""
        if isinstance(item, Arrow):
            sources = tuple(self.dim_name(d, span) for d in item.sources)
            return ast.ArrowItem(sources, tuple(self.dim_name(d, span) for d in item.targets), span)
        if isinstance(item, By):
            window: ast.Name | ast.Number
            if type(item.window) is int:
                window = ast.Number(item.window, span)
            else:
                window = self.dim_name(item.window, span)
            target = None if item.target is None else self.dim_name(item.target, span)
            return ast.ByItem(self.dim_name(item.dim, span), window, target, span)
        return ast.DimItem(self.dim_name(item, span), span)

    def call(
        self,
        name: str,
        items: tuple[Any, ...] | None,
        args: tuple[Any, ...] | None,
        options: Mapping[str, Any],
        site: Site,
        out: Sequence[Any] | None = None,
    ) -> Any:
        """`name[items](args, options -> [out])`: a number, a tensor, or one per result.

        Without `args`, it is written without parentheses.
        """
        span = site.span
        brackets = None if items is None else tuple(self.bracket_item(i, span) for i in items)
        operands = tuple(self.given(a, site.operand(i)) for i, a in enumerate(args or ()))
        keywords = tuple(
            ast.Keyword(ast.Name(n, span), self.given(v, site.argument(n)), span)
            for n, v in options.items()
        )
        dims = None if out is None else tuple(self.dim_name(d, site.argument("out")) for d in out)
        function = ast.Name(name, span)
        node = ast.CallExpr(function, brackets, operands, keywords, dims, span)
        results = tuple(map(_right, self.calls.call(node, self.scope)))
        self.called.add(name)
        if args is None:
            return self.finish(
                ast.ViewExpr(ast.Ref(function, span), brackets or (), span), results, site
            )
        return self.finish(node, results, site)

    # --- results -----------------------------------------------------------------------------

    def finish(self, node: ast.Expr, results: tuple[Operand, ...], site: Site) -> Any:
        """The results of an expression, named as the variables they are assigned to."""
        variables = tuple(self.variable(site.span) for _ in results)
        if any(isinstance(x, ir.Value) for x in results):
            self.block.append(RecordedResult(node, variables))
        return self.finished(variables, results, site)

    def finished(
        self, made: tuple[RecordedVariable, ...], results: tuple[Operand, ...], site: Site
    ) -> Any:
        """The results, recorded as the variables `made`."""
        names = (site.names,) if len(results) == 1 else _spread(site.names, len(results))
        triples = zip(made, results, names, strict=True)
        tensors = [self._finished(v, x, n, site) for v, x, n in triples]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _finished(
        self, variable: RecordedVariable, result: Operand, name: Names, site: Site
    ) -> Any:
        if not isinstance(result, ir.Value):
            return self.number(result)
        if isinstance(name, str) and is_name(name) and name not in RESERVED_TENSORS:
            variable.label = name
            result = self._named(result, name, site.span, None)
        return self.tensor(result, variable)

    def number(self, found: Operand) -> Any:
        """The Python number of an operand; one made of sizes keeps track of them."""
        dims = tuple(self.dims[d.name] for d in dims_of(found))
        return Size(found, dims) if dims and isinstance(found, int | float) else found

    def assign(self, tensor: Tensor, name: str, span: Span, dims: Any = None) -> Tensor:
        """Name a tensor as a statement does; with `dims`, check, transpose and pin it too.

        One that has no name yet gets it where it was made.
        """
        recorded = self.given(tensor, span)
        value = self.expressions.tensor(recorded, self.scope)
        refs = None if dims is None else self.dim_refs(dims, span)
        named = self._named(value, name, span, refs)
        variable = tensor._variable
        if self.builder.current(value) is not named or not variable.is_made_in(self.inner):
            variable = self.variable(span)
            self.block.append(RecordedResult(recorded, (variable,)))
        variable.label, variable.dims, variable.span = name, refs, span
        return self.tensor(named, variable)

    def _named(
        self, value: ir.Value, name: str, span: Span, dims: tuple[ast.DimRef, ...] | None
    ) -> ir.Value:
        target = ast.Target(ast.Name(name, span), dims, span)
        named = self._bind(target, value, span, self.scope)
        assert isinstance(named, ir.Value), "a tensor stays one"
        return named

    def results(self, found: Any, span: Span) -> tuple[Any, ...]:
        """The results that a Python function returned, as a tuple."""
        if found is None:
            return ()
        return tuple(found) if isinstance(found, tuple | list) else (found,)

    def carried(self, found: Any, names: list[str], span: Span) -> list[ast.Expr]:
        """The values that a loop body returned: one for each carried tensor, and those to stack."""
        results = self.results(found, span)
        if len(results) < len(names):
            gives = counted(len(results), "tensor")
            message = f"the body returns {gives} and carries {len(names)}"
            help = f"return what it takes, in order: `return {', '.join(names)}`, and then any more"
            fail("MD0816", message, span, help=help)
        return [self.given(x, span) for x in results]


def _spread(names: Names, count: int) -> tuple[str | None, ...]:
    if isinstance(names, tuple) and len(names) == count:
        return names
    return (None,) * count


def _right(result: Operand | None) -> Operand:
    """A result that is not wrong: errors are raised before there is one."""
    assert result is not None, "the errors of a trace are raised where they are found"
    return result
