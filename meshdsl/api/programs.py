"""`@md.program`: a Python function traced into a named program; `md.load`: one from a file."""

from __future__ import annotations

import ast as python
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from operator import index
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, overload

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import TensorType, check_name
from meshdsl.api.errors import told
from meshdsl.api.functions import declared_at, place_of, types_of
from meshdsl.api.recorded import RecordedVariable
from meshdsl.api.sizes import sizes_of, unsayable, with_makers
from meshdsl.api.source_location import file_of, here, key_of, user_frame
from meshdsl.api.tensor import Tensor, tracing_in
from meshdsl.api.tracer import PythonBody, Tracer
from meshdsl.api.unparse import Shared, SourceWriter
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Immediate,
    Source,
    Span,
    fail,
)
from meshdsl.named import ir
from meshdsl.named.builder import Operand, Scope
from meshdsl.named.declarations import RESERVED_TENSORS, Declarations
from meshdsl.named.from_syntax import _Returned
from meshdsl.named.packages import of_operator
from meshdsl.ops.opdef import ADDED
from meshdsl.placed.reshard import MESSAGE_BYTES
from meshdsl.records import dataclass
from meshdsl.search.request import REPLICATED, Amounts, SearchRequest
from meshdsl.syntax import ast
from meshdsl.syntax.tokens import is_name

if TYPE_CHECKING:
    from meshdsl.api.layouts import Layout, Mesh
    from meshdsl.api.plan import Plan
    from meshdsl.api.searched import Advised, ComparedMethods, Searched
    from meshdsl.pipeline import Compilation, Options


