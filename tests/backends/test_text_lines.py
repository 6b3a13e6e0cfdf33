"""Lines of a text know what they read and bind: nobody reads a line's text to find out."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re

import pytest

from meshdsl.backends import torch as package
from meshdsl.backends.torch.operator_text import chain
from meshdsl.backends.torch.text_lines import TextLines
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options


@pytest.fixture
def out() -> TextLines:
    return TextLines(depth=0)


def test_names_belong_to_the_next_statement(out: TextLines) -> None:
    text = out.mention("x") + " + 1"
    out.comment("not of this")
    out.assign(("y",), text)
    out.statement("print(y)")
    assert [line.names for line in out.lines] == [set(), {"x"}, set()]
    assert (out.names(1), out.binds(0)) == ({"x"}, {"y"})


def test_every_line_of_a_statement_binds_its_names(out: TextLines) -> None:
    names = [f"a_rather_long_name_of_a_variable_{n}" for n in range(5)]
    out.unpack(names, "versions.next()")
    assert len(out.lines) > 1
    assert out.binds(0) == {*names}


def test_a_statement_taken_back_leaves_its_names_to_the_next(out: TextLines) -> None:
    out.assign(("y",), out.mention("x"))
    out.take_back(0)
    out.assign(("z",), "x")
    (line,) = out.lines
    assert (line.text, *line.names, *line.binds) == ("z = x", "x", "z")


@pytest.mark.parametrize(
    ("made", "text", "chained"),
    [
        ("a + b", "x.mul_(2.0)", "(a + b).mul_(2.0)"),
        ("-a", "x.mul_(c)", "(-a).mul_(c)"),
        ("a[0]", "x.add_(b)", "a[0].add_(b)"),
        ("f(a)", "x.add_(xs)", "f(a).add_(xs)"),
        ("a @ b", "torch.relu_(x)", "torch.relu_(a @ b)"),
        ("a if b else c", "x.add_(d)", "(a if b else c).add_(d)"),
        ("a + b", "x.mul_(x)", None),  # it is read twice
        ("a + b", "torch.f(a, out=x)", None),
        ("a + b", "x_2.add_(c)", None),
        ("a + b", "xs.x.add_(c)", None),
    ],
)
def test_what_changes_a_variable_is_chained_to_what_makes_it(
    made: str, text: str, chained: str | None
) -> None:
    assert chain("x", made, text) == chained


@pytest.mark.parametrize("optional", [False, True])
def test_a_block_without_statements_is_pass_or_left_out(optional: bool, out: TextLines) -> None:
    with out.under("if p == 1:", optional) as before:
        out.comment("nothing")
        assert not out.has_statements(before + 1)
    out.add("y = 1")
    block = [] if optional else ["if p == 1:", "    # nothing", "    pass"]
    assert [line.text for line in out.lines] == [*block, "y = 1"]
    assert [line.opens for line in out.lines] == [line.endswith(":") for line in (*block, "y = 1")]


def test_a_block_with_a_statement_stays(out: TextLines) -> None:
    with out.under("if p == 1:", optional=True):
        out.add("y = 1")
    assert [line.text for line in out.lines] == ["if p == 1:", "    y = 1"]


def test_a_line_put_elsewhere_has_no_source_place(out: TextLines) -> None:
    out.place = "a.mdsl:3"
    line = out.line(f"n = {out.mention('p')}")
    assert (line.place, line.node, *line.names) == ("", None, "p")
    assert not out.lines


UNEVEN = """dim b = 10, m = 6, h = 5
program p(x[b, m], ids[b]: i32) {
  param w[m, h]
  y = einsum(x, w -> [b, h])
  z = one_hot[h](ids) * 2.0
  return y, z
}
mesh grid = { rows: 2, cols: 2, others: 2 }
layout l { b -> rows, h -> cols }
"""


def test_a_function_begins_with_the_coordinates_that_it_reads_and_no_others() -> None:
    text = Compilation(Source("p.mdsl", UNEVEN), Options()).text
    (device,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == "device")
    body = ast.get_source_segment(text, device) or ""
    begun = re.findall(r"(?m)^    (\w+) = rank\b|^    (\w+), (\w+) = block\(", body)
    names = [name for each in begun for name in each if name]
    assert {"rows", "cols", "n_h"} <= {*names}
    assert "others" not in names
    for first, *pair in begun:
        used = [len(re.findall(rf"\b{name}\b", body)) for name in (first, *pair) if name]
        assert max(used) > 1, f"{body} never reads what it begins with"


def test_writers_are_composed() -> None:
    """No class of the emitter is made of another one of it."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    classes = {c for m in modules for _, c in inspect.getmembers(m, inspect.isclass)}
    own = {c for c in classes if c.__module__.startswith(package.__name__)}
    assert not [c for c in own if own.intersection(c.__mro__[1:])]
