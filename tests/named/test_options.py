"""Every option of every operator can be written by its name, whatever words are reserved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshdsl.diagnostics import Source
from meshdsl.ir.types import Dim, DType, TensorType
from meshdsl.named.ir import NamedOp
from meshdsl.named.optimizers import OPTIMIZERS, SCHEDULES
from meshdsl.ops.opdef import OpDef, Sample, load_all
from meshdsl.syntax import ast
from meshdsl.syntax.format import format_source
from meshdsl.syntax.parse import parse
from meshdsl.syntax.tokens import OPTIONS, RESERVED
from tests.compiling import named
from tests.together import together

WITH_OPTIONS = [n for n, o in load_all().items() if o.surface.options and o.surface.items != "view"]


def dims_in(value: Any) -> list[Dim]:
    if isinstance(value, TensorType):
        return list(value.dims)
    if isinstance(value, tuple | list):
        return [d for item in value for d in dims_in(item)]
    return [value] if isinstance(value, Dim) else []


def bracket(opdef: OpDef, attrs: dict[str, Any]) -> str:
    match opdef.surface.items:
        case "arrow":
            return f"[{attrs['source'][0]} -> {attrs['target'][0]}]"
        case "dim":
            return f"[{attrs['dim']}]"
        case "filter" | "slide":
            windows = attrs.get("window") or attrs["size"]
            parts = zip(attrs["source"], windows, attrs["target"], strict=True)
            return f"[{', '.join(f'{s} by {w} -> {t}' for s, w, t in parts)}]"
        case "maker" | "dims" | "dims?":
            return f"[{', '.join(map(str, attrs['dims']))}]"
    assert opdef.surface.items in ("none", "out")
    return ""


def call(opdef: OpDef, sample: Sample, by_name: bool) -> str:
    """A program that calls the operator with all its options."""
    attrs = dict(sample.attrs)
    dims = {d.name: d.size for d in dims_in([*sample.ins, *attrs.values()])}
    inputs = [f"x{i}[{', '.join(t.names)}]: {t.dtype}" for i, t in enumerate(sample.ins)]
    known = [(n, attrs[n]) for n, _ in opdef.surface.options if n in attrs]  # a seed is a tensor
    options = [(f"{n}=" if by_name else "") + shown(value) for n, value in known]
    arguments = ", ".join([*(f"x{i}" for i in range(len(inputs))), *options])
    if opdef.surface.items in ("filter", "out"):
        arguments += f" -> [{', '.join(d.name for d in attrs['dims'])}]"
    declared = "".join(f"dim {n} = {size}\n" for n, size in dims.items())
    text = f"  return {opdef.name}{bracket(opdef, attrs)}({arguments})\n"
    return f"{declared}program p({', '.join(inputs)}) {{\n{text}}}\n"


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_of_operators(name: str) -> None:
    opdef = load_all()[name]
    for sample in opdef.samples:
        made = []
        if opdef.surface.seeded:  # the indices of loops follow its seed
            sample = replace(sample, ins=sample.ins[: opdef.surface.arity[1]])
        for by_name in (True, False):
            text = call(opdef, sample, by_name)
            assert format_source(Source("t", text)) == text
            (op,) = named(text).body
            assert isinstance(op, NamedOp)
            made.append((op.name, op.attrs))
        assert made[0] == made[1]
        assert set(dict(made[0][1]).items()) >= {
            (n, v) for n, v in sample.attrs if isinstance(v, int | float | str | DType)
        }


@together(
    name=sorted(
        {n for o in load_all().values() for n, _ in o.surface.options}
        | {n for table in (OPTIMIZERS, SCHEDULES) for known in table.values() for n in known}
        | {word.lower() for word in OPTIONS}
    ),
)
def test_options_are_words_of_arguments(name: str) -> None:
    (program,), errors = read(f"program p() {{\n  y = f(x, {name}=1)\n}}\n")
    assert not errors
    assert isinstance(program, ast.ProgramDecl)
    (statement,) = program.body
    assert isinstance(statement, ast.Assign)
    assert isinstance(statement.value, ast.CallExpr)
    assert [k.name.text for k in statement.value.keywords] == [name]


@together(name=sorted(word.lower() for word in RESERVED))
def test_reserved_words_name_nothing_else(name: str) -> None:
    for text in (f"{name} = 1", f"y = f({name})", f"y = f(x[{name} = 0])", f"return {name}"):
        errors = read(f"program p() {{\n  {text}\n}}\n")[1]
        assert errors, text


def read(text: str) -> tuple[tuple[ast.Declaration, ...], tuple[Any, ...]]:
    file, errors = parse(Source("t", text))
    return file.declarations, errors