class Program:
    """A program: a computation without placements. `compile` makes a plan of it for a mesh.

    The function is traced once, when its program is first needed. An error in the program is a
    `ProgramError` at the line of Python (or of the file).
    """

    def __init__(self, name: str, made: Callable[[], Compilation]) -> None:
        self.name = name
        self._made = made
        self._found: Compilation | None = None
        self._versions: dict[tuple[str | None, bool], Compilation] = {}
        self._lost: Diagnostic | None = None
        self._unsayable: Diagnostic | None = None
        self._read_from: tuple[Source, str | None, Mapping[str, int]] | None = None

    @property
    def declarations(self) -> Declarations:
        """The dims of the program, and of a file its meshes and layouts too."""
        return self._written().declarations

    @told
    def _written(self) -> Compilation:
        """The compilation of the program as it is written."""
        if self._found is None:
            compilation = self._made()
            assert compilation.written, "a program without errors is built"
            self._found = compilation
        return self._found

    def retrace(self) -> None:
        """Trace it anew: names that the function reads may have been rebound."""
        self._forget()
        self._written()

    def _forget(self) -> None:
        self._found = None
        self._versions.clear()

    @told
    def named(self, dtype: str | None = None, *, evaluate: bool = True) -> ir.NamedProgram:
        """The named program, verified and simplified; `dtype` is that of floats that state none.

        Of one that minimises a loss it is the forward pass, or (without `evaluate`) the step.
        """
        return self._version(dtype, evaluate).named

    def _version(self, dtype: str | None, evaluate: bool) -> Compilation:
        """The program with floats of type `dtype`; without `evaluate`, the step of `minimize`."""
        key = (dtype, evaluate)
        if key not in self._versions:
            compilation = self._written()
            options = replace(compilation.options, dtype=dtype, evaluate=evaluate)
            self._versions[key] = compilation.under(options, Diagnostics())
        return self._versions[key]

    def compilation(
        self, declarations: Declarations, options: Options, diagnostics: Diagnostics | None = None
    ) -> Compilation:
        """The compilation of the program; `declarations` may have more layouts."""
        version = self._version(options.dtype, options.evaluate)
        same = replace(options, program=version.options.program, set_dims=version.options.set_dims)
        return version.under(same, diagnostics or Diagnostics(), declarations)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs in order, each with its type as text."""
        return {v.label: str(v.type) for v in self.named().inputs}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs, in order."""
        return tuple(o.name for o in self.named().outputs)

    @property
    def params(self) -> dict[str, str]:
        """The parameters by their dotted names, each with its type."""
        return {str(p.value.name): str(p.value.type) for p in self.named().params}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a program as text: that of its file, or that of `to_mdsl`.

        Raises TypeError where no text can express it, not even at its own sizes.
        """
        text = self._read_from or (Source(f"{self.name}.mdsl", self._text()), None, {})
        if self._unsayable is not None:
            way_out = "pickle what makes it: the function, or the name of its file"
            message = f"the program `{self.name}` cannot be pickled: {self._unsayable.message}"
            raise TypeError(f"{message}; {way_out}")
        return read, text, {"_lost": self._lost}

    def _text(self) -> str:
        from meshdsl.syntax.printer import print_file

        compilation = self._written()
        return print_file(_needed(compilation.tree, self.name, compilation.options.set_dims))

    @told
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a call: a plan is what can be called (MD0822)."""
        from meshdsl.api.refusals import compiled

        line = compiled(here())
        help = f"write `{line}`; a part of a program is a function under `@md.function`"
        if line is None:
            help = "compile it first: `program.compile()(x)`"
        fail(
            "MD0822",
            f"the program `{self.name}` is called, and no plan of it",
            here().span,
            help=help,
        )

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {type_}" for name, type_ in self.inputs.items())
        return f"<program {self.name}({inputs}) -> {', '.join(self.outputs)}>"

    @told
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The text of the program, in colours."""
        from meshdsl.report.views.parts import highlighted

        return {"text/plain": repr(self), "text/html": highlighted(self._text(), "mdsl")}

    @told
    def to_mdsl(self) -> str:
        """The program as readable `.mdsl` text that means the same.

        Sizes keep their formulas, so that the text under `--set` means the same. Raises
        ProgramError (MD0821) where no text can: `math.sqrt(key)` of Python.
        """
        text = self._text()
        reason = self._lost or self._unsayable
        if reason is not None:
            raise DiagnosticError(reason)
        return text

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
        cluster: str | None = None,
        objective: str | None = None,
    ) -> Plan:
        """The plan for a mesh under a layout: what each device stores, computes and sends.

        `mesh` is `md.mesh(rows=2, cols=2)`, a dict, a string `"rows:2,cols:2"`, or the name of one
        in the file; None: the first of the file, or one device. `layout` is `md.layout(…)`, or
        anything that makes one; None: the first of the file, or none. `sbp` replaces a layout:
        `{"x": "S(0), B"}`. `reduce` says when partial values are reduced: `immediate`,
        `mesh-tf`, `deferred` or `optimal`, which minimises the bytes that are sent, and
        `message_bytes` more for each collective; with `cache`, its plan is kept for the next time.
        Under `strict`, warnings are errors. `dtype` is that of floats that state none. `cluster` is
        a machine by name, such as `h100`, or a `.toml` file: times are predicted for it, and
        `optimal` minimises time, unless `objective` is `bytes`.

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
        chosen |= {"cluster": cluster, "objective": objective}
        return planned(self, chosen, strict, here())

    @told
    def search(
        self,
        mesh: Mesh | Mapping[str, int] | str | None = None,
        *,
        cluster: str | None = None,
        objective: str | None = None,
        memory: int | str | None = None,
        fix: Layout | str | None = None,
        max_rules: int | None = None,
        replicated: float | str = REPLICATED,
        storage: bool = True,
        selectors: bool = False,
        partial: bool = True,
        per_tensor: bool = False,
        front: bool = False,
        budget: float | str | None = None,
        devices: int | None = None,
        certificate: bool = False,
        start: Layout | str | None = None,
        pipeline: str | None = None,
        method: str = "layouts",
        dtype: str | None = None,
    ) -> Searched:
        """The best layouts on a mesh, in order, with a reason behind each rule of the first.

        They send the fewest bytes; on a `cluster` (`"h100"`, or a file) they take the least time;
        `objective` says otherwise: `time`, `bytes` or `memory`. `memory` is what a device may hold:
        `"80GB"`, or bytes. `fix` are rules to be kept: `"batch:data"`, or a layout. `replicated` is
        the part by which a device may do more than the least work. Without `storage` no rules for
        `params`, `grads` and `state` are sought; with `selectors` those for functions and
        parameters are too, by steps; with `per_tensor` those for every tensor with a name. Without
        `partial` every sum is reduced where it appears. After a `budget` of work, in seconds that
        count as so many operators each, the best so far is returned. With `devices`, every mesh of
        so many with the axes of `mesh` is searched. A `certificate` bounds all per-tensor plans; by
        time there is one in any case. `start` is a layout, by name or as text, to begin from.
        `pipeline` is an axis on which the stages of a pipeline may be: layouts with one are
        searched, too.

        Raises:
            ProgramError: no such mesh, cluster or method; nothing fits into the memory (MD0642).
        """
        from meshdsl.api.searched import as_text, searched

        request = SearchRequest(
            method=method,
            objective=objective,
            cluster=cluster,
            fix=as_text(fix),
            max_rules=max_rules,
            storage=storage,
            selectors=selectors,
            partial=partial,
            per_tensor=per_tensor,
            front=front,
            devices=devices,
            certificate=certificate,
            start=as_text(start),
            pipeline=pipeline,
        )
        amounts = Amounts(memory, replicated, budget)
        return searched(self, mesh, dtype, request, amounts, here())

    @told
    def compare_methods(
        self,
        mesh: Mesh | Mapping[str, int] | str | None = None,
        *,
        cluster: str | None = None,
        objective: str | None = None,
        memory: int | str | None = None,
        fix: Layout | str | None = None,
        replicated: float | str = REPLICATED,
        storage: bool = True,
        partial: bool = True,
        budget: float | str | None = None,
        devices: int | None = None,
        certificate: bool = False,
    ) -> ComparedMethods:
        """Every method of search on one question: cost found, work, proof, seconds.

        The options are those of `search`. Without a `budget` each method has one of 10 s.

        Raises:
            ProgramError: no such mesh or cluster; no method finds what fits (MD0642).
        """
        from meshdsl.api.searched import as_text, compared

        request = SearchRequest(
            objective=objective,
            cluster=cluster,
            fix=as_text(fix),
            storage=storage,
            partial=partial,
            devices=devices,
            certificate=certificate,
        )
        return compared(self, mesh, request, Amounts(memory, replicated, budget), here())

    @told
    def advise(
        self,
        mesh: Mesh | Mapping[str, int] | str | None = None,
        *,
        cluster: str | None = None,
        memory: int | str | None = None,
        devices: int | None = None,
        pipeline: str | None = None,
        budget: float | str | None = None,
        dtype: str | None = None,
    ) -> Advised:
        """How to divide the program over devices: the best layout in words, and what leads to it.

        The options are those of `search`, which finds the layout of least time on a `cluster`.
        `memory` is what a device may hold, by default that of the cluster's devices. After the work
        of `budget` seconds the best so far is advised.

        Raises:
            ProgramError: no such mesh or cluster; no cluster (MD0324); nothing fits (MD0642).
        """
        from meshdsl.api.searched import advised

        request = SearchRequest(cluster=cluster, devices=devices, pipeline=pipeline)
        return advised(self, mesh, dtype, request, Amounts(memory, budget=budget), here())


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
        ProgramError: an input has no type (MD0819), or its name is not allowed (MD0817).
    """
    make = partial(_program, name=name, frame=user_frame())
    return make if function is None else make(function)


@told
def _program(function: Callable[..., Any], name: str | None, frame: FrameType) -> Program:
    called = name or function.__name__
    check_name("program", called, place_of(function))
    types = types_of(function, frame)
    built = Program(called, lambda: _traced(built, function, types))
    built.__doc__ = function.__doc__
    built.__module__ = function.__module__
    return built


def _traced(
    program: Program, function: Callable[..., Any], types: Mapping[str, TensorType]
) -> Compilation:
    """The compilation of a trace; `program` keeps what text cannot express of it."""
    from meshdsl.pipeline import Compilation, Known, Options

    traced = trace(function, program.name, types)
    program._lost, program._unsayable = traced.lost, traced.unsayable
    source, options = traced.tree.span.source, Options(program=program.name)
    return Compilation(source, options, known=Known(traced.tree))


@dataclass(frozen=True, slots=True)
class Traced:
    """The result of a trace: the syntax tree, and what of it text cannot express.

    `lost` is the reason at other sizes, `unsayable` the reason even at these.
    """

    tree: ast.SourceFile
    lost: Diagnostic | None
    unsayable: Diagnostic | None


def trace(function: Callable[..., Any], name: str, types: Mapping[str, TensorType]) -> Traced:
    """The syntax tree of the computation of a Python function."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    diagnostics = Immediate()
    place = place_of(function)
    # What can be called is said by `md.use`: each operator is an object.
    tracer = Tracer(Declarations(place.source, operators=ADDED), diagnostics)
    tracer.root_dims = tracer.known
    inputs = tuple(
        _input(tracer, function, types, p) for p in inspect.signature(function).parameters
    )
    variables = [RecordedVariable(node.span, None, node.name.text) for node in inputs]
    returned: list[tuple[str | None, ast.Expr]] = []

    def run(scope: Scope) -> _Returned | None:
        operands = [tracer.tensor(*pair) for pair in zip(tracer.inputs, variables, strict=True)]
        returned.extend(_returned(tracer, function, function(*operands), place))
        return _Returned(tuple(_output(tracer, scope, *r) for r in returned), place)

    called = ast.Name(name, place)
    body = PythonBody((), ast.Number(0, place), place, run)
    with tracing_in(tracer):
        tracer.build(ast.ProgramDecl(called, inputs, (body,), place))
    diagnostics.raise_errors()
    pairs = list(zip(inputs, variables, strict=True))
    writer, program = _tree_of(tracer, called, pairs, returned)
    dims = with_makers(tracer.dims)
    computed_sizes = sizes_of(dims)
    sizes = tuple(writer.size(n, d._size, computed_sizes.get(n), d.span) for n, d in dims.items())
    packages = {p.name for p in map(of_operator, tracer.called) if p is not None}
    uses = tuple(ast.UseDecl(ast.Name(name, place), place) for name in sorted(packages))
    tree = ast.SourceFile((*uses, *sizes, *writer.defined(), program), place)
    operands = [*tracer.computed, *(d._computed for d in dims.values() if d._computed)]
    lost = unsayable(tracer.started, operands, dims.values())
    return Traced(tree, lost, next(iter(writer.unsayable), None))


