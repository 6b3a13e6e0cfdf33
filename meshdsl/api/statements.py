"""Statements of the language as functions: parameters, names, loops, goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

from meshdsl.api.argument_types import kind_of
from meshdsl.api.dims import Dim, DType, Pinned, check_name
from meshdsl.api.errors import told
from meshdsl.api.layouts import ArgumentPlace
from meshdsl.api.recorded import (
    Block,
    Carried,
    Declared,
    Minimized,
    Read,
    Recomputed,
    RecordedResult,
    RecordedStack,
    RecordedVariable,
    Repeated,
    Updated,
)
from meshdsl.api.source_location import here
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
    node = ast.ParamDecl(target, element, _form(tracer, init, site.argument("init")), site.span)
    tracer._param(node, tracer.scope)
    value = tracer.scope.names[name]
    assert isinstance(value, ir.Value), "a parameter is a tensor"
    variable = tracer.variable(site.span, name)
    tracer.block.append(Declared(node, variable))
    return Tensor(tracer, value, tracer.builder.frames[0], variable)


def _listed(dims: Any, message: str, span: Span) -> tuple[Any, ...]:
    if not isinstance(dims, tuple | list):
        help = "give them as a list: `[io, hidden]`, `[]` for a scalar"
        fail("MD0815", f"{message}, and this is {kind_of(dims)}", span, help=help)
    return tuple(dims)


def _form(tracer: Tracer, init: Any, span: Span) -> ast.CallExpr | None:
    if init is None:
        return None
    if not isinstance(init, Form):
        help = "write `init=md.normal(0.02)`, or `md.zeros()`, `md.uniform(-1, 1)`, …"
        fail("MD0260", f"{kind_of(init)} is no initialiser", span, help=help)
    return tracer.form(init)


@told
def name(name: str, value: Operand, dims: Dims | None = None) -> Tensor:
    """The tensor `value` named: `h = md.name("h", md.relu(x), [batch @ "data", hidden])`.

    With `dims` they are checked and the tensor is transposed to this order; `@` pins its placement
    over any layout.

    Raises:
        ProgramError: the dims are others (MD0250), or the name is not allowed (MD0817).
    """
    site = here()
    tracer = tracing(site)
    check_name("tensor", name, site.operand(0))
    place = site.operand(1)
    if not isinstance(value, Tensor):
        value = _tensor(tracer, tracer.given(value, place), place)
    span = site.argument("dims", 2) if dims is not None else site.span
    listed = None if dims is None else _listed(dims, "a tensor has dims", span)
    return tracer.assign(value, name, span, listed)


def _tensor(tracer: Tracer, node: ast.Expr, span: Span) -> Tensor:
    """A number as a tensor without dims."""
    if not isinstance(node, ast.Number):
        tracer.expressions.tensor(node, tracer.scope)
    dtype = ast.Keyword(ast.Name("dtype", span), ast.String("f32", span), span)
    call = ast.CallExpr(ast.Name("cast", span), None, (node,), (dtype,), None, span)
    value = tracer.expressions.tensor(call, tracer.scope)
    variable = tracer.variable(span)
    tracer.block.append(RecordedResult(call, (variable,)))
    return tracer.tensor(value, variable)


# --- loops -------------------------------------------------------------------------------------


@told
def repeat(dim: Dim, body: Callable[..., Any], *carries: Operand) -> Any:
    """Run `body` once for each index of `dim`; it takes and returns the carried tensors.

    Parameters made inside gain the dim, and a tensor from outside that has it is read at the
    current index. Yields what the last iteration returned: nothing, a tensor, or a tuple of them.
    What the body returns beyond the carried tensors comes from every iteration, stacked: it gains
    the dim, as its first.

    ::

        x = md.repeat(layers, block, x)
        h, hs = md.repeat(time, step, h)  # `step` returns h twice: to be carried, to be stacked

    Raises:
        ProgramError: the body returns fewer tensors than it carries (MD0816), or of other types
            (MD0256), or one to be stacked has the dim already (MD0122).
    """
    site = here()
    tracer = tracing(site)
    scope = tracer.scope
    names = _carried_names(body, len(carries))
    recorded = [tracer.given(x, site.operand(i + 2)) for i, x in enumerate(carries)]
    inits = [tracer.expressions.evaluate(x, scope) for x in recorded]
    outer, scope.names = scope.names, {**scope.names, **dict(zip(names, inits, strict=True))}
    targets = tuple(ast.Target(ast.Name(n, site.span), None, site.span) for n in names)
    inside = [tracer.variable(site.span) for _ in names]
    block: Block = []
    nexts: list[ast.Expr] = []
    run = _body(tracer, body, names, inside, block, nexts, site.span)
    statement = PythonBody(targets, ast.Number(0, site.span), site.span, run)
    dim_name = tracer.dim_name(dim, site.operand(0))
    try:
        tracer.loops.repeat(ast.Repeat(dim_name, (statement,), site.span), scope)
        results = [scope.names[n] for n in names]
        stacks = [scope.stacks.pop(_stack_name(i)) for i in range(len(nexts) - len(names))]
    finally:
        scope.names = outer
    for stack in stacks:
        collected = tracer.builder.stacked(stack, site.span, scope)
        results.append(tracer.builder.reach(collected))
    result_variables = [tracer.variable(site.span) for _ in results]
    count = len(names)
    carried = tuple(map(Carried, names, recorded, inside, nexts[:count], result_variables[:count]))
    stacked = tuple(map(RecordedStack, nexts[count:], result_variables[count:]))
    tracer.block.append(Repeated(dim_name, carried, stacked, block, site.span))
    pairs = zip(results, result_variables, strict=True)
    tensors = [tracer.tensor(r, v) for r, v in pairs if isinstance(r, ir.Value)]
    return None if not tensors else tensors[0] if len(tensors) == 1 else tuple(tensors)


def _stack_name(index: int) -> str:
    """What stands for a tensor to be stacked in the scope of a loop: no name of Python's."""
    return f"stack {index + 1}"


