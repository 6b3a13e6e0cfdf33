"""`@md.function`: a Python function that is a function of the program, with a name of its own."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from meshdsl.api.dims import TensorType, as_tuple, check_name
from meshdsl.api.errors import ProgramError, told
from meshdsl.api.recorded import Argument, RecordedCall, RecordedVariable
from meshdsl.api.source_location import Site, file_of, here, key_of, user_frame
from meshdsl.api.tensor import Tensor, tracing
from meshdsl.api.tracer import Tracer
from meshdsl.diagnostics import Diagnostic, Edit, Fix, Related, Span, fail
from meshdsl.named.builder import Scope
from meshdsl.named.calls import MAX_CALL_DEPTH
from meshdsl.named.ir import Value
from meshdsl.syntax import ast

P = ParamSpec("P")
R = TypeVar("R")


class Function(Generic[P, R]):
    """A function of programs: called in one, it is inlined under its name.

    Layouts select what is inside by that name (`mlp: hidden -> tp`), and every call has parameters
    of its own (`mlp.w`, `mlp_2.w`). A tensor whose parameter has dims in its annotation
    (`x: md.Tensor[batch, io]`) is checked against them, and so is the result.
    """

    def __init__(
        self, function: Callable[P, R], name: str, types: Mapping[str, TensorType]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.name, self.types = function, name, types

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function within the program being traced; returns its results."""
        return self._inlined(*args, **kwargs)

    @told
    def _inlined(self, *args: P.args, **kwargs: P.kwargs) -> R:
        site = here()
        tracer = tracing(site)
        self._guard_depth(tracer, site)
        outer = tracer.scope
        call = RecordedCall(self.name, tracer.inner, site.span, place_of(self.function))
        bound = self._bound(args, kwargs, tracer, call, site)
        inner = Scope(tracer.known, {}, tracer.declarations, *outer.enter(self.name))
        with tracer.calling(call, inner):
            self._check(bound, tracer, site)
            returned = self._run(bound, site)
            results = self._results(returned, tracer, call, site)
        call.results = tuple(tracer.variable(site.span) for _ in results)
        tracer.block.append(call)
        if not results:
            return typing.cast(R, returned)
        finished = tracer.finished(call.results, results, site)
        return typing.cast(
            R, finished if len(results) > 1 or isinstance(returned, Tensor) else (finished,)
        )

    def _guard_depth(self, tracer: Tracer, site: Site) -> None:
        if len(tracer.scope.functions) >= MAX_CALL_DEPTH:
            message = f"calls nest more than {MAX_CALL_DEPTH} deep"
            help = "functions are inlined; use `md.repeat` for a loop"
            fail("MD0110", message, site.span, help=help)

    def _bound(
        self, args: Any, kwargs: Any, tracer: Tracer, call: RecordedCall, site: Site
    ) -> inspect.BoundArguments:
        """The bound arguments; tensors are those of the innermost loop."""
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        for name, argument in bound.arguments.items():
            if isinstance(argument, Tensor):
                recorded = tracer.given(argument, site.argument(name))
                reached = tracer.expressions.tensor(recorded, tracer.scope)
                inside = RecordedVariable(call.place, call, name)
                bound.arguments[name] = tracer.tensor(reached, inside)
                param = self._param(name, reached, tracer, call.place)
                call.arguments.append(Argument(param, inside, recorded, name not in self.types))
        return bound

    def _param(self, name: str, value: Value, tracer: Tracer, span: Span) -> ast.TensorParam:
        """The tensor parameter: with the dims of its annotation, or else those of the argument."""
        if name in self.types:
            return tracer.tensor_param(name, self.types[name], self._span(name, span))
        dims = tuple(ast.DimRef(ast.Name(d, span), None, span) for d in value.type.names)
        return ast.TensorParam(ast.Name(name, span), dims, None, None, span)

    def _check(self, bound: inspect.BoundArguments, tracer: Tracer, site: Site) -> None:
        for index, (name, argument) in enumerate(bound.arguments.items()):
            if name in self.types:
                span = site.argument(name, index)
                param = tracer.tensor_param(name, self.types[name], self._span(name, span))
                recorded = tracer.given(argument, span)
                operand = tracer.operand(argument, span)
                tracer.calls._check_param(param, operand, recorded, tracer.scope)

    def _run(self, bound: inspect.BoundArguments, site: Site) -> Any:
        try:
            return self.function(*bound.args, **bound.kwargs)
        except ProgramError as error:
            raise ProgramError(*(self._at(d, site) for d in error.diagnostics)) from None

    def _at(self, diagnostic: Diagnostic, site: Site) -> Diagnostic:
        """The diagnostic of an error inside the function, with the call added."""
        from dataclasses import replace

        if len(diagnostic.related) >= 3:
            return diagnostic
        note = Related(site.span, f"in this call of `{self.name}`")
        return replace(diagnostic, related=(*diagnostic.related, note))

    def _results(
        self, found: Any, tracer: Tracer, call: RecordedCall, site: Site
    ) -> tuple[Any, ...]:
        """The returned values, checked and transposed to the declared order."""
        listed = tracer.results(found, site.span)
        if not all(isinstance(x, Tensor) for x in listed):
            return ()
        values = tuple(tracer.value(x, site.span) for x in listed)
        call.returned = tuple(tracer.given(x, call.place) for x in listed)
        if "return" not in self.types:
            return values
        span = self._span("return", site.span)
        call.result = tracer.dim_refs(self.types["return"].dims, span)
        declared = ast.FunctionDecl(ast.Name(self.name, span), (), (), call.result, (), span)
        dims, scope = tracer.dim_list(call.result, tracer.scope), tracer.scope
        return tuple(tracer._result_type(declared, dims, site.span, scope, v) for v in values)

    def _span(self, name: str, otherwise: Span) -> Span:
        """The span where a parameter (or the result) is declared."""
        return declared_at(self.function, name) or otherwise