def _tree_of(
    tracer: Tracer,
    name: ast.Name,
    inputs: Sequence[tuple[ast.TensorParam, RecordedVariable]],
    returned: Sequence[tuple[str | None, ast.Expr]],
) -> tuple[SourceWriter, ast.ProgramDecl]:
    """The program that was recorded, written again until its `def`s take all dims they need."""
    sizes, called = frozenset(tracer.sizes), frozenset(tracer.called)
    shared: Mapping[str, Shared] = {}
    while True:
        writer = SourceWriter(sizes, called, shared)
        program = writer.program(name, inputs, tracer.block, returned)
        if not writer.grown:
            return writer, program
        shared = writer.shared


def _output(
    tracer: Tracer, scope: Scope, name: str | None, node: ast.Expr
) -> tuple[ast.Expr, Operand]:
    """A returned tensor under its name, with its value."""
    span = node.span
    shown = ast.Ref(ast.Name(name, span), span) if name else ast.String("", span)
    return shown, tracer.expressions.evaluate(node, scope)


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
) -> list[tuple[str | None, ast.Expr]]:
    """The returned tensors, each with its name in the `return`."""
    if found is None:
        fail("MD0113", "this program returns nothing", place, help="end it with `return NAME, …`")
    listed = tracer.results(list(found.values()) if isinstance(found, Mapping) else found, place)
    places = _return_places(function, len(listed), place)
    names: list[str | None]
    if isinstance(found, Mapping):
        names = [_key(tracer, *pair) for pair in zip(found, places.keys, strict=True)]
    else:
        names = places.names or [_label(result) for result in listed]
    named_results = zip(listed, names, places.values, strict=True)
    return [(name, tracer.given(result, span)) for result, name, span in named_results]


