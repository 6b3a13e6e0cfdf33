"""`@md.program`: a Python function traced into a named program; `md.load`: one from a file."""

from __future__ import annotations

import ast as python
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, overload

from meshdsl.api.dims import TensorType, check_name, is_name
from meshdsl.api.errors import told
from meshdsl.api.functions import declared_at, place_of, types_of
from meshdsl.api.places import file_of, here, key_of, user_frame
from meshdsl.api.sizes import sizes_of, unsayable, with_makers
from meshdsl.api.tensor import Tensor, tracing_in
from meshdsl.api.tracer import PythonBody, Tracer
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source, Span, fail
from meshdsl.named import ir
from meshdsl.named.builder import Scope
from meshdsl.named.declarations import RESERVED_TENSORS, Declarations
from meshdsl.named.expressions import Given
from meshdsl.named.from_syntax import _Returned
from meshdsl.placed.reshard import MESSAGE_BYTES
from meshdsl.syntax import ast

if TYPE_CHECKING:
    from meshdsl.api.layouts import Layout, Mesh
    from meshdsl.api.plan import Plan
    from meshdsl.pipeline import Compilation, Options


class Program:
    """A program: what it computes, and nothing of where. `compile` makes a plan of it for a mesh.

    The function is traced when its program is first needed, once. What it says of a wrong program
    is a `ProgramError` at the line of Python (or of the file).
    """

    def __init__(self, name: str, made: Callable[[], tuple[Declarations, ir.Program]]) -> None:
        self.name = name
        self._made = made
        self._found: tuple[Declarations, ir.Program] | None = None
        self._named: dict[tuple[str | None, bool], ir.Program] = {}
        self._unsayable: Diagnostic | None = None
        self._read_from: tuple[Source, str | None, Mapping[str, int]] | None = None

    @property
    def declarations(self) -> Declarations:
        """The dims of the program, and of a file its meshes and layouts too."""
        return self._traced()[0]

    def _keep(self, traced: Traced) -> tuple[Declarations, ir.Program]:
        """What a trace has made; what no text can say of it is kept for `to_mdsl`."""
        self._unsayable = traced.unsayable
        return traced.declarations, traced.program

    @told
    def _traced(self) -> tuple[Declarations, ir.Program]:
        if self._found is None:
            self._found = self._made()
        return self._found

    def retrace(self) -> None:
        """Trace it anew: names that the function reads may mean something else by now."""
        self._found = None
        self._named.clear()
        self._traced()

    @told
    def named(self, dtype: str | None = None, *, evaluate: bool = True) -> ir.Program:
        """The named program, verified and simplified; with `dtype`, every float of that type.

        Of one that minimises a loss it is the forward pass, or else (not `evaluate`) the step.
        """
        key = (dtype, evaluate)
        if key not in self._named:
            from meshdsl.pipeline import finish_named

            self._named[key] = finish_named(self._traced()[1], dtype, evaluate)
        return self._named[key]

    def compilation(
        self, declarations: Declarations, options: Options, diagnostics: Diagnostics | None = None
    ) -> Compilation:
        """The program on its way through the compiler; `declarations` may hold more layouts."""
        from meshdsl.pipeline import Compilation, Known

        named = self.named(options.dtype, evaluate=options.evaluate)
        known = Known(declarations, self._traced()[1], named)
        return Compilation(declarations.source, options, diagnostics or Diagnostics(), known)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs in order, each with its type: `{"x": "f32[batch, io]"}`."""
        return {v.label: str(v.type) for v in self.named().inputs}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what it returns, in order."""
        return tuple(o.name for o in self.named().outputs)

    @property
    def params(self) -> dict[str, str]:
        """The parameters by their dotted names, each with its type."""
        return {str(p.value.name): str(p.value.type) for p in self.named().params}

    def __reduce__(self) -> tuple[Any, ...]:
        """A program is pickled as text: that of its file, or what `to_mdsl` writes.

        Raises TypeError where no text could say it: `md.grad` in it.
        """
        text = self._read_from or (Source(f"{self.name}.mdsl", self._as_text()), None, {})
        return read, text, {"_unsayable": self._unsayable}

    def _as_text(self) -> str:
        from meshdsl.named.to_mdsl import Unwritable, to_mdsl

        try:
            return to_mdsl(self._traced()[1], sizes=self.declarations.sizes)
        except Unwritable as reason:
            way_out = "pickle what makes it: the function, or the name of its file"
            message = f"the program `{self.name}` cannot be pickled: {reason}; {way_out}"
            raise TypeError(message) from None

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {type_}" for name, type_ in self.inputs.items())
        return f"<program {self.name}({inputs}) -> {', '.join(self.outputs)}>"

    @told
    def to_mdsl(self) -> str:
        """The program as readable `.mdsl` text that means the same.

        Sizes stay what they were made of, so that the text with `--set` means what it says. Raises
        ProgramError (MD0821) where no text could: `md.grad`, or `math.sqrt(key)` of Python.
        """
        from meshdsl.named.to_mdsl import Unwritable, to_mdsl

        declarations, program = self._traced()
        if self._unsayable is not None:
            raise DiagnosticError(self._unsayable)
        try:
            return to_mdsl(program, sizes=declarations.sizes)
        except Unwritable as reason:
            fail("MD0821", str(reason), program.span, help=reason.help)

    @told
    def compile(
        self,
        mesh: Mesh | Mapping[str, int] | str | None = None,
        layout: Layout | Mapping[str, Any] | Sequence[str] | str | None = None,
        *,
        sbp: Mapping[str, Any] | str | None = None,
        reduce: str = "optimal",
        message_bytes: int = MESSAGE_BYTES,
        cache: bool = True,
        strict: bool = False,
        dtype: str | None = None,
    ) -> Plan:
        """The plan for a mesh under a layout: what each device holds, computes and sends.

        `mesh` is `md.mesh(rows=2, cols=2)`, a dict, a string `"rows:2,cols:2"`, or the name of one
        in the file; None: the first of the file, or one device. `layout` is `md.layout(…)`, or
        anything that makes one; None: the first of the file, or none. `sbp` stands instead of a
        layout: `{"x": "S(0), B"}`. `reduce` says when partial sums are added up: `immediate`,
        `mesh-tf`, `deferred` or `optimal`, which minimises the bytes that are sent, and
        `message_bytes` more for each collective; with `cache`, its plan is kept for the next time.
        Under `strict`, warnings are errors. `dtype` is another
        type for every float.

        Raises:
            ProgramError: no such mesh or axis, two dims on one axis, a dim that does not divide, …
        """
        from meshdsl.api.plan import planned

        chosen: dict[str, Any] = {
            "mesh": mesh,
            "layout": layout,
            "sbp": sbp,
            "reduce": reduce,
            "dtype": dtype,
        }
        chosen |= {"message_bytes": message_bytes, "cache": cache}
        return planned(self, chosen, strict, here())


