"""Signatures, docstrings and the stub file of the operators, made from the registry."""

from __future__ import annotations

import inspect
from typing import Any

from meshdsl.ir.types import DType
from meshdsl.named.from_syntax import INITS
from meshdsl.named.optimizers import CALLS, OPTIMIZERS
from meshdsl.ops.opdef import OpDef, load_all
from meshdsl.syntax import ast

RATES = (
    *OPTIMIZERS,
    *(name for name in CALLS if name not in (*INITS, "constant")),
)
"""The arguments of `md.minimize`: optimizers, and the calls that their options may be."""

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
OPTION = inspect.Parameter.POSITIONAL_OR_KEYWORD

_BRACKETS = {
    "dims": "Brackets hold one or more dims: `{name}[batch, io](x)`.",
    "dims?": "Brackets hold the dims that disappear; without them all do.",
    "dim": "Brackets hold the dim it works along: `{name}[seq]`.",
    "arrow": "Brackets hold an arrow: `{name}[old >> new](x)`.",
    "join": "Brackets hold the new dim, or an arrow to it: `{name}[(a, b) >> c](x, y)`.",
    "maker": "Brackets hold the dims of the result: `{name}[batch, io]()`.",
    "filter": "Brackets hold windows: `{name}[h.by(kh) >> ho](x, k)`; `out` lists the dims of the "
    "result.",
    "slide": "Brackets hold windows: `{name}[h.by(3) >> ho](x)`.",
    "rows": "Brackets hold the dim of the indices: `{name}[rows](x, ids)`; `out` lists the dims of "
    "the result.",
    "out": "`out` lists the dims of the result; dims that are not in it are summed.",
    "none": "",
}


def names() -> list[str]:
    """The operators that the language calls by name, except views, and the prelude's functions."""
    from meshdsl.named.prelude import library

    called = [n for n, o in load_all().items() if o.surface.items != "view"]
    return sorted({*called, *library()})


def signature_of(name: str) -> inspect.Signature:
    """The signature of an operator's parentheses."""
    if name not in load_all():
        return _signature_of_function(name)
    opdef = load_all()[name]
    low, high = opdef.surface.arity
    parameters = [_tensor(n, i < low) for i, n in enumerate(operands_of(opdef))]
    if high is None:
        parameters = [inspect.Parameter("tensors", inspect.Parameter.VAR_POSITIONAL)]
    kind = inspect.Parameter.KEYWORD_ONLY if high is None else OPTION
    for option, default in opdef.surface.options:
        # `cast` has words of its own for a dtype that is not given.
        needed = default is ... or (option, default) == ("dtype", None)
        shown = inspect.Parameter.empty if needed else default
        shown = shown.name if isinstance(shown, DType) else shown
        parameters.append(inspect.Parameter(option, kind, default=shown))
    if opdef.surface.states_result:
        needed = opdef.surface.items == "out"
        default = inspect.Parameter.empty if needed else None
        parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=default))
    return inspect.Signature(_in_order(parameters))


def _signature_of_function(name: str) -> inspect.Signature:
    from meshdsl.named.prelude import library

    if name not in library():  # what `md.minimize` takes
        return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
    parameters = []
    for p in library()[name].params:
        default = p.default.value if isinstance(p.default, ast.Number) else inspect.Parameter.empty
        parameters.append(inspect.Parameter(p.name.text, OPTION, default=default))
    return inspect.Signature(parameters)