def _key(tracer: Tracer, name: Any, span: Span) -> str:
    """The output name that a returned dict gives; refuse one that the language does not allow."""
    check_name("result", name, span)
    tracer._check_name(ast.Name(name, span))
    return str(name)


def _label(result: Any) -> str | None:
    return result.name.rsplit(".", 1)[-1] if isinstance(result, Tensor) and result.name else None


@dataclass(frozen=True, slots=True)
class _Places:
    """The span of each result in a `return`, and its key in a dict; `names` are variables."""

    values: list[Span]
    keys: list[Span]
    names: list[str | None] = field(default_factory=list)


def _return_places(function: Callable[..., Any], count: int, place: Span) -> _Places:
    """The places of results in the only `return`; else that of its value, or of the function."""
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
        everywhere = [file.span(key_of(value))] * count
        return _Places(everywhere, everywhere)
    spans = [file.span(key_of(i)) for i in items]
    return _Places(spans, spans, [_variable(i) for i in items])


def _variable(node: python.expr) -> str | None:
    """The name of a variable, if the language allows it."""
    name = node.id if isinstance(node, python.Name) else ""
    return name if is_name(name) and name not in RESERVED_TENSORS else None


def _returns(body: Sequence[python.stmt]) -> list[python.Return]:
    """The `return`s of a function, without those of functions inside it."""
    returns: list[python.Return] = []
    for node in body:
        if isinstance(node, python.Return):
            returns.append(node)
        elif not isinstance(node, python.FunctionDef | python.ClassDef):
            inner = [n for n in python.iter_child_nodes(node) if isinstance(n, python.stmt)]
            returns += _returns(inner)
    return returns