# --- tracing -------------------------------------------------------------------------------------


@overload
def program(function: Callable[..., Any], /) -> Program: ...
@overload
def program(*, name: str) -> Callable[[Callable[..., Any]], Program]: ...
@told
def program(function: Any = None, /, *, name: str | None = None) -> Any:
    """Make a program of a Python function; its parameters are the inputs, its results the outputs.

    ::

        batch, io, hidden = md.dims(batch=64, io=512, hidden=2048)

        @md.program
        def mlp(x: md.Tensor[batch, io]):
            w = md.param([io, hidden])
            v = md.param([hidden, io])
            h = md.relu(md.einsum(x, w, out=[batch, hidden]))
            y = md.einsum(h, v, out=[batch, io])
            return y

    An input's annotation gives its dims and element type: `md.Tensor[batch, io]` (f32) or
    `md.i32[batch, seq]`; for type checkers `Annotated[md.Tensor, md.i32[batch, seq]]`. A dim with
    `@` fixes where the input lies. Tensors have the names of the variables they are assigned to.

    Raises:
        ProgramError: an input has no type (MD0819), or its name is none (MD0817).
    """
    frame = user_frame()
    if function is None:
        return lambda decorated: _program(decorated, name, frame)
    return _program(function, name, frame)


@told
def _program(function: Callable[..., Any], name: str | None, frame: FrameType) -> Program:
    called = name or function.__name__
    check_name("program", called, place_of(function))
    types = types_of(function, frame)
    made = Program(called, lambda: made._keep(trace(function, called, types)))
    made.__doc__ = function.__doc__
    made.__module__ = function.__module__
    return made


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace has made: dims, the program, and what of it no text can say."""

    declarations: Declarations
    program: ir.Program
    unsayable: Diagnostic | None


def trace(function: Callable[..., Any], name: str, types: Mapping[str, TensorType]) -> Traced:
    """The named program that a Python function computes, and its dims."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    diagnostics = Diagnostics()
    place = place_of(function)
    tracer = Tracer(Declarations(place.source), diagnostics)
    tracer.root_dims = tracer.known
    inputs = tuple(_input(tracer, function, types, p) for p in _parameters(function))

    def run(scope: Scope) -> _Returned | None:
        given = [tracer.tensor(v) for v in tracer.inputs]
        return _returned(tracer, function, function(*given), place)

    body = PythonBody((), ast.Number(0, place), place, run)
    with tracing_in(tracer):
        built = tracer.build(ast.Program(ast.Name(name, place), inputs, (body,), place))
    diagnostics.raise_errors()
    spans = {n: d.span for n, d in tracer.dims.items()}
    dims = with_makers(tracer.dims)
    declarations = Declarations(place.source, tracer.known, spans, sizes=sizes_of(dims))
    given = [*tracer.computed, *(d._computed for d in dims.values() if d._computed)]
    return Traced(declarations, built, unsayable(tracer.started, given, dims.values()))


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _input(
    tracer: Tracer, function: Callable[..., Any], types: Mapping[str, TensorType], name: str
) -> ast.TensorParam:
    span = declared_at(function, name) or place_of(function)
    check_name("tensor", name, span)
    if name not in types:
        help = f"annotate it: `{name}: md.Tensor[batch, io]`, or `md.i32[batch]` for integers"
        fail("MD0819", f"the input `{name}` has no dims", span, help=help)
    return tracer.tensor_param(name, types[name], span)


