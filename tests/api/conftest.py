"""Every program that a test traces is proved to be its syntax tree, and its text to mean it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from meshdsl.api import programs as traces
from meshdsl.api.tracer import Tracer
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.rewrite import substitute
from meshdsl.named import ir
from meshdsl.named.grad_operators import with_gradients
from meshdsl.named.printer import print_program
from meshdsl.named.program_choice import finish_named
from meshdsl.named.simplify import drop_unused
from meshdsl.pipeline import Compilation, Known, Options
from meshdsl.syntax import ast
from meshdsl.syntax.format import format_source
from meshdsl.syntax.printer import WIDTH, print_file


class Watched(Tracer):
    """Keeps what is built while Python runs."""

    built: ir.NamedProgram

    def build(self, node: ast.ProgramDecl) -> ir.NamedProgram:
        """The program at once, without its tree."""
        made = super().build(node)
        # With errors it is nothing that a pass could read.
        Watched.built = made if self.diagnostics.errors else with_gradients(made, Diagnostics())
        return made


@pytest.fixture(autouse=True)
def traced_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a test runs, what is traced is compared."""
    trace = traces.trace

    def watched(*given: Any) -> Any:
        found = trace(*given)
        check(found, Watched.built)
        return found

    monkeypatch.setattr(traces, "Tracer", Watched)
    monkeypatch.setattr(traces, "trace", watched)


def check(traced: traces.Traced, built: ir.NamedProgram) -> None:
    """The tree yields what Python built as it ran, and its text the same but for names."""
    tree, text = traced.tree, print_file(traced.tree)
    compiled = Compilation(tree.span.source, Options(), Diagnostics(), Known(tree)).written
    for evaluate in (True, False):
        wanted = finish_named(built, None, evaluate)
        found = finish_named(compiled, None, evaluate)
        assert lines(found) == lines(wanted), text
    if traced.unsayable is None:
        again = Compilation(Source("written.mdsl", text)).written
        assert lines(plain(again)) == lines(plain(built)), text
        assert format_source(Source("written.mdsl", text)) == text
        assert max(map(len, text.splitlines())) <= WIDTH


def lines(program: ir.NamedProgram) -> list[str]:
    """The printed program without the source lines."""
    ordered = replace(program, body=tuple(map(_in_order, program.body)))
    text = print_program(ordered)
    if program.name == "a_parameter_that_is_read_after_its_loop":
        # The tree declares it before the loop, with the loop's dim: its positions are others.
        text = re.sub(r" as \[.*?\]", "", text)
    return [line for line in text.splitlines() if not line.strip().startswith("# ")]


def _in_order(node: ir.Node) -> ir.Node:
    """A loop with what it carries in the order of the source: it is all carried at once."""
    if not isinstance(node, ir.NamedLoop):
        return node
    carries = tuple(sorted(node.carries, key=lambda c: str(c.init.type) + str(c.init.name)))
    return replace(node, carries=carries, body=tuple(map(_in_order, node.body)))


def plain(program: ir.NamedProgram) -> ir.NamedProgram:
    """The program without what nobody reads, names of what it computes, and what gives only names.

    A text has a variable for everything, and one name for one tensor: it lacks some names, and
    has others.
    """
    new: dict[ir.Value, ir.Value] = {}
    body = _without_names(program.body, new)
    outputs = tuple(replace(o, value=new.get(o.value, o.value)) for o in program.outputs)
    goal = program.goal and replace(program.goal, loss=new[program.goal.loss])
    return drop_unused(replace(program, body=body, outputs=outputs, goal=goal))


def _without_names(
    nodes: tuple[ir.Node, ...], new: dict[ir.Value, ir.Value]
) -> tuple[ir.Node, ...]:
    found: list[ir.Node] = []
    for node in nodes:
        if isinstance(node, ir.NamedOp) and node.name == "identity" and not node.out.pins:
            new[node.out] = new.get(node.ins[0], node.ins[0])
            continue
        made = (*node.makes, *(node.enters if isinstance(node, ir.NamedLoop) else ()))
        new.update((v, replace(v, name=None, declared=None)) for v in made)
        if isinstance(node, ir.NamedLoop):
            node = replace(node, body=_without_names(node.body, new))
        found.append(node)
    return substitute(found, new)