def _carried_names(body: Callable[..., Any], count: int) -> list[str]:
    """Distinct names of the parameters of the body, for messages."""
    code = getattr(body, "__code__", None)
    parameters = list(code.co_varnames[: code.co_argcount]) if code else []
    return parameters if len(parameters) == count else [f"carry {i + 1}" for i in range(count)]


def _body(
    tracer: Tracer,
    body: Callable[..., Any],
    names: list[str],
    inside: list[RecordedVariable],
    block: Block,
    nexts: list[ast.Expr],
    span: Span,
) -> Callable[[Scope], None]:
    def run(scope: Scope) -> None:
        pairs = [(scope.names[n], v) for n, v in zip(names, inside, strict=True)]
        with tracer.recording(block):
            returned = body(*(tracer.tensor(x, v) for x, v in pairs if isinstance(x, ir.Value)))
            nexts.extend(tracer.carried(returned, names, span))
        operands = [tracer.expressions.evaluate(node, scope) for node in nexts]
        keys = [*names, *map(_stack_name, range(len(operands) - len(names)))]
        scope.names.update(zip(keys, operands, strict=True))

    return run


@contextmanager
def recompute() -> Iterator[None]:
    """A block whose values are rematerialised in the backward pass instead of stored.

    ::

        with md.recompute():
            h = md.gelu(md.einsum(x, w, out=[batch, hidden]))
    """
    site = here()
    tracer = tracing(site)
    builder = tracer.builder
    outer = builder.block
    block: Block = []
    if outer is None:
        tracer.goals.blocks += 1
        builder.block = tracer.goals.blocks
    tracer.block.append(Recomputed(block, site.span))
    try:
        with tracer.recording(block):
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
def update(state: Tensor, value: Operand) -> None:
    """Assign a parameter its value in the next step: `md.update(total, total + x)`.

    It is a running average, a cache, a counter, and is not minimised. All reads in this step are of
    the value that the step began with.

    Raises:
        ProgramError: `state` is no parameter of this function or program (MD0137), or is assigned
            before (MD0138); `value` has another type (MD0140).
    """
    site = here()
    tracer = tracing(site)
    place = site.operand(0)
    read = tracer.given(state, place)
    if not isinstance(read, Read):
        help = "declare one: `total = md.param([dims], init=md.zeros())`"
        message = f"`md.update` assigns parameters, and this is {kind_of(state)}"
        fail("MD0137", message, place, help=help)
    new_value = tracer.given(value, site.operand(1))
    node = ast.UpdateStatement(ast.Name(read.name.text, place), new_value, site.span)
    tracer.states.assign(
        tracer.states.own(read.name, state._value, read.variable.home is tracer.inner),
        tracer.expressions.evaluate(new_value, tracer.scope),
        node,
        tracer.scope,
    )
    tracer.block.append(Updated(read, new_value, site.span))


