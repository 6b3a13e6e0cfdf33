"""Optimizers written in the language: `minimize loss with lion(lr=1e-4)`, where `lion` is a `def`.

    def lion(w[...], g[...], lr, beta = 0.9) -> [...] {
      param m[...] = zeros()
      m := beta * m + (1 - beta) * g
      return w - lr * sign(m)
    }

The first argument is the parameter, the second its gradient, and the result the new parameter. `lr`
is the learning rate of the step and `step`, if it is an argument, its number from 1. All other
arguments are options. What `param` declares are the states of the parameter. The function is built
once for each parameter, and its operators are part of the training step.

Dims of the function that the parameter has, as in `def muon[rows, cols](w[..., rows, cols], …)`,
are those that it is declared with; `...` then are those of loops around it. Further ones are copies
of these, in order: by `other` a matrix is multiplied by its own transpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NoReturn

from meshdsl.diagnostics import Related, Span, counted, fail
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.named.dtype_override import retype
from meshdsl.named.ir import NamedProgram, walk
from meshdsl.named.optimizers import COMMON, LearningRate, Optimizer, Option, literal
from meshdsl.named.param_groups import OPTIMIZER, WORDS
from meshdsl.syntax import ast

RATE, STEP = "lr", "step"
RESERVED = frozenset({*COMMON, *WORDS, OPTIMIZER})
"""Names that no option of an optimizer of one's own may have."""

FORM = "`def lion(w[...], g[...], lr) -> [...] { … }`"


def options_of(function: ast.FunctionDecl) -> dict[str, Option]:
    """The options of an optimizer that is a function: its arguments after `w` and `g`.

    Raises MD0279 for a function that is no optimizer.
    """
    names = [param.name.text for param in function.params]
    if len(names) < 2 or RATE not in names[2:]:
        message = f"`{function.name.text}` is no optimizer"
        help = f"it takes a parameter, its gradient and the learning rate: {FORM}"
        fail("MD0279", message, function.name.span, help=help)
    for param in function.params[2:]:
        if param.name.text in RESERVED:
            name = param.name.text
            message = f"`{function.name.text}` takes `{name}`, which has another meaning"
            help = "give it another name: this is an option of all optimizers, or a word of groups"
            fail("MD0279", message, param.span, help=help)
    others = {p.name.text: _option(function, p) for p in function.params[2:]}
    others.pop(STEP, None)
    return {RATE: others.pop(RATE), **others}


def _option(function: ast.FunctionDecl, param: ast.TensorParam) -> Option:
    """An argument as an option: a number, or a learning rate."""
    default: Any = ... if param.default is None else literal(param.default)
    if default is not ... and not isinstance(default, int | float):
        assert param.default is not None
        message = f"the default of `{param.name.text}` is no number"
        help = "options of an optimizer are numbers"
        fail("MD0279", message, param.default.span, help=help)
    if param.dims and param.name.text not in (RATE, STEP):
        message = f"`{function.name.text}` takes `{param.name.text}`, which is no number"
        help = f"leave out its dims; options of an optimizer are numbers: {FORM}"
        fail("MD0279", message, param.span, help=help)
    if param.name.text == RATE:
        rate = default if default is ... else LearningRate("constant", default)
        shown = "0.001" if default is ... else repr(default)
        return Option(rate, "rate", "above 0", lambda x: x > 0, shown)
    return Option(default, "number", example="1.0" if default is ... else repr(default))


def written_step(
    optimizer: Optimizer, param: str, type_: TensorType, own: tuple[str, ...]
) -> NamedProgram:
    """One step of a written optimizer for a parameter of a name and a type, as a program.

    Its inputs are the parameter, the gradient, the learning rate and the number of the step; its
    output is the new parameter, and its parameters are the states. `own` are the dims of the
    parameter without those of loops around it.

    Raises MD0279 for what no optimizer may have, and whatever is wrong inside the function.
    """
    rule = optimizer.written
    assert rule is not None
    function, span = rule.function, rule.function.name.span
    own_dims = tuple(dim for dim in type_.dims if dim.name in own)
    of_param = {d.dim.text for d in function.params[0].dims} & {d.text for d in function.dims}
    if function.dims and len(of_param) != len(own_dims):
        wanted = counted(len(of_param), "dim")
        message = f"`{function.name.text}` is for parameters of {wanted}"
        help = f"give it another optimizer in the braces: `{param}: adamw(lr=1e-3)`"
        fail("MD0279", f"{message}; `{param}` has [{', '.join(own)}]", span, help=help)
    bound = _bound(function, of_param, own_dims)
    dims = {dim.name: dim for dim in (*type_.dims, *bound)}
    program = rule.build(_declaration(optimizer, function, type_, bound), dims)
    _check(program, function)
    return program if type_.dtype == F32 else retype(program, type_.dtype)