def _returned(
    tracer: Tracer, function: Callable[..., Any], found: Any, place: Span
) -> _Returned | None:
    """What the function returned, each under the name that stands behind `return`."""
    if found is None:
        fail("MD0113", "this program returns nothing", place, help="end it with `return NAME, …`")
    listed = tracer.results(list(found.values()) if isinstance(found, Mapping) else found, place)
    places = _return_places(function, len(listed), place)
    names: list[str | None]
    if isinstance(found, Mapping):
        names = [_key(tracer, *pair) for pair in zip(found, places.keys, strict=True)]
    else:
        names = places.names or [_label(result) for result in listed]
    values: list[tuple[ast.Expr, Any]] = []
    for result, name, span in zip(listed, names, places.values, strict=True):
        operand = tracer.operand(result, span)
        expr = Given(ast.Name(name, span), span, operand) if name else ast.String("", span)
        values.append((expr, operand))
    return _Returned(tuple(values), place)


def _key(tracer: Tracer, name: Any, span: Span) -> str:
    """The name that a returned dict gives to an output; refused where the language has no such."""
    check_name("result", name, span)
    tracer._check_name(ast.Name(name, span))
    return str(name)


def _label(result: Any) -> str | None:
    return result.name.rsplit(".", 1)[-1] if isinstance(result, Tensor) and result.name else None


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each result stands in a `return`, and its key in a dict; `names` are variables."""

    values: list[Span]
    keys: list[Span]
    names: list[str | None] = field(default_factory=list)


def _return_places(function: Callable[..., Any], count: int, place: Span) -> _Places:
    """The places in the only `return`; else that of the only one, or of the function."""
    code = function.__code__
    file = file_of(code)
    node = file.definition(code)
    returns = [] if node is None else list(_returns(node.body))
    if len(returns) != 1 or returns[0].value is None:
        return _Places([place] * count, [place] * count)
    value = returns[0].value
    if isinstance(value, python.Dict) and len(value.keys) == count and None not in value.keys:
        keys = [file.span(key_of(k)) for k in value.keys if k is not None]
        return _Places([file.span(key_of(v)) for v in value.values], keys)
    items = value.elts if isinstance(value, python.Tuple | python.List) else [value]
    if len(items) != count or isinstance(value, python.Dict):
        whole = [file.span(key_of(value))] * count
        return _Places(whole, whole)
    spans = [file.span(key_of(i)) for i in items]
    return _Places(spans, spans, [_variable(i) for i in items])


def _variable(node: python.expr) -> str | None:
    """The name of a variable, if the language has such a name."""
    name = node.id if isinstance(node, python.Name) else ""
    return name if is_name(name) and name not in RESERVED_TENSORS else None


def _returns(body: Sequence[python.stmt]) -> list[python.Return]:
    """The `return`s of a function, without those of functions inside it."""
    found: list[python.Return] = []
    for node in body:
        if isinstance(node, python.Return):
            found.append(node)
        elif not isinstance(node, python.FunctionDef | python.ClassDef):
            inner = [n for n in python.iter_child_nodes(node) if isinstance(n, python.stmt)]
            found += _returns(inner)
    return found


# --- files ---------------------------------------------------------------------------------------


@told
def load(
    path: str | Path, *, program: str | None = None, dims: Mapping[str, int] | None = None
) -> Program:
    """A program of a `.mdsl` file, the same object as a traced one; `dims` are other sizes.

    Its meshes and layouts are asked for by name: `md.load("mlp.mdsl").compile("square", "hybrid")`.

    Raises:
        ProgramError: the file cannot be read, or is wrong; it has several programs and none is
            chosen (MD0111).
    """
    from meshdsl.syntax.parse import read_source

    return read(read_source(path), program, {n: index(size) for n, size in (dims or {}).items()})


def read(source: Source, program: str | None, dims: Mapping[str, int]) -> Program:
    """A program of a text; raises DiagnosticError."""
    from meshdsl.named.from_syntax import build
    from meshdsl.pipeline import choose_program, front

    diagnostics = Diagnostics()
    declarations = front(source, dims, diagnostics)
    diagnostics.raise_errors()
    node = choose_program(declarations, program)
    built = build(declarations, node, diagnostics)
    diagnostics.raise_errors()
    assert built is not None, "a program without errors was built"
    made = Program(node.name.text, lambda: (declarations, built))
    made._read_from = (source, program, dims)
    return made
