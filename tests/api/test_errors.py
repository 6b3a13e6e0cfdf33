# mypy: disable-error-code="type-arg,valid-type,misc,operator,call-overload,index"
# mypy: disable-error-code="call-arg,arg-type,list-item"
"""Mistakes in Python: the code, the very expression that is underlined, and a way out."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.errors import in_python
from meshdsl.api.programs import Program
from meshdsl.codes import CODES
from meshdsl.diagnostics import Diagnostic
from meshdsl.syntax.edits import apply

batch, io, two, three, layers = md.dims(batch=4, io=6, two=2, three=3, layers=2)
other_batch = md.dim("batch", 8)
T = md.Tensor
kept: list[Any] = []

Case = tuple[str, str, Callable[..., Any]]
CASES: list[Case] = []


def wrong(code: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that is wrong as a program: the code, and what is underlined."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((code, text, function))
        return function

    return keep


@md.program
def keeper(x: T[batch, io]):
    kept.append(x)
    return x


@wrong("MD0810", "md.iota[other_batch]")
def a_dim_with_two_sizes(x: T[batch, io]):
    return x + md.cast(md.iota[other_batch], md.f32)


@wrong("MD0811", "kept[0]")
def a_tensor_of_another_program(x: T[batch, io]):
    return x + kept[0]


@wrong("MD0812", "x > 0.0")
def an_if(x: T[batch, io]):
    return x if x > 0.0 else -x


@wrong("MD0812", "0.0 < x < 1.0")
def a_chained_comparison(x: T[batch, io]):
    return 0.0 < x < 1.0


@wrong("MD0814", "len(x)")
def a_length(x: T[batch, io]):
    return x * len(x)


@wrong("MD0125", "np.exp(x)")
def numpy_on_a_tensor(x: T[batch, io]):
    return np.exp(x)


@wrong("MD0814", "np.asarray(x)")
def a_tensor_as_an_array(x: T[batch, io]):
    return np.asarray(x)


@wrong("MD0814", "float(x)")
def a_tensor_as_a_number(x: T[batch, io]):
    return x * float(x)


@wrong("MD0815", "np.ones(6)")
def an_array_as_an_operand(x: T[batch, io]):
    return x + np.ones(6)


@wrong("MD0815", 'md.sum["io"](x)')
def a_dim_in_quotes(x: T[batch, io]):
    return md.sum["io"](x)


@wrong("MD0816", "md.repeat(layers, lambda x, y: x, x, x)")
def a_body_that_returns_too_little(x: T[batch, io]):
    x = md.repeat(layers, lambda x, y: x, x, x)
    return x


@wrong("MD0122", "md.repeat(layers, lambda: md.iota[layers])")
def a_stack_over_a_dim_that_is_there(x: T[batch, io]):
    return x + md.repeat(layers, lambda: md.iota[layers])


@wrong("MD0817", "md.param([io])")
def a_parameter_without_a_name(x: T[batch, io]):
    return x * md.param([io])


@wrong("MD0817", '"a b"')
def a_result_with_a_space(x: T[batch, io]):
    return {"y": x, "a b": md.relu(x)}


@wrong("MD0817", '"two\\nlines"')
def a_result_of_two_lines(x: T[batch, io]):
    return {"two\nlines": x}


@wrong("MD0817", "3")
def a_result_with_a_number(x: T[batch, io]):
    return {3: x}


@wrong("MD0817", '"return"')
def a_result_with_a_word_of_the_language(x: T[batch, io]):
    return {"return": x}


@wrong("MD0109", '"params"')
def a_result_with_a_word_of_layouts(x: T[batch, io]):
    return {"params": x}


@wrong("MD0817", 'dict([("größe", x)])')
def a_dict_that_is_computed(x: T[batch, io]):
    return dict([("größe", x)])


@wrong("MD0254", "1.0")
def a_number_in_a_dict(x: T[batch, io]):
    return {"y": 1.0}


@wrong("MD0819", "x")
def an_input_without_dims(x):
    return x


@wrong("MD0823", 'x: "batch io"')
def dims_in_a_string(x: "batch io"):  # noqa: F722
    return x


@wrong("MD0252", "md.einsum(x, x)")
def a_missing_output(x: T[batch, io]):
    return md.einsum(x, x)


@wrong("MD0207", "md.einsum(x, x, out=[batch, two])")
def an_output_dim_that_is_missing(x: T[batch, io]):
    return md.einsum(x, x, out=[batch, two])


@wrong("MD0112", "inside[0]")
def a_tensor_from_inside_a_loop(x: T[batch, io]):
    inside = []

    def body(x):
        inside.append(x * 2.0)
        return inside[0]

    x = md.repeat(layers, body, x)
    return x + inside[0]


@wrong("MD0256", "md.sum[io](x)")
def a_carry_of_another_type(x: T[batch, io]):
    x = md.repeat(layers, lambda x: md.sum[io](x), x)
    return x


@wrong("MD0209", "x[io >> two]")
def a_rename_to_another_size(x: T[batch, io]):
    return x[io >> two]


@wrong("MD0252", "x.rename(two, three)")
def a_view_of_a_dim_that_is_missing(x: T[batch, io]):
    return x.rename(two, three)


@wrong("MD0201", "x + md.iota[io]")
def two_dtypes(x: T[batch, io]):
    return x + md.iota[io]


@wrong("MD0250", '[batch @ "x", two]')
def other_dims_than_declared(x: T[batch, io]):
    h = md.name("h", x * 2.0, [batch @ "x", two])
    return h


@wrong("MD0254", "3.0")
def a_number_returned(x: T[batch, io]):
    return 3.0


@wrong("MD0113", "nothing_returned")
def nothing_returned(x: T[batch, io]):
    x * 2.0


@wrong("MD0260", "0.02")
def an_initialiser_that_is_a_number(x: T[batch, io]):
    w = md.param([io], init=0.02)
    return x * w


@wrong("MD0104", 'md.param("w", [io])')
def a_parameter_twice(x: T[batch, io]):
    w = md.param([io])
    return x * w * md.param("w", [io])


@wrong("MD0290", "x")
def a_gradient_of_no_number(x: T[batch, io]):
    return md.grad(x, x)


@wrong("MD0815", "3e-4")
def an_optimizer_that_is_a_number(x: T[batch, io]):
    loss = md.mean(x)
    md.minimize(loss, 3e-4)
    return loss


@wrong("MD0277", '"q": "frozen"')
def a_group_of_no_parameter(x: T[batch, io]):
    w = md.param([io])
    md.minimize(md.mean(x * w), md.sgd(lr=0.1), groups={"q": "frozen"})
    return x


@wrong("MD0272", '"w": {"clip": 1.0}')
def a_group_with_an_option_of_all(x: T[batch, io]):
    w = md.param([io])
    md.minimize(md.mean(x * w), md.sgd(lr=0.1), {"w": {"clip": 1.0}})
    return x


@wrong("MD0815", '{True: "frozen"}')
def a_group_of_no_name(x: T[batch, io]):
    w = md.param([io])
    md.minimize(md.mean(x * w), md.sgd(lr=0.1), {True: "frozen"})
    return x


@wrong("MD0815", '"w": {3: 1.0}')
def an_option_of_no_name(x: T[batch, io]):
    w = md.param([io])
    md.minimize(md.mean(x * w), md.sgd(lr=0.1), {"w": {3: 1.0}})
    return x


@wrong("MD0815", "3")
def groups_that_are_a_number(x: T[batch, io]):
    w = md.param([io])
    md.minimize(md.mean(x * w), md.sgd(lr=0.1), 3)
    return x


@wrong("MD0137", "x")
def an_input_assigned(x: T[batch, io]):
    md.update(x, x + 1)
    return x


@wrong("MD0137", "1")
def a_number_assigned(x: T[batch, io]):
    md.update(1, x)
    return x


@wrong("MD0137", "w")
def a_parameter_of_the_caller_assigned(x: T[batch, io]):
    w = md.param([io])

    @md.function
    def f(x: T[batch, io], w: T[io]) -> T[batch, io]:
        md.update(w, w * 2)
        return x

    return f(x, w)


@wrong("MD0137", "w")
def a_parameter_of_another_function_assigned(x: T[batch, io]):
    w = md.param([io])

    @md.function
    def f(x: T[batch, io]) -> T[batch, io]:
        md.update(w, w * 2)
        return x * w

    return f(x)


@wrong("MD0140", "x")
def a_state_of_another_type(x: T[batch, io]):
    w = md.param([io])
    md.update(w, x)
    return x


def told(call: Callable[[], object]) -> md.ProgramError:
    """The error that a call ends with, which has a code, a place in this file, and a way out."""
    with pytest.raises(md.ProgramError) as caught:
        call()
    (first, *_) = caught.value.diagnostics
    assert first.span is not None
    assert first.span.file == "test_errors.py"
    assert first.help
    shown = str(caught.value)
    assert f"error[{first.code}]" in shown
    assert f"--> test_errors.py:{first.span.line}:" in shown
    return caught.value


@pytest.mark.parametrize(
    ("code", "text", "function"), CASES, ids=lambda c: getattr(c, "__name__", "")
)
def test_a_wrong_program(code: str, text: str, function: Callable[..., Any]) -> None:
    keeper.retrace()
    error = told(lambda: md.program(function).named())
    assert [d.code for d in error.diagnostics] == [code]
    assert error.diagnostics[0].span is not None
    assert error.diagnostics[0].span.text == text
    for fix in error.diagnostics[0].fixes:
        assert "md." in fix.title  # Python's, and not the language's
        ast.parse(apply(error.diagnostics[0].span.source.text, fix.edits))


# --- calls outside of programs -----------------------------------------------------------------


@md.program
def sized(x: T[batch, io]):
    return x / int(io)


PLAN = keeper.compile({"d": 2}, {"batch": "d"})
X = np.ones((4, 6), np.float32)

CALLS: dict[str, tuple[str, str, Callable[[], object]]] = {
    "after its trace": ("MD0813", "kept[0] + 1", lambda: kept[0] + 1),
    "outside": ("MD0813", "md.iota[batch]", lambda: md.iota[batch]),
    "a size of 0": ("MD0105", "0", lambda: md.dims(empty=0)),
    "a size of 1.5": ("MD0105", "1.5", lambda: md.dims(half=1.5)),
    "a huge size": ("MD0106", "2**31", lambda: md.dims(huge=2**31)),
    "a reserved word": ("MD0817", 'md.dim("param", 3)', lambda: md.dim("param", 3)),
    "no size": ("MD0105", 'md.dim("d")', lambda: md.dim("d")),
    "an axis": ("MD0304", '"batch": "e"', lambda: keeper.compile({"d": 2}, {"batch": "e"})),
    "an axis, by name": (
        "MD0304",
        '"batch:e"',
        lambda: keeper.compile(layout="batch:e", mesh={"d": 2}),
    ),
    "a dim": (
        "MD0305",
        '"bach": "d"',
        lambda: keeper.compile({"d": 2}, {"bach": "d"}, strict=True),
    ),
    "no rule": ("MD0818", "7", lambda: keeper.compile({"d": 2}, 7)),
    "no rule, in a list": ("MD0818", "[7]", lambda: keeper.compile({"d": 2}, [7])),
    "no rule, by name": ("MD0818", "3", lambda: md.layout(batch=3)),
    "a broken rule": (
        "MD0001",
        '"batch -> d io"',
        lambda: keeper.compile({"d": 2}, "batch -> d io"),
    ),
    "a layout that is none": ("MD0108", '"mine"', lambda: keeper.compile({"d": 2}, "mine")),
    "a mesh that is none": ("MD0108", '"mine"', lambda: keeper.compile("mine")),
    "no mesh": ("MD0815", "4", lambda: keeper.compile(4)),
    "no model": ("MD0553", "PLAN.load_weights(5)", lambda: PLAN.load_weights(5)),
    "no place of a model": ("MD0554", "PLAN.save_weights(5)", lambda: PLAN.save_weights(5)),
    "an axis of 0": ("MD0105", '"d": 0', lambda: keeper.compile({"d": 0})),
    "not divisible": (
        "MD0310",
        '"io": "d"',
        lambda: keeper.compile({"d": 100_000}, {"io": "d"}),
    ),
    "a policy": ("MD0108", '"late"', lambda: keeper.compile({"d": 2}, reduce="late")),
    "a float type": ("MD0602", '"f31"', lambda: keeper.compile({"d": 2}, dtype="f31")),
    "a lost size as text": ("MD0821", "int(io)", lambda: sized.to_mdsl()),
    "a program": ("MD0822", "keeper(X)", lambda: keeper(X)),
    "missing": ("MD0820", "PLAN()", lambda: PLAN()),
    "unknown": ("MD0820", "X", lambda: PLAN(y=X)),
    "too many": ("MD0820", "PLAN(X, X)", lambda: PLAN(X, X)),
    "twice": ("MD0820", "X", lambda: PLAN(X, x=X)),
    "a shape": ("MD0504", "PLAN(X[:2])", lambda: PLAN(X[:2])),
    "a kind": ("MD0504", "PLAN(X > 0)", lambda: PLAN(X > 0)),
    "a parameter": ("MD0820", 'PLAN(X, params={"w": X})', lambda: PLAN(X, params={"w": X})),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call(case: str) -> None:
    code, text, call = CALLS[case]
    error = told(call)
    assert error.diagnostics[0].code == code
    assert error.diagnostics[0].span is not None
    assert error.diagnostics[0].span.text == text


def test_every_code_of_python_is_reported_by_a_case() -> None:
    tested = {code for code, _, _ in CASES} | {code for code, _, _ in CALLS.values()}
    assert {c for c in CODES if "MD0810" <= c < "MD09"} <= tested


def test_a_mistake_inside_a_function_names_the_call() -> None:
    @md.function
    def inner(x: T[batch, io]):
        return x + md.iota[io]

    @md.program
    def outer(x: T[batch, io]):
        y = inner(x)
        return y

    error = told(outer.named)
    (related,) = [r for r in error.diagnostics[0].related if "in this call" in r.message]
    assert related.span.text == "inner(x)"


def test_an_argument_of_other_dims_is_told_with_both_places() -> None:
    @md.function
    def inner(x: T[batch, io]):
        return x

    @md.program
    def outer(x: T[batch, io]):
        y = inner(md.sum[io](x))
        return y

    error = told(outer.named)
    (first,) = error.diagnostics
    assert (first.code, first.span and first.span.text) == ("MD0250", "md.sum[io](x)")
    assert first.related[0].span.text == "x: T[batch, io]"


def test_endless_recursion_is_told() -> None:
    @md.function
    def again(x):
        return again(x)

    @md.program
    def outer(x: T[batch, io]):
        return again(x)

    assert told(outer.named).diagnostics[0].code == "MD0110"


def test_warnings_are_warnings_of_python_at_the_call() -> None:
    with pytest.warns(md.ProgramWarning, match="MD0306") as caught:
        plan = keeper.compile({"d": 2}, {"nobody: batch": "d"})
    assert caught[0].filename == __file__
    assert [d.code for d in plan.warnings] == ["MD0306"]


def test_a_trace_that_failed_leaves_no_trace() -> None:
    def broken(x: T[batch, io]):
        raise KeyError("x")

    with pytest.raises(KeyError):
        md.program(broken).named()
    assert told(lambda: md.iota[batch]).diagnostics[0].code == "MD0813"
    assert isinstance(keeper, Program)


def test_an_attribute_that_is_misspelt_suggests_another() -> None:
    with pytest.raises(AttributeError, match="did you mean `softmax`"):
        getattr(md, "sofmax")  # noqa: B009


IN_TEXT = """dim n = 4, k = 3
program p(x[n, k], i[k]: i32) {
  y = scatter_add[n = i](x)
  return scatter_add[n = i](y[n -> k])
}
"""


def test_a_change_is_written_in_the_form_of_the_file_it_is_for(tmp_path: Path) -> None:
    """Of a text also in Python: `->` where it points into a `.mdsl` file, `>>` elsewhere."""
    path = tmp_path / "p.mdsl"
    path.write_text(IN_TEXT)
    with pytest.raises(md.ProgramError) as told:
        md.check(path)
    with pytest.raises(md.ProgramError) as loaded:
        md.load(path).compile()
    for error in (told, loaded):
        (first, *_) = error.value.diagnostics
        assert (first.code, first.help) == ("MD0205", "rename it first: `x[n -> other]`")
    n, k = md.dims(n=4, k=3)

    @md.program
    def p(x: md.Tensor[n, k], i: md.i32[k]) -> md.Tensor:
        return md.scatter_add[n](x, i)

    with pytest.raises(md.ProgramError) as raised:
        p.compile()
    (first, *_) = raised.value.diagnostics
    assert (first.code, first.help) == ("MD0205", "rename it first: `x[n >> other]`")
    stated = in_python(Diagnostic("MD0204", "m", help="write `-> [n, k]` or `f(x, y -> [n])`"))
    assert stated.help == "write `out=[n, k]` or `f(x, y, out=[n])`"
