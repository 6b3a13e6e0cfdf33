"""Names of emitted texts: the check finds every kind of mistake, and users may have any name."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.in_process import load, run_local
from meshdsl.backends.module.compiler import compiler
from meshdsl.backends.runtime.values import Array
from meshdsl.backends.torch.bindings import ComparedValues, check_bindings
from meshdsl.backends.torch.identifiers import module_names
from meshdsl.backends.torch.preamble import HeadName
from meshdsl.diagnostics import Source
from meshdsl.named.ir import Value
from meshdsl.pipeline import Compilation, Options
from meshdsl.syntax.parse import parse

# --- texts that break a rule ---------------------------------------------------------------------

DEVICES = ComparedValues({"p": 4}, "p", "stage", ((0,), (1,), (2,), (3, 0)))
TEXTS = {
    "read before it is bound": ("y = x + 1\nx = 2", "line 8 of .*, `y = x .* reads `x`"),
    "of no name": ("y = z", "`z`, which nothing defines"),
    "bound on one side": ("if rank == 1:\n    x = 1\ny = x", "`x`, which may be unbound"),
    "bound on one device": ("if p == 1:\n    x = 1\nif p < 2:\n    y = x", "`x`, .* unbound"),
    "bound in a loop without iterations": ("for i in range(rank):\n    x = i\ny = x", "unbound"),
    "deleted": ("x = 1\ndel x\ny = x", "`y = x` reads `x`, which may be unbound"),
    "deleted in an iteration": ("x = 1\nfor i in range(3):\n    y = x\n    del x", "unbound"),
    "chosen by a device": ("if p == 1:\n    x = 1\ny = x if p > 0 else rank", "unbound"),
    "a sum that a pass adds to": ("def f():\n    x = x.add_(1)\nf()", "`x`, .* unbound"),
    "bound behind a call": ("def f():\n    return x\nf()\nx = 1", "`return x` .* unbound"),
    "a name of the module": ("main = 1", "binds `main`, a name of the module"),
    "an argument of the module": ("def f(main):\n    return main", "binds `main`"),
    "not allocated": ("unheard = 1", "binds `unheard`, which is not allocated"),
}  # fmt: skip
"""Statements of a function of the device, and what the check says of them."""

FINE = {
    "bound on both sides": "if rank == 1:\n    x = 1\nelse:\n    x = 2\ny = x",
    "bound and read on one device": "if p == 1:\n    x = 1\nif p == 1:\n    y = x",
    "on devices from one on": "if p != 0:\n    x = 1\nif p > 1:\n    y = x",
    "chosen by a device": "if p == 1:\n    x = 1\ny = x if p == 1 else rank",
    "a loop with iterations": "for i in reversed(range(3)):\n    x = i\ny = x",
    "an own name of an expression": "y = [x for x in range(3)]\nz = sum(x for x in y)",
    "added to from inside": "x = 1\ndef f():\n    nonlocal x\n    x = x + 1\nf()\ny = x",
    "bound before a call": "def f():\n    return x\nx = 1\nf()",
    "an argument before a function has its name": "y = groups\ndef groups():\n    y = 1\ngroups()",
}
RESERVED = frozenset("rank groups device p x y z i f".split())


def check(statements: str) -> None:
    lines = [
        "def device(rank, groups):",
        "    p = rank",
        *(f"    {s}" for s in statements.split("\n")),
    ]
    check_bindings(lines, 6, {"main", "actions"}, DEVICES, RESERVED)


@pytest.mark.parametrize("name", TEXTS)
def test_a_mistake_is_found_with_its_line(name: str) -> None:
    statements, message = TEXTS[name]
    with pytest.raises(AssertionError, match=message):
        check(statements)


@pytest.mark.parametrize("name", FINE)
def test_what_is_right_is_no_mistake(name: str) -> None:
    check(FINE[name])


PASSES = {
    "on its stage": ("if stage == 3:\n    x = 1\nif stage == 3:\n    y = x", None),
    "what its device has": ("if stage == 2:\n    y = begun", None),
    "what another device has": ("if stage == 1:\n    y = begun", "`y = begun` reads `begun`"),
    "of several stages": ("if stage == 0:\n    y = begun", "`y = begun` reads `begun`"),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_of_a_stage_of_its_device(name: str) -> None:
    statements, message = PASSES[name]
    inner = "\n".join(f"        {line}" for line in statements.split("\n"))
    text = f"""def device(rank, groups):
    p = rank
    if p == 2:
        begun = 1
    def forward(i, stage):
{inner}
    for y, i, stage in actions(p):
        forward(i, stage)"""
    names = {*RESERVED, "begun", "forward", "stage"}
    if message is None:
        check_bindings(text.split("\n"), 1, {"actions"}, DEVICES, names)
        return
    with pytest.raises(AssertionError, match=message):
        check_bindings(text.split("\n"), 1, {"actions"}, DEVICES, names)


# --- every name of a text is a user's to choose --------------------------------------------------

ROLES = {
    "input": (", NAME[batch, m]", "", "", "y = y + NAME * 0.5"),
    "param": ("", "", "param NAME[m]", "y = y + NAME * 0.5"),
    "dim": ("", "dim NAME = 1", "", "repeat NAME { y = y * 0.9 }"),
    "value": ("", "", "", "NAME = y * 0.5\n  y = NAME + x"),
}
"""How a program has a name: as an input, in a declaration, a parameter, a statement."""

SGD = "minimize loss with sgd(lr=0.1)"
KINDS = {
    "plain": ("", "one:1", ""),
    "step": ("minimize loss with adamw(lr=0.1, clip=1.0)", "d:2", "batch -> d"),
    "pipeline": (SGD, "p:2", "layers -> p with zb_v[batch](2)"),
    "updates on the way": (SGD, "p:2", "layers -> p with pipedream[batch](4)"),
    "module": ("", "one:1", ""),
}  # fmt: skip
"""What is minimised, a mesh and a layout for each kind of text."""

GENERATES = """dim batch = 2, words = 8
program step(token[batch]: i32, place[]: i32) {
  param table[batch, words] = zeros()
  table := table * 0.5 + cast(place, f32)
  return table
}
"""


def program(kind: str, names: list[str], turn: int) -> str:
    """A program that has names in all roles, dealt out by turns."""
    goal, _, rules = KINDS[kind]
    rules, _, schedule = rules.partition(" with ")
    roles = [*ROLES.values()]
    dealt = [(roles[(number + turn) % len(roles)], name) for number, name in enumerate(names)]

    def each(index: int) -> str:
        parts = (role[index].replace("NAME", name) for role, name in dealt if role[index])
        return ("\n  " if index else "").join(parts)

    return f"""dim batch = 4, m = 2, layers = 4
{each(1)}
layout chosen {{ {rules} }}{f" with {schedule}" if schedule else ""}
program net(x[batch, m]{each(0)}) {{
  {each(2)}
  y = x
  {each(3)}
  repeat layers {{
    param scale[m]
    y = tanh(y * scale)
  }}
  result = mean(square(y))
  return result
  {goal.replace("loss", "result")}
}}
"""


def compiled(kind: str, names: list[str], turn: int = 0) -> Compilation:
    source = Source("names.mdsl", program(kind, names, turn))
    mesh = None if kind == "module" else KINDS[kind][1]
    return Compilation(source, Options(mesh=mesh, layout="chosen", reduce="immediate"))


def module_text(made: Compilation) -> str:
    """The text of a module on one device, with all of its gradients."""
    params = [p.value.name or "" for p in made.named.params]
    inputs = [v.label for v in made.named.inputs]
    return compiler(made, {"one": 1}).with_gradients(params, inputs).text


@functools.cache
def defined() -> tuple[str, ...]:
    """The names that the modules of texts define, and all that they may define."""
    texts = [compiled(kind, ["a"]).text for kind in KINDS if kind != "module"]
    texts += [module_text(compiled("module", ["a"])), Compilation(Source("g", GENERATES)).text]
    found = {name for text in texts for name in names_of(text)}
    assert {"SCHEDULE", "ASSIGNED", "Line", "Versions", "main", "COTANGENTS"} <= found
    functions = {"device", "forward", "backward"}
    assert found <= module_names() | functions
    own = {"inputs", "weights", "kept", "stage", "stages", "states", "saved", "rank"}
    every = sorted({*found, *HeadName, *functions, *own})
    return tuple(name for name in every if is_name(name))


def names_of(text: str) -> Iterator[str]:
    """The names that a module binds at its top."""
    for node in ast.parse(text).body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name


def is_name(name: str) -> bool:
    """Whether a name is one in the language, too."""
    _, problems = parse(Source("name", f"dim {name} = 2\n"))
    return not list(problems)


TURNS = [
    (kind, turn)
    for number, kind in enumerate(KINDS)
    for turn in range(len(ROLES))
    if turn == number % len(ROLES) or "MESHDSL_CASES" in os.environ
]
"""Each kind with names in their roles by one turn, or by all of them."""


@pytest.mark.parametrize(("kind", "turn"), TURNS)
def test_any_name_of_a_text_is_a_users(kind: str, turn: int) -> None:
    """A program that has all of them has the numbers of one with names of no meaning."""
    names = [*defined()]
    plain = [f"a{number}" for number in range(len(names))]
    one, other = (numbers(kind, compiled(kind, chosen, turn)) for chosen in (names, plain))
    assert len(one) > 1 or kind == "plain"
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(found, expected)


def numbers(kind: str, made: Compilation) -> list[Array]:
    """What a text returns and updates, or what a module and its backward pass return, in order."""
    rng = np.random.default_rng(0)
    values = (made.named.inputs, [p.value for p in made.named.params])
    inputs, params = ({v.label: _drawn(v, rng) for v in each} for each in values)
    if kind != "module":
        run = run_local(made.text, inputs, params)
        return [*run.outputs.values(), *run.updated.values()]
    loaded: Any = load(module_text(made))
    tensors = ({n: torch.from_numpy(a) for n, a in table.items()} for table in (inputs, params))
    outputs, saved = loaded.forward(0, {}, *tensors)
    seeds = {name: torch.ones(()) for name in loaded.COTANGENTS}
    grads = loaded.backward(0, {}, saved, seeds)
    return [t.numpy() for table in (outputs, *grads) for t in table.values()]


def _drawn(value: Value, rng: np.random.Generator) -> Array:
    return rng.normal(size=[dim.size for dim in value.type.dims]).astype("f4")


def test_an_identifier_of_two_variables_stays_when_the_statement_of_one_is_removed() -> None:
    """A cast is written where its sum is made; another value had the name of the source before."""
    text = """dim b = 2, io = 2
program p(x[b, io]) {
  param bias[io]
  a = x * bias
  h = tanh(a)
  loss = mean(h) + 0.1 * sum(square(bias))
  return loss
  minimize loss with sgd(lr=0.1)
}
layout chosen { h: pipe = 1 } with gpipe[b](1)
"""
    options = Options(mesh="pipe:2", layout="chosen", dtype="bf16")
    assert "d_bias = " in Compilation(Source("p.mdsl", text), options).text
