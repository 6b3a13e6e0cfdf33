"""What stands on a line of its own in the language: parameters, names, loops, goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from meshdsl.api.dims import Dim, DType, Pinned, check_name, kind_of
from meshdsl.api.errors import told
from meshdsl.api.places import here
from meshdsl.api.tensor import Operand, Tensor, tracing
from meshdsl.api.tracer import Form, PythonBody, Tracer
from meshdsl.diagnostics import Span, fail
from meshdsl.named import ir
from meshdsl.named.builder import Scope
from meshdsl.syntax import ast

Dims = Sequence[Dim | Pinned]


# --- parameters and names ----------------------------------------------------------------------


@overload
def param(
    name: str, dims: Dims, *, init: Form | None = None, dtype: DType | str | None = None
) -> Tensor: ...
@overload
def param(
    dims: Dims, /, *, init: Form | None = None, dtype: DType | str | None = None
) -> Tensor: ...
@told
def param(
    name: Any, dims: Any = None, *, init: Form | None = None, dtype: DType | str | None = None
) -> Tensor:
    """A parameter: `w = md.param([io, hidden])`, or `md.param("w", [io, hidden])`.

    Without a name it has that of the variable it is assigned to. Inside `md.repeat` it gains the
    dim of the loop. `init` is one of `md.zeros() md.ones() md.normal(std) md.uniform(a, b)
    md.glorot() md.he()`; without it, `normal(1/√fan_in)`. `dtype` is f32 unless given.

    Raises:
        ProgramError: it has no name (MD0817), or one that is taken (MD0104).
    """
    site = here()
    tracer = tracing(site)
    if not isinstance(name, str):
        name, dims = site.names, name
    if not isinstance(name, str):
        help = 'assign it to a variable, or name it: `md.param("w", [io, hidden])`'
        fail("MD0817", "this parameter has no name", site.span, help=help)
    check_name("tensor", name, site.span)
    refs = tracer.dim_refs(_listed(dims, "a parameter needs its dims", site.span), site.span)
    target = ast.Target(ast.Name(name, site.span), refs, site.span)
    element = None if dtype is None else ast.Name(str(dtype), site.argument("dtype"))
    node = ast.Param(target, element, _form(tracer, init, site.argument("init")), site.span)
    tracer._param(node, tracer.scope)
    value = tracer.scope.names[name]
    assert isinstance(value, ir.Value), "a parameter is a tensor"
    return Tensor(tracer, value, tracer.builder.frames[0])


def _listed(dims: Any, message: str, span: Span) -> tuple[Any, ...]:
    if not isinstance(dims, tuple | list):
        help = "give them as a list: `[io, hidden]`, `[]` for a scalar"
        fail("MD0815", f"{message}, and this is {kind_of(dims)}", span, help=help)
    return tuple(dims)


def _form(tracer: Tracer, init: Any, span: Span) -> ast.Call | None:
    if init is None:
        return None
    if not isinstance(init, Form):
        help = "write `init=md.normal(0.02)`, or `md.zeros()`, `md.uniform(-1, 1)`, …"
        fail("MD0260", f"{kind_of(init)} is no initialiser", span, help=help)
    return tracer.form(init)


@told
def name(name: str, value: Operand, dims: Dims | None = None) -> Tensor:
    """`value` under a name: `h = md.name("h", md.relu(x), [batch @ "data", hidden])`.

    With `dims` they are checked and the tensor is brought into this order; `@` fixes where it lies,
    over any layout.

    Raises:
        ProgramError: the dims are others (MD0250), or the name is none (MD0817).
    """
    site = here()
    tracer = tracing(site)
    check_name("tensor", name, site.operand(0))
    operand = tracer.operand(value, site.operand(1))
    if not isinstance(operand, ir.Value):
        operand = tracer.expressions.tensor(tracer.given(value, site.operand(1)), tracer.scope)
    span = site.argument("dims", 2) if dims is not None else site.span
    listed = None if dims is None else _listed(dims, "a tensor has dims", span)
    reached = tracer.builder.reach(operand)
    return tracer.tensor(tracer.assign(reached, name, span, listed))


# --- loops -------------------------------------------------------------------------------------


@told
def repeat(dim: Dim, body: Callable[..., Any], *carries: Operand) -> Any:
    """`body` once for each index of `dim`; it takes and returns what is carried.

    Parameters made inside gain the dim, and a tensor from outside that has it is read at the
    current index. Yields what the last iteration returned: nothing, a tensor, or a tuple of them.

    ::

        x = md.repeat(layers, block, x)

    Raises:
        ProgramError: the body returns another number of tensors (MD0816), or of other types
            (MD0256).
    """
    site = here()
    tracer = tracing(site)
    scope = tracer.scope
    names = _carried_names(body, len(carries))
    inits = [tracer.operand(x, site.operand(i + 2)) for i, x in enumerate(carries)]
    outer, scope.names = scope.names, {**scope.names, **dict(zip(names, inits, strict=True))}
    targets = tuple(ast.Target(ast.Name(n, site.span), None, site.span) for n in names)
    run = _body(tracer, body, names, site.span)
    statement = PythonBody(targets, ast.Number(0, site.span), site.span, run)
    dim_name = tracer.dim_name(dim, site.operand(0))
    try:
        tracer.loops.repeat(ast.Repeat(dim_name, (statement,), site.span), scope)
        results = [scope.names[n] for n in names]
    finally:
        scope.names = outer
    found = [tracer.tensor(r) for r in results if isinstance(r, ir.Value)]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _carried_names(body: Callable[..., Any], count: int) -> list[str]:
    """The names of the parameters of the body, for messages; they are told apart at any rate."""
    code = getattr(body, "__code__", None)
    own = list(code.co_varnames[: code.co_argcount]) if code else []
    return own if len(own) == count else [f"carry {i + 1}" for i in range(count)]


def _body(
    tracer: Tracer, body: Callable[..., Any], names: list[str], span: Span
) -> Callable[[Scope], None]:
    def run(scope: Scope) -> None:
        inside = [scope.names[n] for n in names]
        found = body(*(tracer.tensor(v) for v in inside if isinstance(v, ir.Value)))
        nexts = tracer.carried(found, names, span)
        scope.names.update(zip(names, nexts, strict=True))

    return run


@contextmanager
def recompute() -> Iterator[None]:
    """A block whose values are computed again in the backward pass instead of kept.

    ::

        with md.recompute():
            h = md.gelu(md.einsum(x, w, out=[batch, hidden]))
    """
    tracer = tracing(here())
    builder = tracer.builder
    outer = builder.block
    if outer is None:
        tracer.goals.blocks += 1
        builder.block = tracer.goals.blocks
    try:
        yield
    finally:
        builder.block = outer


# --- goals -------------------------------------------------------------------------------------


@told
def grad(loss: Tensor, *xs: Tensor) -> Any:
    """The gradients of a scalar by tensors, usable like any other: `dx, dw = md.grad(loss, x, w)`.

    Yields a tensor for one `x`, else a tuple of them.

    Raises:
        ProgramError: the loss is no single float (MD0290), or does not depend on an `x` (MD0292).
    """
    site = here()
    return tracing(site).call("grad", None, (loss, *xs), {}, site)


@told
def minimize(loss: Tensor, optimizer: Form) -> None:
    """Make the program trainable: `md.minimize(loss, md.adamw(lr=3e-4))`.

    Raises:
        ProgramError: the loss is no single float, or this is the second goal.
    """
    site = here()
    tracer = tracing(site)
    if not isinstance(optimizer, Form):
        help = "write `md.minimize(loss, md.adamw(lr=3e-4))`"
        message = f"{kind_of(optimizer)} is no optimizer"
        fail("MD0815", message, site.argument("optimizer", 1), help=help)
    given = tracer.given(loss, site.operand(0))
    tracer.goals.minimize(ast.Minimize(given, tracer.form(optimizer), site.span), tracer.scope)


__all__ = ["grad", "minimize", "name", "param", "recompute", "repeat"]