def _tensor(name: str, needed: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if needed else None
    return inspect.Parameter(name, POSITIONAL, default=default)


def _in_order(found: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters, those behind the first default as keyword-only."""
    optional, ordered = False, []
    for parameter in found:
        has_default = parameter.default is not inspect.Parameter.empty
        if optional and not has_default:
            parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        optional = optional or has_default
        ordered.append(parameter)
    return sorted(ordered, key=lambda p: p.kind)


def operands_of(opdef: OpDef) -> list[str]:
    """The names of the tensor operands: those of the prelude's definition, or letters."""
    from meshdsl.named.prelude import prelude

    function = prelude().functions.get(opdef.name)
    if function is not None:
        options = dict(opdef.surface.options)
        return [p.name.text for p in function.params if p.name.text not in options]
    low, high = opdef.surface.arity
    return ["x", "y", "z", "u", "v", "w"][: low if opdef.surface.seeded else high or 0]


def describe(name: str) -> str:
    """The docstring of an operator, an initialiser or an optimizer."""
    from meshdsl.named.prelude import form, library, meaning

    if name in library():
        function = library()[name]
        said = f"`{form(function)}`: a function of the library, written in the language."
        return f"{said}\n\n{meaning(function)}"
    if name not in load_all():
        what = "initialiser of a parameter" if name in INITS else "of what `md.minimize` takes"
        return f"`{name}(…)`: {what}, written down for `md.param` or `md.minimize`."
    opdef = load_all()[name]
    shown = f"{name}{brackets_of(opdef)}{signature_of(name)}"
    lines = [f"`{shown}`: the operator `{name}` of the language.", opdef.meaning]
    lines += ["The last tensor has the indices, which the language writes in the brackets."] * (
        opdef.surface.indexed
    )
    lines += [_BRACKETS.get(opdef.surface.items, "Brackets hold dims.").format(name=name)]
    lines += ["Broadcasts by name; numbers take the dtype of the tensors."] * (
        opdef.surface.items == "none"
    )
    lines += [f"Without brackets, `md.{name}()` is an initialiser."] * (name in INITS)
    lines += ["Raises `ProgramError` where dims or dtypes do not fit."]
    return "\n\n".join(filter(None, lines))


def brackets_of(opdef: OpDef) -> str:
    """The brackets of a call in Python, as `[old >> new]`; empty where it has none."""
    shown = {"none": "", "out": "", "dim": "[dim]", "rows": "[dim]"}
    shown |= {"arrow": "[old >> new]", "join": "[old >> new]"}
    shown |= {"filter": "[dim.by(window) >> new]", "slide": "[dim.by(size) >> new]"}
    return shown.get(opdef.surface.items, "[dims]")


# --- the stub file -------------------------------------------------------------------------------


HEAD = """\
# Types of the operators for type checkers, generated from the registry (signatures.py):
# MESHDSL_UPDATE_GOLDEN=1 pytest tests/api/test_operators.py
from collections.abc import Sequence
from typing import Any, Protocol

from meshdsl.api.dims import Arrow, By, Dim, DType
from meshdsl.api.tensor import Operand, Tensor
from meshdsl.api.tracer import Form

_Item = Dim | By | Arrow
_Dims = _Item | tuple[_Item, ...]

class _Initialiser(Protocol):
    def __call__(self, *numbers: float) -> Form: ...

class _Optimizer(Protocol):
    def __call__(self, *args: float | str | Form, **options: float | str | Form) -> Form: ...
"""


def stub_text() -> str:
    """The text of `operators.pyi`."""
    from meshdsl.named.prelude import library

    blocks = [_function(n) if n in library() else _class(n) for n in names()]
    lines = [f"{name}: _{_camel(name)}" for name in names()]
    lines += [f"{n}: _Initialiser" for n in sorted(INITS) if n not in load_all()]
    lines += [f"{n}: _Optimizer" for n in sorted(RATES)]
    exported = sorted({line.partition(":")[0] for line in lines})
    listed = "\n".join(f'    "{n}",' for n in exported)
    return f"{HEAD}\n{''.join(blocks)}\n" + "\n".join(lines) + f"\n\n__all__ = [\n{listed}\n]\n"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _class(name: str) -> str:
    opdef = load_all()[name]
    head = f"class _{_camel(name)}(Protocol):\n"
    call = f"def __call__({_typed(opdef)}) -> {_result(opdef)}: ..."
    kind = opdef.surface.items
    dims = {"dim": "Dim", "rows": "Dim", "arrow": "Arrow", "join": "Dim | Arrow"}.get(kind, "_Dims")
    dims = "By | tuple[By, ...]" if kind in ("filter", "slide") else dims
    if kind in ("none", "out"):
        return f"{head}    {call}\n\n"
    if opdef.surface.arity[1] == 0 and not opdef.surface.options:
        return f"{head}    def __getitem__(self, dims: {dims}, /) -> {_result(opdef)}: ...\n\n"
    applied = f"class _{_camel(name)}Applied(Protocol):\n    {call}\n\n"
    get = f"def __getitem__(self, dims: {dims}, /) -> _{_camel(name)}Applied: ..."
    stub = f"{applied}{head}    {get}\n"
    if kind == "dims?":
        stub += f"    {call}\n"
    if name in INITS:
        stub += "    def __call__(self, *numbers: float) -> Form: ...\n"
    return stub + "\n"


def _function(name: str) -> str:
    """The class of a function of the library."""
    from meshdsl.named.prelude import library

    function = library()[name]
    params = [
        f"{p.name.text}: Operand{' = ...' * (p.default is not None)}" for p in function.params
    ]
    (count,) = {len(s.values) for s in function.body if isinstance(s, ast.Return)}
    call = f"def __call__({', '.join(['self', *params])}) -> {_tensors(count)}: ..."
    head = f"class _{_camel(name)}(Protocol):\n"
    if not function.dims:
        return f"{head}    {call}\n\n"
    applied = f"class _{_camel(name)}Applied(Protocol):\n    {call}\n\n"
    get = f"def __getitem__(self, dims: _Dims, /) -> _{_camel(name)}Applied: ..."
    return f"{applied}{head}    {get}\n\n"


def _typed(opdef: OpDef) -> str:
    """The parameters of the call with their type annotations."""
    parts = ["self"]
    positional = keyword = False
    for p in signature_of(opdef.name).parameters.values():
        if positional and p.kind is not POSITIONAL:
            parts.append("/")
        positional = p.kind is POSITIONAL
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not keyword and "*tensors" not in parts[-1]:
            parts.append("*")
        keyword = keyword or p.kind is inspect.Parameter.KEYWORD_ONLY
        parts.append(_typed_one(p))
    return ", ".join([*parts, "/"] if positional else parts)


def _typed_one(p: inspect.Parameter) -> str:
    if p.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{p.name}: Operand"
    default = "" if p.default is inspect.Parameter.empty else " = ..."
    if p.kind is POSITIONAL:
        return f"{p.name}: Operand{default}"
    return f"{p.name}: {_option_type(p.name, p.default)}{default}"


def _option_type(name: str, default: Any) -> str:
    if name == "out":
        return "Sequence[Dim]" if default is inspect.Parameter.empty else "Sequence[Dim] | None"
    if name == "seed":
        return "Operand | None"
    if name == "dtype" or isinstance(default, DType):
        return "DType | str"
    return "str | Any" if isinstance(default, str) else "float | Any"


def _result(opdef: OpDef) -> str:
    """The return annotation: `Tensor`, or a tuple with one for each result."""
    sample = opdef.samples[0]
    return _tensors(len(opdef.infer(sample.ins, dict(sample.attrs))))


def _tensors(count: int) -> str:
    return "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