def _bound(
    function: ast.FunctionDecl, of_param: Set[str], dims: tuple[Dim, ...]
) -> tuple[Dim, ...]:
    """The dims that the function is called with: those of a parameter, and copies of them."""
    ordered, copied = iter(dims), iter(dims)
    bound = []
    for name in function.dims:
        if name.text in of_param:
            bound.append(next(ordered))
            continue
        original = next(copied, None)
        if original is None:
            message = f"`{name.text}` is a dim of nothing"
            help = "further dims are copies of those of the parameter, in order"
            fail("MD0279", message, name.span, help=help)
        bound.append(Dim(f"{original.name}.{name.text}", original.size))
    return tuple(bound)


def _declaration(
    optimizer: Optimizer, function: ast.FunctionDecl, type_: TensorType, bound: tuple[Dim, ...]
) -> ast.ProgramDecl:
    """The program that calls the function once, with the dims that are `bound`."""
    span = function.name.span

    def name(text: str) -> ast.Name:
        return ast.Name(text, span)

    def ref(text: str) -> ast.Ref:
        return ast.Ref(name(text), span)

    dims = tuple(ast.DimRef(name(d), None, span) for d in type_.names)
    sizes: Mapping[str, tuple[ast.DimRef, ...]] = {"w": dims, "g": dims, RATE: (), STEP: ()}
    inputs = tuple(ast.TensorParam(name(n), d, None, None, span) for n, d in sizes.items())
    taken = [param.name.text for param in function.params[2:]]
    values: dict[str, ast.Expr] = {n: ref(n) for n in (RATE, STEP) if n in taken}
    values |= {n: ast.Number(optimizer.option(n), span) for n in taken if n not in values}
    keywords = tuple(ast.Keyword(name(n), value, span) for n, value in values.items())
    items = tuple(ast.DimItem(name(d.name), span) for d in bound) or None
    args = (ref("w"), ref("g"))
    call = ast.CallExpr(name(function.name.text), items, args, keywords, None, span)
    new = ast.Assign((ast.Target(name("new"), dims, span),), call, span)
    body = (new, ast.Return((ref("new"),), span))
    return ast.ProgramDecl(name(function.name.text), inputs, body, span)


def _check(program: NamedProgram, function: ast.FunctionDecl) -> None:
    """Refuse what an optimizer may not have (MD0279)."""
    assigned = {update.old for update in program.updates}
    if len(program.inputs) > len((*"wg", RATE, STEP)):
        _refuse("draws random numbers", function.name.span, "leave them out", function)
    for op in walk(program.body):
        if op.name == "grad":
            help = "its second argument is the gradient of the loss"
            _refuse("calls `grad`", op.span, help, function)
    dtype = program.outputs[0].value.type.dtype
    if dtype != F32:
        help = "return `cast(…, f32)`: a step computes in f32, or in the dtype of a wider parameter"
        _refuse(f"returns {dtype.name}", function.name.span, help, function)
    for param in program.params:
        if param.value not in assigned:
            message = f"declares `{param.value.label}`, which it does not assign"
            help = f"write `{param.value.label} := …`: what an optimizer declares are its states"
            _refuse(message, param.value.span, help, function)
        if param.init.kind != "zeros":
            message = f"has a state `{param.value.label}` that does not begin with zeros"
            _refuse(message, param.value.span, "write `= zeros()`", function)


def _refuse(message: str, span: Span, help: str, function: ast.FunctionDecl) -> NoReturn:
    where = Related(function.name.span, "the optimizer")
    fail("MD0279", f"`{function.name.text}` {message}", span, where, help=help)
