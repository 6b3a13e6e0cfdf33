# mypy: disable-error-code="type-arg,valid-type,index,misc"
"""Names of tensors: of the variable they are assigned to, where the source can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest

import meshdsl as md
from meshdsl.named.ir import NamedOp
from meshdsl.named.printer import print_program

batch, io, heads, key, layers = md.dims(batch=4, io=6, heads=2, key=3, layers=2)
T = md.Tensor


def labels(function: Callable[..., Any]) -> list[str]:
    """The names of all results of a program, in order; `_` where there is none."""
    made = md.program(function).named()
    return [v.name or "_" for n in made.body if isinstance(n, NamedOp) for v in n.outs]


def plain(x: T[batch, io]):
    h = md.relu(x)
    return h + 1.0


def several_in_one_line(x: T[batch, io]):
    a, b = md.relu(x), md.exp(x)
    [c, d] = [a + b, a * b]
    return c, d


def walrus_and_annotation(x: T[batch, io]):
    a: md.Tensor = md.relu(b := md.exp(x))
    return a, b


def augmented(x: T[batch, io]):
    y = md.relu(x)
    y += x
    y *= 2.0
    return y


def conditional(x: T[batch, io]):
    y = md.relu(x) if len(x.dims) == 2 else md.exp(x)
    return y


def a_method_over_lines(x: T[batch, io]):
    y = (
        md.relu(x)
        .split(io, (heads, key))
        .merge((heads, key), io)
    )  # fmt: skip
    return y


def no_names(x: T[batch, io]):
    found = {}
    found["a"] = md.relu(x)
    found["b"], *_ = [md.exp(x)]
    return found["a"] + found["b"]


def names_the_language_lacks(x: T[batch, io]):
    state = md.relu(x)
    on = md.exp(state)
    größe = md.abs(on)
    return größe


def given_by_hand(x: T[batch, io]):
    kept = [md.relu(x)]
    md.name("h", kept[0])
    y = kept[0] + x
    return y


def named_twice(x: T[batch, io]):
    h = md.relu(x)
    g = md.name("f", h)
    return g


CASES: dict[Callable[..., Any], list[str]] = {
    plain: ["h", "_", "_"],
    several_in_one_line: ["a", "b", "c", "d"],
    walrus_and_annotation: ["b", "a"],
    augmented: ["y", "y", "_", "y"],
    conditional: ["y"],
    a_method_over_lines: ["_", "_", "y"],
    no_names: ["_", "_", "_"],
    names_the_language_lacks: ["_", "_", "_"],
    given_by_hand: ["h", "y"],
    named_twice: ["h", "f"],
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_names_of(function: Callable[..., Any]) -> None:
    found = [n for n in labels(function)]
    assert found == CASES[function]


def test_without_source_tensors_have_no_names_and_errors_a_line() -> None:
    text = "def f(x: T[batch, io]):\n    h = md.relu(x)\n    return h + md.iota[io]\n"
    scope: dict[str, Any] = {"md": md, "T": T, "batch": batch, "io": io}
    exec(compile(text, "<prompt>", "exec"), scope)
    with pytest.raises(md.ProgramError, match="<prompt>:3") as caught:
        md.program(scope["f"]).named()
    assert caught.value.diagnostics[0].code == "MD0201"


def test_outputs_have_the_names_that_stand_behind_return() -> None:
    def built(x: T[batch, io]):
        y = md.relu(x)
        z = y
        return z, y * 2.0, x

    assert md.program(built).outputs == ("z", "out1", "x")

    def by_hand(x: T[batch, io]):
        return {"first": x * 2.0, "second": x}

    assert md.program(by_hand).outputs == ("first", "second")

    def one_of_two(x: T[batch, io]):
        y = md.relu(x)
        if x.dtype == "f32":
            return y
        return x

    assert md.program(one_of_two).outputs == ("y",)


def test_functions_and_their_parameters_have_paths() -> None:
    @md.function
    def layer(x):
        w = md.param([io])
        h = x * w
        return h

    @md.function(name="outer")
    def both(x):
        x = layer(x)
        x = layer(x)
        return x

    @md.program
    def built(x: T[batch, io]):
        y = both(x)
        z = layer(y)
        return z

    assert list(built.params) == ["outer.layer.w", "outer.layer_2.w", "layer.w"]
    text = print_program(built.named())
    assert "outer.layer_2.h = mul" in text


def test_a_method_can_be_a_function() -> None:
    class Model:
        scale = 2.0

        @md.function
        def layer(self, x: T[batch, io]) -> T[batch, io]:
            w = md.param([io])
            return x * w * self.scale

    model = Model()

    @md.program
    def built(x: T[batch, io]):
        y = model.layer(x)
        return y

    assert list(built.params) == ["layer.w"]


def test_variables_that_the_language_could_not_write_name_no_output() -> None:
    @md.program
    def built(x: Annotated[md.Tensor, batch, io]):
        größe = x * 2.0
        params = x + 1.0
        return größe, params, x

    assert built.outputs == ("out0", "out1", "x")


def test_dims_pins_and_types_of_inputs() -> None:
    @md.program
    def built(
        x: Annotated[md.Tensor, md.bf16[batch @ "data", io]],
        y: Annotated[md.Tensor, batch, io],
        z: Annotated[md.Tensor, md.i32[batch @ ("a", "b")]],
        b: md.bool[batch @ None],
    ):
        return x, y, z, b

    assert list(built.inputs.values()) == [
        "bf16[batch, io]",
        "f32[batch, io]",
        "i32[batch]",
        "bool[batch]",
    ]
    pins = [[(p.dim, p.axes) for p in v.pins] for v in built.named().inputs]
    assert pins == [[("batch", ("data",))], [], [("batch", ("a", "b"))], [("batch", ())]]


def test_name_checks_transposes_and_pins() -> None:
    @md.program
    def built(x: T[batch, io]):
        h = md.name("h", md.relu(x), [io, batch @ "d"])
        return h

    (*_, last) = built.named().body
    assert isinstance(last, NamedOp)
    assert last.out.type.names == ("io", "batch")
    assert [(p.dim, p.axes) for p in last.out.pins] == [("batch", ("d",))]


def test_meshes_and_layouts_have_the_name_of_their_variable() -> None:
    square = md.mesh(rows=2, cols=2)
    rows = md.layout(batch="rows")
    wide = md.layout(io="cols", extends=rows)
    assert (square.name, rows.name, wide.name) == ("square", "rows", "wide")
    assert repr(square) == "mesh square = { rows: 2, cols: 2 }"
    assert repr(wide) == "layout wide extends rows { io -> cols }"