# --- files ---------------------------------------------------------------------------------------


@told
def load(
    path: str | Path, *, program: str | None = None, dims: Mapping[str, int] | None = None
) -> Program:
    """A program of a `.mdsl` file, the same object as a traced one; `dims` overrides sizes.

    Its meshes and layouts are given by name: `md.load("mlp.mdsl").compile("square", "hybrid")`.

    Raises:
        ProgramError: the file cannot be read, or is wrong; it has several programs and none is
            chosen (MD0111); `dims` are no sizes by dim (MD0604).
    """
    from meshdsl.syntax.parse import read_source

    if not isinstance(dims, Mapping | None):
        given = f"md.sizes({str(dims)!r})" if isinstance(dims, str | Path) else "{'batch': 8}"
        message = f"`dims=` takes sizes by dim, not {kind_of(dims)}"
        fail("MD0604", message, here().span, help=f"write `dims={given}`")
    return read(read_source(path), program, {n: index(size) for n, size in (dims or {}).items()})


@told
def sizes(path: str | Path) -> dict[str, int]:
    """The sizes by dim of a `.mdsl` file of nothing but dims, for `dims=` of `load` and `module`.

    `md.load("llama.mdsl", dims={**md.sizes("llama3_70b.mdsl"), "batch": 16})`.

    Raises:
        ProgramError: the file cannot be read, or is wrong, or has more than dims (MD0601).
    """
    from meshdsl.named.size_files import read_size_file

    return dict(read_size_file(path).sizes)


@told
def check(path: str | Path) -> None:
    """Hold a `.mdsl` file to its `expect` blocks, after all else that `meshdsl check` reports.

    Raises:
        ProgramError: the file cannot be read, or is wrong, or an expectation fails (MD0401).
    """
    from meshdsl.pipeline import Options
    from meshdsl.report.checks import check_source
    from meshdsl.syntax.parse import read_source

    diagnostics = Diagnostics()
    check_source(read_source(path), Options(), diagnostics)
    diagnostics.raise_errors()


def read(source: Source, program: str | None, dims: Mapping[str, int]) -> Program:
    """A program of a text; raises DiagnosticError."""
    from meshdsl.pipeline import Compilation, Options

    compilation = Compilation(source, Options(program=program, set_dims=dims))
    result = Program(compilation.written.name, lambda: compilation)
    result._read_from = (source, program, dims)
    return result


def _needed(tree: ast.SourceFile, name: str, sizes: Mapping[str, int]) -> ast.SourceFile:
    """The declarations of a program: its own, the `def`s it calls and the dims it names, packages.

    `sizes` are those given to dims from outside.
    """
    nodes = [_sized(d, sizes) for d in tree.declarations]
    needed: list[ast.Declaration] = []
    needed += [d for d in nodes if isinstance(d, ast.UseDecl)]
    needed += [d for d in nodes if isinstance(d, ast.ProgramDecl) and d.name.text == name][:1]
    parts = [d for d in nodes if isinstance(d, ast.DimDecl | ast.FunctionDecl)]
    for node in needed:
        inside = {n.text for n in ast.walk(node) if isinstance(n, ast.Name)}
        needed += [d for d in parts if d.name.text in inside and all(d is not f for f in needed)]
    identities = set(map(id, needed))
    return ast.SourceFile(tuple(d for d in nodes if id(d) in identities), tree.span)


def _sized(node: ast.Declaration, sizes: Mapping[str, int]) -> ast.Declaration:
    """A declaration; that of a dim in `sizes` with this size."""
    if isinstance(node, ast.DimDecl) and node.name.text in sizes:
        return replace(node, value=ast.Number(sizes[node.name.text], node.span))
    return node