@overload
def function(function: Callable[P, R], /) -> Function[P, R]: ...
@overload
def function(*, name: str) -> Callable[[Callable[P, R]], Function[P, R]]: ...
@told
def function(function: Any = None, /, *, name: str | None = None) -> Any:
    """Make a function of programs of a Python function: see `Function`.

    `name` is the one that layouts and parameters use; by default, the function's own.

    Raises:
        ProgramError: the language cannot write the name (MD0817).
    """
    make = functools.partial(_function, name=name, frame=user_frame())
    return make if function is None else make(function)


@told
def _function(function: Callable[P, R], name: str | None, frame: FrameType) -> Function[P, R]:
    called = name or function.__name__
    check_name("function", called, place_of(function))
    return Function(function, called, types_of(function, frame))


# --- annotations -------------------------------------------------------------------------------


def types_of(function: Callable[..., Any], frame: FrameType) -> dict[str, TensorType]:
    """The tensor types among the annotations of a function (`return` for its result)."""
    types = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        value = _evaluated(annotation, function, frame)
        if isinstance(value, str) and name != "return":
            _no_words(function, name, value)
        type_ = _tensor_type(value)
        if type_ is not None:
            types[name] = type_
    return types


def _evaluated(annotation: Any, function: Callable[..., Any], frame: FrameType) -> Any:
    """The value of an annotation that is still a string, in the scope of the function."""
    if not isinstance(annotation, str):
        return annotation
    scope = {**getattr(function, "__globals__", {}), **frame.f_locals}
    if isinstance(function, FunctionType) and function.__closure__:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        scope |= {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    try:
        return eval(annotation, scope)
    except NameError:
        return None
    except SyntaxError:
        return annotation


def _no_words(function: Callable[..., Any], name: str, text: str) -> NoReturn:
    """Refuse dims as words of a string, as jaxtyping and einops have them."""
    span = declared_at(function, name) or place_of(function)
    line = f"{name}: md.Tensor[{', '.join(text.split())}]"
    message = f"the dims of `{name}` are a string"
    fixes = (Fix(f"write `{line}`", (Edit(span, line),)),) if span.text.startswith(name) else ()
    help = f"write `{line}`, with dims made by `md.dims(…)`"
    raise ProgramError(Diagnostic("MD0823", message, span, help=help, fixes=fixes))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _tensor_type(annotation: Any) -> TensorType | None:
    """The type in `md.i32[batch]`, `Annotated[md.Tensor, md.i32[batch]]` or with bare dims."""
    if isinstance(annotation, TensorType):
        return annotation
    if typing.get_origin(annotation) is not typing.Annotated or annotation.__origin__ is not Tensor:
        return None
    first, *_ = annotation.__metadata__
    if isinstance(first, TensorType):
        return first
    dims = first if isinstance(first, list) else annotation.__metadata__
    return TensorType(as_tuple(dims))


def place_of(function: Callable[..., Any]) -> Span:
    """The span of the name in a function's `def`, or of its first line."""
    code = function.__code__
    file = file_of(code)
    node = file.definition(code)
    if node is None:
        return file.span((code.co_firstlineno, None, None, None))
    start = node.col_offset + len("def ")
    return file.span((node.lineno, node.lineno, start, start + len(node.name.encode())))


def declared_at(function: Callable[..., Any], name: str) -> Span | None:
    """The span that declares a parameter, or the result; None if it cannot be found."""
    code = function.__code__
    file = file_of(code)
    node = file.definition(code)
    if node is None:
        return None
    if name == "return":
        return file.span(key_of(node.returns)) if node.returns else None
    for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if arg.arg == name:
            return file.span(key_of(arg))
    return None


__all__ = ["Function", "function"]