Groups = Mapping[Any, Any]
"""By selector, or a tuple of them: options of some parameters, another optimizer, or a word."""


@told
def minimize(
    loss: Tensor,
    optimizer: Form,
    groups: Groups | None = None,
) -> None:
    """Make the program trainable: `md.minimize(loss, md.adamw(lr=3e-4))`.

    `groups` has options of some parameters, by selectors as in a layout: `{"norm":
    {"weight_decay": 0}, ("head", "mlp.w"): md.sgd(lr=1e-4), "base": "frozen"}`. `params` are all;
    the narrowest selector wins. Several losses train parameters of their own.

    Raises:
        ProgramError: the loss is no single float; a group has no such option (MD0272), or selects
            no parameter (MD0277).
    """
    site = here()
    tracer = tracing(site)
    if not isinstance(optimizer, Form):
        help = "write `md.minimize(loss, md.adamw(lr=3e-4))`"
        if callable(optimizer):
            help += "; one of your own is a `def` of a .mdsl file, which `md.load` reads"
        message = f"{kind_of(optimizer)} is no optimizer"
        fail("MD0815", message, site.argument("optimizer", 1), help=help)
    recorded = tracer.given(loss, site.operand(0))
    place = ArgumentPlace(site, "groups", 2)
    settings = tuple(_group_settings(tracer, optimizer, groups or {}, place))
    node = ast.Minimize(recorded, tracer.form(optimizer), settings, site.span)
    tracer.goals.minimize(node, tracer.scope)
    tracer.block.append(Minimized(node))


def _group_settings(
    tracer: Tracer,
    optimizer: Form,
    groups: Groups,
    place: ArgumentPlace,
) -> Iterator[ast.GroupSetting | ast.GroupOptimizer]:
    """The settings of all groups, as the parser would read them."""
    if not isinstance(groups, Mapping):
        help = 'write `{"norm": {"weight_decay": 0}, "base": "frozen"}`'
        fail("MD0815", f"groups are a dict, not {kind_of(groups)}", place.span, help=help)
    for key, options in groups.items():
        names = key if isinstance(key, tuple) else (key,)
        span = place.entry(key) if isinstance(key, str) else place.span
        if not names or not all(isinstance(name, str) for name in names):
            help = 'write the name of a parameter or a function, or a tuple: `("w", "norm")`'
            fail("MD0815", f"{kind_of(key)} selects no parameters", place.span, help=help)
        for name in names:
            for part in name.split("."):
                check_name("parameter", part, span)
        selectors = tuple(tuple(ast.Name(p, span) for p in n.split(".")) for n in names)
        if isinstance(options, str):
            yield ast.GroupSetting(selectors, ast.Name(options, span), None, span)
            continue
        if isinstance(options, Form):
            yield ast.GroupOptimizer(selectors, tracer.form(options), span)
            continue
        if not isinstance(options, Mapping) or not all(isinstance(o, str) for o in options):
            help = 'write `{"weight_decay": 0}`, or "frozen"'
            wrong = "one without names" if isinstance(options, Mapping) else kind_of(options)
            fail("MD0815", f"options are a dict by name, not {wrong}", span, help=help)
        call = tracer.form(Form(optimizer.name, (), tuple(options.items()), span))
        for keyword in call.keywords:
            assert not isinstance(keyword.value, tuple), "an option is one value"
            yield ast.GroupSetting(selectors, keyword.name, keyword.value, span)


__all__ = ["grad", "minimize", "name", "param", "recompute", "repeat", "update"]
