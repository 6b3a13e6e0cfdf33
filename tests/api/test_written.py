# mypy: disable-error-code="type-arg,valid-type,misc,operator,call-overload,index,arg-type"
"""Programs of Python that are hard to write down, each for the reason it is called by.

That the tree and its text mean what Python did is proved for each by `conftest.py`.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
from collections.abc import Callable
from functools import reduce
from typing import Annotated, Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.diagnostics import DiagnosticError

a, b, n, m = md.dims(a=4, b=6, n=3, m=5)
a2 = md.dim("a2", like=a)
T = md.Tensor

PROGRAMS: list[Callable[..., Any]] = []
REFUSED: dict[Callable[..., Any], str] = {}


def hard(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program that can be written."""
    PROGRAMS.append(function)
    return function


def refused(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A program that is compiled, and that no text means: what is underlined."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        REFUSED[function] = text
        return function

    return keep


# --- names ---------------------------------------------------------------------------------------


@hard
def an_unnamed_tensor_read_twice(x: T[a]):
    kept = [md.relu(x)]
    return kept[0] + kept[0] * x


@hard
def unnamed_tensors_in_another_order(x: T[a]):
    kept = [md.relu(x), md.exp(x), md.abs(x)]
    y = kept[2] - kept[0]
    return y * kept[1]


@hard
def one_name_for_two_tensors_in_use(x: T[a]):
    kept = []
    for _ in range(3):
        h = md.relu(x)
        kept.append(h)
        x = x + h * 0.5
    return kept[0] * kept[1] * kept[2], x


@hard
def names_that_the_language_has(x: T[a]):
    f32 = md.relu(x)
    iota = md.cast(md.iota[a], md.f32) + f32
    on = md.abs(iota)
    state = md.exp(on) * md.cast(md.iota[a], md.f32)
    return f32, iota, on, state


@hard
def inputs_that_are_called_as_the_language(iota: T[a], f32: md.i32[a]):
    y = iota + md.cast(md.iota[a] + f32, md.f32)
    return y


@hard
def tensors_that_are_called_as_dims(x: T[a, b]):
    a_ = md.name("a", md.relu(x))
    b_ = md.name("b", a_ / md.sqrt(b))
    return a_ * b_ * a


@hard
def a_name_given_late(x: T[a]):
    kept = [md.relu(x)]
    md.name("h", kept[0])
    other = md.name("g", kept[0])
    return kept[0] + other


@hard
def a_number_with_a_name(x: T[a]):
    s = md.name("s", 2.0)
    return x * s


@hard
def a_name_that_a_parameter_takes_later(x: T[a]):
    w = md.relu(x)
    h = md.exp(x)
    first = w
    w = md.param([a])
    v = md.param("h", [a])
    return first * w + h * v


@hard
def dims_in_another_order_and_fixed(x: Annotated[T, a @ "r", b @ ("s", "t")]):
    h = md.name("h", md.relu(x), [b, a @ "r"])
    g = md.name("g", h, [b @ None, a])
    return md.name("y", g, [a, b]), h


@hard
def what_nobody_reads(x: T[a]):
    md.exp(x) * 2.0
    unused = md.relu(x)
    del unused
    y = x + 1.0
    return y


# --- functions -----------------------------------------------------------------------------------


@md.function
def scaled(x, scale=1.0, again=False):
    w = md.param([a])
    y = x * w * scale
    if again:
        y = md.relu(y)
    return y


@hard
def calls_that_differ(x: T[a]):
    y = scaled(x) + scaled(x) - scaled(x, 2.0)
    z = scaled(x, again=True) * scaled(x)
    return y, z


@md.function
def linear(x, i, o):
    w = md.param([i, o])
    return md.sum[i](x * w)


@hard
def calls_on_other_dims(x: T[a, b]):
    y = linear(linear(x, a, n), n, a)
    return y


@hard
def functions_of_functions_on_other_dims(x: T[a, b]):
    @md.function
    def two(y, i):
        h = md.relu(linear(y, i, n))
        h = md.repeat(i, lambda h: h * md.param("v", [n]), h)
        return linear(h, n, i) / md.sqrt(i)

    return two(x, a), two(x, b), linear(md.sum[b](x), a, n)


@hard
def a_function_of_tensors_of_other_dims(x: T[a, b]):
    @md.function
    def half(y):
        return y * 0.5

    return half(x), half(md.sum[b](x)), half(md.sum(x))


@md.function
def depth(x, times):
    w = md.param([a])
    return depth(x * w, times - 1) if times else x + w


@refused("depth(x * w, times - 1)")
def a_function_in_itself(x: T[a]):
    return depth(x, 3) + depth(x, 1)


@hard
def what_a_function_sees_around_it(x: T[a]):
    w = md.param([a])
    kept = [md.exp(x)]

    @md.function
    def inner(y):
        return y * w + kept[0]

    @md.function
    def outer(y):
        h = inner(y) * w
        return inner(h)

    return outer(x), inner(x)


@hard
def what_escapes_from_a_function(x: T[a]):
    kept: dict[str, Any] = {}

    @md.function
    def inner(y):
        w = md.param([a])
        h = y * w
        kept["w"], kept["h"], kept["t"] = w, h, md.exp(h)
        return kept["t"] + 1.0

    @md.function
    def outer(y):
        return inner(y) + kept["h"]

    y = outer(x)
    return y * kept["w"], kept["t"], kept["h"]


@hard
def other_results(x: T[a]):
    @md.function
    def both(y):
        h = md.relu(y)
        return {"h": h, "g": md.exp(h), "two": 2}

    @md.function
    def one(y):
        return [md.abs(y)]

    @md.function
    def none(y):
        w = md.param([a])
        del w

    @md.function
    def number(y):
        return 3.0

    found = both(x)
    (y,) = one(found["g"])
    none(y)
    return y * number(y), found["h"]


@hard
def several_results(x: T[a, b]):
    @md.function
    def pair(y, d):
        t = md.max[d](y)
        return md.sum[d](y - t), t, y * 2.0

    u, v, _ = pair(x, a)
    kept = pair(x, b)
    w, (z, q) = md.relu(u), kept[:2]
    return u, v, w, z * q, kept[2]


@hard
def declared_types(x: T[a, b], ids: md.i32[a]):
    kept = []

    @md.function
    def turned(y: T[a, b], i: md.i32[a]) -> T[b, a]:
        kept.append(md.exp(y))
        return y * md.cast(i, md.f32)

    @md.function
    def plain(y: T[..., b]) -> T[..., b]:
        return md.softmax[b](y)

    y = turned(x, ids)
    z = turned(plain(x), i=ids)
    return y, z, kept[0]


@md.function(name="softmax")
def not_the_library(x):
    return md.softmax[a](x) * 2.0


@hard
def a_function_of_two_constants_in_two_callers(x: T[a]):
    @md.function
    def scaled(u, by):
        return md.relu(u * by)

    @md.function
    def half(u):
        return scaled(u, 0.5)

    return scaled(x, 2.0) + half(x) + scaled(x, 0.5)


@hard
def a_function_called_as_an_operator(x: T[a]):
    y = not_the_library(x)
    return y + not_the_library(y)


@hard
def arguments_given_twice_and_in_another_order(x: T[a]):
    @md.function
    def f(u, v):
        return u - v

    return f(x, x), f(md.exp(x), md.relu(x)), f(v=md.exp(x), u=md.relu(x)), f(1.0, x)


@refused("three(one(x))")
def functions_of_one_name(x: T[a]):
    @md.function(name="f")
    def one(u):
        return u * md.param("w", [a])

    @md.function(name="f")
    def two(u):
        return u + md.param("w", [a])

    @md.function(name="f_2")
    def three(u):
        return u - md.param("w", [a])

    return one(two(x)) + three(one(x)) * two(x)


@hard
def a_name_given_inside_to_what_comes_from_outside(x: T[a]):
    @md.function
    def f(u):
        h = md.name("h", u)
        return h * u

    return f(md.relu(x)) + f(x)


@hard
def a_parameter_that_is_returned_and_shared(x: T[a]):
    @md.function
    def table():
        p = md.param([a, b], init=md.normal(0.5))
        return p

    w = table()
    y = md.einsum(x, w, out=[b])
    return md.einsum(y, w, out=[a])


# --- loops ---------------------------------------------------------------------------------------


@hard
def a_loop_that_swaps(x: T[a], y: T[a]):
    x, y = md.repeat(n, lambda u, v: (v, u + 1.0), x, y)
    return x, y


@hard
def a_loop_that_only_swaps(x: T[a], y: T[a]):
    x, y = md.repeat(n, lambda x, y: (y, x), x, y)
    return x, y


@hard
def what_was_before_a_loop(x: T[a]):
    def body(x):
        x = md.relu(x) * 0.5
        return x

    y = md.repeat(n, body, x)
    z = md.repeat(m, body, md.exp(x))
    return x + y * z


@hard
def numbers_that_are_carried(x: T[a]):
    def body(x, total):
        total = total + md.sum(x)
        return x * 2.0, total

    x, total = md.repeat(n, body, x, 0)
    return x, total


@hard
def what_a_loop_leaves_as_it_is(x: T[a], y: T[a]):
    x, y = md.repeat(n, lambda x, y: (x + y, y), x, y)
    return x, y


@hard
def loops_in_loops(x: T[a], t: T[n, a]):
    h = md.relu(x)

    def inner(h):
        w = md.param([a])
        g = h * w + t
        h = g + md.exp(g)
        return h

    def outer(x):
        h = x * md.param("v", [a])
        h = md.repeat(m, inner, h)
        return md.repeat(m, lambda x: x - h, x)

    x = md.repeat(n, outer, x)
    return x * h


@hard
def names_that_are_made_around_a_loop(x: T[a]):
    h = md.relu(x)
    g = md.sum(h)

    def body(x):
        g = md.exp(x)
        h = g * 2.0
        return x + h

    y = md.repeat(n, body, x)
    return y * h, g


@hard
def a_loop_of_a_function(x: T[a], t: T[n, a]):
    @md.function
    def block(y):
        w = md.param([a])
        return y * w + t

    x = md.repeat(n, block, x)
    return md.repeat(n, lambda y: block(block(y)), x)


@hard
def a_loop_without_results(x: T[a]):
    def body():
        w = md.param([a])
        del w

    md.repeat(n, body)
    return x


@hard
def a_loop_that_stacks(x: T[a]):
    def body(x):
        h = md.tanh(x)
        return h * 0.5, h

    x, hs = md.repeat(n, body, x)
    return x, md.sum[n](hs) + hs.pick(n, 1)


@hard
def what_a_loop_stacks_by_no_name(x: T[a], t: T[n, a]):
    def body(x, y):
        h = md.exp(y)
        return y, h, 2.0, x, h, h * x, t

    *x, twos, before, again, both, rows = md.repeat(n, body, x, x)
    return twos * before + md.sum[n](again) + both + rows, x[0] + x[1]


@hard
def a_loop_that_stacks_alone(x: T[n, a]):
    return md.repeat(n, lambda: md.softmax[a](x))


@hard
def stacks_of_stacks(x: T[n, a]):
    def inner(h):
        h = md.tanh(h)
        return h, h

    def outer(x):
        x, h = md.repeat(m, inner, x)
        return x, h

    x, h = md.repeat(n, outer, md.sum[n](x))
    g = md.repeat(n, lambda: x + md.sum[m](h))
    return h, g


@hard
def a_stack_that_a_later_loop_reads(x: T[n, a]):
    h = md.repeat(n, lambda: md.relu(x))

    def body(y):
        g = h * y
        h_again = md.exp(g)
        return md.sin(h_again), h_again, g

    y, h, g = md.repeat(n, body, md.sum[n](x))
    return y, h - g


@hard
def a_parameter_that_is_read_after_its_loop(x: T[a]):
    kept = []

    def body(x):
        w = md.param([a])
        kept.append(w)
        x = x * w
        return x

    x = md.repeat(n, body, x)
    return x + md.sum[n](kept[0])


@hard
def names_that_a_loop_cannot_carry(x: T[a]):
    x = md.repeat(n, lambda *carried: md.relu(carried[0]), x)
    return x


# --- blocks, goals, gradients --------------------------------------------------------------------


@hard
def blocks_that_are_recomputed(x: T[a]):
    with md.recompute():
        h = md.relu(x)
        kept = [md.exp(h)]
        with md.recompute():
            g = kept[0] * h

    @md.function
    def f(y):
        with md.recompute():
            y = md.gelu(y)
        return y

    def body(x):
        with md.recompute():
            x = f(x) + md.sin(x)
        return x

    x = md.repeat(n, body, x)
    return x + g + kept[0]


@hard
def gradients(x: T[a], y: T[a]):
    w = md.param([a])
    h = md.relu(x * w)
    dh, dw = md.grad(md.mean((h - y) ** 2), h, w)
    kept = md.grad(md.sum(md.square(dh)), x, w)
    md.name("g", kept[1])
    (first,) = (md.grad(md.sum(h * dw), x),)
    return dh, dw, kept[0] + first, kept[1]


@hard
def states_in_functions_and_loops(x: T[a, b]):
    total = md.param([b], init=md.zeros())
    every = md.param("each", [n, b], init=md.ones())

    @md.function
    def counted(y: T[a, b]) -> T[a, b]:
        calls = md.param([], init=md.zeros(), dtype=md.i32)
        md.update(calls, calls + 1)
        return y * md.cast(calls, "f32")

    def body(y):
        last = md.param([b])
        md.update(last, md.sum[a](y))
        md.update(every, every * 2 + last)
        return counted(y) + every

    x = md.repeat(n, body, x)
    total, old = md.sum[a](counted(x)), total
    md.update(old, total + old)
    return total


@hard
def a_goal(x: T[a, b]):
    w = md.param([b], init=md.uniform(-1 / b, 1 / b), dtype=md.f32)
    v = md.param([b], init=md.normal(b**-0.5))
    loss = md.mean(md.square(x * w) - v)
    rate = md.cosine(3e-4, 10 * b, warmup=a)
    optimizer = md.momentum(lr=rate, nesterov=True, clip=1 / a, accumulate=2, compute="bf16")
    md.minimize(loss, optimizer, {"w": {"lr": 1 / a, "nesterov": False}, "v": md.sgd(0.1)})
    return loss


# --- numbers -------------------------------------------------------------------------------------


@refused('md.param("w", [a])')
def a_parameter_called_as_an_input_in_use(x: T[a], w: T[a]):
    v = md.param("w", [a])
    return x * v + w


@refused('float("-inf")')
def a_number_that_is_none(x: T[a]):
    return md.pad[a >> md.dim("wide", 6)](x, 1, 1, value=float("-inf"))


@hard
def numbers(x: T[a], i: md.i32[a]):
    y = x * -1.5 + -0.0 - 1e-30 * x + 1e22 / x + 0.1 * 3 * x
    y = y + np.float32(0.1) + np.int64(3) * x + True * x
    z = (-x) ** 2 - -(x**-2) + 2**x - x**0.5 + (x + 1) ** (x - 1)
    p = (x - (x - x)) / (x / (x * x)) * md.where((x > 0) & ~(x == 1) | (x < -2), x, -x)
    return y, z, p, i * -3


@hard
def views(x: T[a, b], ids: md.i32[m]):
    small = md.dim("small", 2)
    c, d = md.dims(c=2, d=3)
    u = x[b >> (c, d)][(d, c) >> b][b >> md.dim("b2", b)]
    v = x.pick(a, 1) + x.pick(a, a - 1)
    w = x.gather(a, ids).slice(b, 1, 3, small) * x.slice(b, b - 2, None, small).pick(a, 0)
    k = md.pad[b >> md.dim("wide", 8)](x, 1, 1, value=-1.5)
    o = md.one_hot[a](ids, dtype=md.i64)
    j = md.concat[md.dim("twice", 8)](x.pick(b, 0), x.pick(b, 1)[a >> a2])
    return u, v, w, k, o, md.gelu(x, "tanh"), j, md.shift[b](x, -2)


@hard
def a_long_sum(x: T[a]):
    return reduce(operator.add, [x * float(i) for i in range(300)])


@hard
def a_deep_expression(x: T[a]):
    for _ in range(150):
        x = [md.exp(-(x * 0.5))][0]
    return x


@hard
def long_lines(first_of_all: T[a, b], second_of_all: T[a, b], third_of_all: T[a, b]):
    return md.where(
        first_of_all * second_of_all > second_of_all - third_of_all,
        md.maximum(third_of_all, first_of_all) * second_of_all,
        md.minimum(second_of_all, first_of_all) / third_of_all,
    )


# --- results -------------------------------------------------------------------------------------


@hard
def results_that_swap_their_names(x: T[a]):
    u = md.relu(x)
    v = md.exp(x)
    return {"v": u, "u": v, "x": u * v}


@hard
def results_that_are_called_as_others(x: T[a]):
    out1 = md.relu(x)
    return out1, x, md.exp(out1)


@hard
def one_tensor_returned_under_two_names(x: T[a]):
    y = md.relu(x)
    return {"y": y, "z": y, "f32": x, "w": x}


@hard
def a_mistake_that_is_caught(x: T[a, b]):
    y = md.relu(x)
    with contextlib.suppress(DiagnosticError):
        y = md.exp(y) + md.iota[a]
    with contextlib.suppress(DiagnosticError):
        md.repeat(n, lambda z: (), y)
    return y


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_the_text_of(function: Callable[..., Any]) -> None:
    program = md.program(function)
    assert pickle.loads(pickle.dumps(program)).to_mdsl() == program.to_mdsl()


def test_calls_that_differ_in_dims_share_a_def() -> None:
    text = md.program(functions_of_functions_on_other_dims).to_mdsl()
    assert [line for line in text.splitlines() if line.startswith("def")] == [
        "def linear[a, n](x[...]) {",
        "def two[a](y[...]) {",
    ]
    assert "return linear[n, a](h) / sqrt(a)" in text
    assert "return two[a](x), two[b](x), linear[a, n](sum[b](x))" in text
    text = md.program(a_function_of_tensors_of_other_dims).to_mdsl()
    assert "def half(y[...]) {" in text


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_no_text_means(function: Callable[..., Any]) -> None:
    program = md.program(function)
    program.compile()
    with pytest.raises(md.ProgramError) as found:
        program.to_mdsl()
    (diagnostic,) = found.value.diagnostics
    assert diagnostic.code == "MD0821"
    assert diagnostic.span is not None
    assert diagnostic.span.text == REFUSED[function]
    assert diagnostic.help
    with pytest.raises(TypeError, match=f"`{program.name}` cannot be pickled: .*; pickle what mak"):
        pickle.dumps(program)
