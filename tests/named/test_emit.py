"""`Emit`: what it makes has one place and one reason, and numbers are folded."""

from __future__ import annotations

from typing import Any

import pytest

from meshdsl.diagnostics import Diagnostics, Source, Span
from meshdsl.ir.program import Origin
from meshdsl.ir.types import F32, I32, Dim, TensorType
from meshdsl.named.builder import Builder
from meshdsl.named.emit import Emit, emit_at
from meshdsl.named.ir import NamedOp, Value

SPAN = Span(Source("p.mdsl", "y = x\n"), 0, 1)
M = Dim("m", 4)


def value(builder: Builder, dtype: Any = F32) -> Value:
    made = Value(TensorType((M,), dtype), SPAN, path=("f_2",), functions=("f",))
    builder.place(made, 0)
    return made


def ops(builder: Builder) -> list[NamedOp]:
    return [node for node in builder.frames[0].body if isinstance(node, NamedOp)]


def test_all_that_it_makes_has_its_place_and_reason() -> None:
    builder = Builder(Diagnostics())
    x = value(builder)
    origin = Origin(x)
    emit = emit_at(builder, x, {"role": "grad", "rules_from": x}, origin, "backward")
    y = emit("mul", x, 2.0)
    number, product = ops(builder)
    assert {(op.span, op.phase, op.origin) for op in (number, product)} == {
        (SPAN, "backward", origin)
    }
    assert (y.path, y.functions, y.role, y.rules_from) == (("f_2",), ("f",), "grad", x)
    assert (number.out.role, number.out.rules_from) == ("activation", None)
    assert builder.phase == "forward"


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("add", (1.0, 2.0), 3.0),
        ("div", (1.0, 4.0), 0.25),
        ("div", (1.0, 0.0), None),
        ("neg", (2.0,), -2.0),
        ("square", (3.0,), 9.0),
        ("maximum", (1.0, 2.0), None),
    ],
)
def test_numbers_are_folded(name: str, numbers: tuple[float, ...], expected: float | None) -> None:
    builder = Builder(Diagnostics())
    emit = Emit(builder, SPAN, None, numbers={})
    result = emit(name, *(emit.number(n, F32) for n in numbers))
    assert emit.numbers is not None
    assert emit.numbers.get(result) == expected
    assert ops(builder)[-1].name == (name if expected is None else "constant")


def test_what_changes_nothing_is_not_made() -> None:
    builder = Builder(Diagnostics())
    x, folding = value(builder), Emit(builder, SPAN, None, numbers={})
    assert folding("mul", x, 1.0) is folding("div", x, 1.0) is folding.cast(x, F32) is x
    assert folding.full(x, (M,)) is x
    assert not ops(builder)
    Emit(builder, SPAN, None)("mul", x, 1.0)
    assert [op.name for op in ops(builder)] == ["constant", "mul"]


def test_a_number_takes_the_dtype_of_the_first_float_or_tensor() -> None:
    builder = Builder(Diagnostics())
    emit = Emit(builder, SPAN, None)
    emit("where", emit("gt", value(builder), 0.0), value(builder), -1e9)
    emit("add", value(builder, I32), 3)
    constants = [op.out.type.dtype for op in ops(builder) if op.name == "constant"]
    assert constants == [F32, F32, I32]
