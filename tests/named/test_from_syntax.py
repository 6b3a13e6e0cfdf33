"""Inlining, loops, parameters, contraction of products: what the named program looks like."""

from __future__ import annotations

import pytest

from meshdsl.ir.program import loops
from meshdsl.named.ir import NamedLoop, walk
from tests.compiling import named

HEAD = "dim a = 4, b = 6, c = 8, n = 3, m = 5\n"


def ops(text: str) -> list[str]:
    """The operators of a program, those inside loops once."""
    return [op.name for op in walk(named(text).body)]


def test_each_call_owns_its_parameters():
    program = named(
        HEAD + "def f(x[a, b]) -> [a, b] {\n param w[b]\n return x * w\n}\n"
        "def g(x[a, b]) -> [a, b] {\n return f(f(x))\n}\n"
        "program p(x[a, b]) {\n y = g(f(x))\n return y\n}"
    )
    assert [p.value.name for p in program.params] == ["f.w", "g.f.w", "g.f_2.w"]


def test_a_repeat_stays_one_loop_and_stacks_parameters():
    program = named(
        HEAD + "program p(x[a, b]) {\n repeat n {\n  param w[b]\n  x2 = x * w\n  x = x2\n"
        " }\n return x\n}"
    )
    (loop,) = loops(program.body, NamedLoop)
    assert program.params[0].value.type.names == ("n", "b")
    assert [s.inside.type.names for s in loop.stacked] == [("b",)]
    assert len(loop.carries) == 1


def test_nested_loops_stack_outer_first():
    program = named(
        HEAD + "program p(x[a]) {\n repeat n {\n  repeat m {\n   param w[a]\n   x = x + w\n"
        "  }\n }\n return x\n}"
    )
    assert program.params[0].value.type.names == ("n", "m", "a")


def test_a_tensor_with_the_loops_dim_is_read_at_the_index():
    program = named(HEAD + "program p(x[a], s[n, a]) {\n repeat n {\n  x = x * s\n }\n return x\n}")
    (loop,) = loops(program.body, NamedLoop)
    assert [(s.outer.label, s.inside.type.names) for s in loop.stacked] == [("s", ("a",))]


def test_more_layers_are_not_a_longer_program():
    text = "program p(x[a]) {\n repeat n {\n  param w[a]\n  x = relu(x * w)\n }\n return x\n}"
    lengths = [len(ops(f"dim a = 4, n = {n}\n{text}")) for n in (2, 96)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sum[b](x * w)", ["einsum"]),
        ("sum[b](x * w * x)", ["einsum"]),
        ("sum[b](2 * x * w)", ["constant", "einsum", "mul"]),
        ("sum[b](x)", ["sum"]),
        ("sum[b](x * 2)", ["constant", "mul", "sum"]),
        ("mean[b](x * w)", ["mul", "mean"]),
        ("x ^ 2", ["square"]),
        ("x * 1", ["identity"]),
        ("x * (2 + 1) / (6 - 2)", ["constant", "mul", "constant", "div"]),
    ],
)
def test_what_an_expression_becomes(expression, expected):
    assert ops(f"{HEAD}program p(x[a, b], w[b]) {{\n y = {expression}\n return y\n}}") == expected


def test_a_named_product_is_kept():
    text = HEAD + "program p(x[a, b], w[b]) {\n z = x * w\n y = sum[b](z)\n return y\n}"
    assert ops(text) == ["mul", "sum"]


def test_what_nobody_reads_is_dropped():
    text = (
        HEAD
        + "program p(x[a]) {\n u = exp(x)\n repeat n {\n  v = exp(x)\n }\n y = -x\n return y\n}"
    )
    assert ops(text) == ["neg"]


def test_fan_in_is_what_the_first_use_sums():
    program = named(
        HEAD + "program p(x[a, b]) {\n param w[b, c]\n param g[b]\n"
        " y = einsum(x, w -> [a, c])\n z = x * g\n return y, z\n}"
    )
    assert [(p.fan_in, p.fan_out) for p in program.params] == [(6, 8), (1, 6)]


def test_new_dims_of_a_broadcast_come_first():
    text = "program p(x[a, b]) {\n y = broadcast[n](x)\n z = broadcast[b, n](x)\n return y, z\n}"
    found = [o.value.type.names for o in named(f"{HEAD}{text}").outputs]
    assert found == [("n", "a", "b"), ("b", "n", "a")]


def test_declared_order_transposes():
    program = named(HEAD + "program p(x[a, b]) {\n y[b, a] = x\n return y\n}")
    assert program.outputs[0].value.type.names == ("b", "a")


def test_dtype_replaces_every_float():
    program = named(
        HEAD + "program p(x[a], i[a]: i32) {\n y = x + cast(i, f32) * 2.5\n return y\n}",
        dtype="f64",
    )
    kinds = {v.type.dtype.name for op in walk(program.body) for v in op.outs}
    assert kinds == {"f64"}
