"""Every program that a test traces is proved to be its syntax tree, and its text to mean it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from meshdsl.api import programs as traces
from meshdsl.api.tracer import Tracer
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.rewrite import Rebuild
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
        Watched.built = made
        if not self.diagnostics.errors:  # With errors it is nothing that a pass could read.
            whole = with_gradients(made, Diagnostics())
            Watched.built = whole if whole.goal is None else self.goals.finish(whole)
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
    ordered = replace(program, body=_InOrder().nodes(program.body))
    text = print_program(ordered)
    if program.name == "a_parameter_that_is_read_after_its_loop":
        # The tree declares it before the loop, with the loop's dim: its positions are others.
        text = re.sub(r" as \[.*?\]", "", text)
    return [line for line in text.splitlines() if not line.strip().startswith("# ")]


class _InOrder(Rebuild):
    """Loops with what they carry in the order of the source: it is all carried at once."""

    def op(self, op: ir.NamedOp) -> tuple[ir.NamedOp]:
        return (op,)

    def loop(self, loop: ir.NamedLoop) -> tuple[ir.NamedLoop]:
        carries = tuple(sorted(loop.carries, key=lambda c: str(c.init.type) + str(c.init.name)))
        return (replace(loop, carries=carries, body=self.nodes(loop.body)),)


def plain(program: ir.NamedProgram) -> ir.NamedProgram:
    """The program without what nobody reads, names of what it computes, and what gives only names.

    A text has a variable for everything, and one name for one tensor: it lacks some names, and
    has others.
    """
    nameless = _WithoutNames()
    body = nameless.nodes(program.body)
    outputs = tuple(replace(o, value=nameless.value(o.value)) for o in program.outputs)
    goal = program.goal and replace(program.goal, loss=nameless.new[program.goal.loss])
    return drop_unused(replace(program, body=body, outputs=outputs, goal=goal))


class _WithoutNames(Rebuild):
    def op(self, op: ir.NamedOp) -> tuple[ir.NamedOp, ...]:
        if op.name == "identity" and not op.out.pins:
            self.new[op.out] = self.value(op.ins[0])
            return ()
        self.unnamed(op.outs)
        return (self.on_new(op),)

    def enter(self, loop: ir.NamedLoop) -> None:
        self.unnamed(loop.enters)

    def leave(self, loop: ir.NamedLoop) -> tuple[()]:
        self.unnamed(loop.makes)
        return ()

    def unnamed(self, values: Iterable[ir.Value]) -> None:
        self.new.update((v, replace(v, name=None, declared=None)) for v in values)
