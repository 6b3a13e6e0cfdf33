"""Aliases, and copies before an overwrite: programs that need them."""

from __future__ import annotations

import re

import pytest

from meshdsl.device.aliases import copied_first, shared
from meshdsl.device.ir import DeviceProgram, Var
from meshdsl.ops.opdef import load_all
from tests.compiling import compile_text
from tests.programs.harness import Case
from tests.training.stepping import check_step

DIMS = "dim a = 4, b = a, n = 3\n"
PARAMS = "  param w[a, b]\n  param v[a, b]\n"

COPIED = {
    "the gradient of one is the other": ("loss = sum(w * v)", {"w"}),
    "that of one is the other, turned round": ("loss = sum(w * v[a -> b, b -> a])", {"w"}),
    "a gradient is its own parameter": (
        "loss = sum(stop_gradient(w)[a -> b, b -> a] * w) + mean(v * v)",
        {"w"},
    ),
    "what is returned shows both": ("loss = mean(w * v)\n  p = w[a = 0]\n  q = v", {"w", "v"}),
    "a loop swaps them": (
        "h = w\n  g = v\n  repeat n {\n    t = h\n    h = g\n    g = t\n  }\n  loss = sum(h * g)",
        {"w", "v"},
    ),
    "gradients of their own": ("loss = mean(square(w * v))", set()),
    "sums of two": ("loss = sum(w * v) + mean(w * w) + mean(v * v)", set()),
}
"""Statements with a loss, and the parameters that an update may not write to."""


def text_of(body: str, optimizer: str) -> str:
    more = ", p, q" if "\n  q = " in body else ""
    lines = f"{PARAMS}  {body}\n  return loss{more}\n  minimize loss with {optimizer}\n"
    return f"{DIMS}program p(x[a, b]) {{\n{lines}}}\n"


@pytest.mark.parametrize("optimizer", ["sgd(lr=1.0)", "adam(lr=0.1, eps=1.0)"])
@pytest.mark.parametrize("name", COPIED)
def test_what_is_still_shown_is_copied(name: str, optimizer: str) -> None:
    body, names = COPIED[name]
    made = compile_text(text_of(body, optimizer), mesh="d:1")
    assert {v.name for v in copied_first(made.device)} == names
    written = re.findall(r"(\w+)\.clone\(\)", made.text.partition("def device")[2])
    assert set(written) == names


OPTIMIZERS = (
    "sgd(lr=1.0, weight_decay=0.1)",
    "momentum(lr=1.0, nesterov=true)",
    "adamw(lr=0.1, eps=1.0)",
    "adafactor(lr=0.1, eps1=1.0)",
    "sgd(lr=1.0, accumulate=2)",
    "sgd(lr=1.0, clip=0.1)",
)
PLACES = ("d:1 { }", "d:2 { a -> d, b -> none }", "d:2 { params: a -> d, state: b -> d }")


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_steps_are_those_of_the_reference(name: str, number: int) -> None:
    mesh, _, rules = PLACES[(number + list(COPIED).index(name)) % len(PLACES)].partition(" ")
    check_step(Case(text_of(COPIED[name][0], OPTIMIZERS[number]), mesh, rules))


MOVED = {
    "pad": "pad[a -> c](h, 0, 0)[c -> a]",
    "roll": "roll[a](h, by=4)",
    "shift": "shift[a](h, by=0)",
}
"""Calls that move nothing, so that the result is the block that they are given."""


@pytest.mark.parametrize("name", [name for name, op in load_all().items() if op.passes])
def test_what_moves_nothing_shows_its_operand(name: str) -> None:
    body = f"h = w\n  repeat n {{\n    h = tanh({MOVED[name]} + v)\n  }}\n  loss = mean(square(h))"
    text = f"{DIMS}dim c = a\n{text_of(body, 'sgd(lr=1.0)').removeprefix(DIMS)}"
    check_step(Case(text, "d:2", "{ a -> d, c -> d }"))


# --- who shares -------------------------------------------------------------------------------


def groups(program: DeviceProgram) -> set[frozenset[str]]:
    """The names of variables that may share memory."""
    owners = shared(program)
    found: dict[Var, set[str]] = {}
    for var, owner in owners.items():
        found.setdefault(owner, {owner.name}).add(var.name)
    return {frozenset(names) for names in found.values()}


SHARED = {
    "views": ("y = x[a = 1:3 -> p]\n  z = y[p -> q]\n  u = z * 2.0", [{"x", "y", "z"}]),
    "a row": ("y = x[a = i]\n  z = x[a = ids]", [{"x", "y"}]),
    "a broadcast": ("y[a, b, p] = sum[a, b](x) + zeros[a, b, p]()", []),
    "an einsum of one": ("y = einsum(x -> [b, a])\n  z = einsum(x -> [b])", [{"x", "y"}]),
    "a loop": (
        "h = x\n  repeat p { h = h * 2.0 }\n  y = h[a -> c]",
        [{"x", "h", "h_2", "y"}],
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_views_and_loops_share(name: str) -> None:
    body, expected = SHARED[name]
    names = ", ".join(dict.fromkeys(re.findall(r"^ *(\w)(?:\[.*\])? = ", body, re.M)))
    text = (
        "dim a = 4, b = 6, c = a, p = 2, q = p\n"
        f"program p(x[a, b], i[]: i32, ids[q]: i32) {{\n  {body}\n  return {names}\n}}\n"
    )
    found = groups(compile_text(text, mesh="d:1").device)
    for group in expected:
        assert any(group <= names for names in found), (group, found)
    assert len(found) == len(expected)
