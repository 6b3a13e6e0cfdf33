"""`to_mdsl`: the text reads well, and read again it is the same named program."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from meshdsl.backends.engines.reference import run_reference
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.program import Carry
from meshdsl.named.from_syntax import build
from meshdsl.named.ir import Loop, Node, Op, Program, Value
from meshdsl.named.printer import print_program
from meshdsl.named.to_mdsl import Unwritable, to_mdsl
from meshdsl.named.written_lines import WIDTH
from meshdsl.pipeline import choose_program, compile_source, front
from meshdsl.syntax.format import format_source
from tests.compiling import named
from tests.named.written_programs import DIMS, PROGRAMS
from tests.programs.harness import Case, whole_values
from tests.programs.strategy import cases
from tests.project import ROOT, matching

EXAMPLES = matching("examples/**/*.mdsl")
SEEDS = matching("tests/seeds/*.mdsl")
CASES = int(os.environ.get("MESHDSL_CASES", "120"))


def lines(program: Program) -> list[str]:
    """The printed program without the source lines, and without the dims that rules know."""
    text = print_program(program).splitlines()
    known_by = re.compile(r" as \[[^]]*\]")
    return [known_by.sub("", line) for line in text if not line.strip().startswith("# ")]


def unsimplified(text: str) -> Program:
    diagnostics = Diagnostics()
    declarations = front(Source("test.mdsl", text), {}, diagnostics)
    program = build(declarations, choose_program(declarations, None), diagnostics)
    diagnostics.raise_errors()
    assert program is not None
    return program


def check_round_trip(text: str) -> None:
    program = named(text, evaluate=True)
    for written in (to_mdsl(program), to_mdsl(unsimplified(text))):
        assert lines(named(written, evaluate=True)) == lines(program), written
        assert format_source(Source("written.mdsl", written)) == written
        assert max(map(len, written.splitlines())) <= WIDTH
    assert to_mdsl(named(to_mdsl(program))) == to_mdsl(program)


@pytest.mark.parametrize("path", [*EXAMPLES, *SEEDS], ids=lambda p: p.stem)
def test_files_come_back(path: Path) -> None:
    check_round_trip(path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_come_back(name: str) -> None:
    check_round_trip(DIMS + PROGRAMS[name])


def test_random_programs_come_back() -> None:
    random_cases(CASES)(lambda case: check_round_trip(case.text))


def random_cases(count: int) -> Any:
    """Runs a test on random programs; one that fails is shown as it is, not made smaller."""

    def run(test: Any) -> None:
        chosen = settings(
            max_examples=count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
            database=None,
        )
        body = chosen(given(case=cases())(lambda case: test(case)))
        (body if "MESHDSL_CASES" in os.environ else seed(5)(body))()

    return run


# --- what the text looks like ----------------------------------------------------------------


def test_the_transformer_reads_as_it_was_written() -> None:
    text = (ROOT / "examples/transformer.mdsl").read_text()
    start = text.index("def attention")
    found = to_mdsl(named(text))
    assert found[found.index("def attention") :] == text[start:]


def test_calls_that_differ_in_more_than_dims_get_a_def_each() -> None:
    text = (
        DIMS + "def f(x[a], s) -> [a] {\n  param w[a]\n  return x * w * s\n}\n"
        "program p(x[a]) {\n  return f(f(x, 2.0), 3.0) + f(x, 2.0)\n}\n"
    )
    found = to_mdsl(named(text))
    assert [line.split("(")[0] for line in found.splitlines() if line.startswith("def ")] == [
        "def f",
        "def f_2",
        "def f_3",
    ]
    check_round_trip(text)


# --- declarations ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_meshes_and_layouts_are_written_with_it(path: Path) -> None:
    source = Source(path.name, path.read_text())
    made = compile_source(source, options(), Diagnostics(), "named")
    written = to_mdsl(made.named, made.declarations)
    assert format_source(Source("written.mdsl", written)) == written
    again = compile_source(Source("again.mdsl", written), options(), Diagnostics(), "named")
    for kind in ("dims", "meshes", "layouts", "sbps"):
        assert list(getattr(again.declarations, kind)) == list(getattr(made.declarations, kind))
    assert to_mdsl(again.named, again.declarations) == written
    assert lines(again.named) == lines(made.named)


def options() -> Any:
    from meshdsl.pipeline import Options

    return Options(evaluate=True)


# --- programs that no text was ------------------------------------------------------------------


class Renamed:
    """The same program with no name on any activation."""

    def __init__(self) -> None:
        self.made: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        if value.role != "activation":
            return value
        return self.made.setdefault(value, replace(value, name=None, path=(), functions=()))

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.loop(n) if isinstance(n, Loop) else self.op(n) for n in nodes)

    def op(self, op: Op) -> Op:
        ins, outs = (tuple(map(self.value, vs)) for vs in (op.ins, op.outs))
        return replace(op, ins=ins, outs=outs)

    def loop(self, loop: Loop) -> Loop:
        stacked = tuple(
            replace(s, outer=self.value(s.outer), inside=self.value(s.inside)) for s in loop.stacked
        )
        carries = tuple(
            Carry(*(self.value(v) for v in (c.init, c.inside, c.next, c.result)))
            for c in loop.carries
        )
        return replace(loop, stacked=stacked, carries=carries, body=self.nodes(loop.body))

    def program(self, program: Program) -> Program:
        outputs = tuple(replace(o, value=self.value(o.value)) for o in program.outputs)
        return replace(program, body=self.nodes(program.body), outputs=outputs)


def shuffled(nodes: tuple[Node, ...], random_: random.Random) -> tuple[Node, ...]:
    """The nodes in another order that is as good."""
    made: set[Value] = set()
    every = {v for n in nodes for v in outs(n)}
    rest, found = list(nodes), []
    while rest:
        ready = [n for n in rest if all(v in made for v in reads(n) if v in every)]
        node = random_.choice(ready)
        rest.remove(node)
        made.update(outs(node))
        body = shuffled(node.body, random_) if isinstance(node, Loop) else ()
        found.append(replace(node, body=body) if isinstance(node, Loop) else node)
    return tuple(found)


def outs(node: Node) -> tuple[Value, ...]:
    return node.outs if isinstance(node, Op) else tuple(c.result for c in node.carries)


def reads(node: Node) -> set[Value]:
    if isinstance(node, Op):
        return set(node.ins)
    own = {c.init for c in node.carries} | {s.outer for s in node.stacked}
    return own.union(*(reads(n) for n in node.body))


def check_same_values(case: Case, change: Any) -> None:
    """The text of a changed program computes what the program did."""
    program = named(case.text)
    assume(not any("." in str(p.value.name) for p in program.params))
    written = to_mdsl(change(program))
    (inputs, params), wanted = whole_values(case.text, {})
    found = run_reference(named(written), inputs, params)
    assert list(found) == list(wanted), written
    for name, array in wanted.items():
        assert np.allclose(found[name], array, equal_nan=True), (name, written)


def test_programs_without_names_compute_the_same() -> None:
    random_cases(CASES // 2)(lambda case: check_same_values(case, Renamed().program))


def test_programs_in_another_order_compute_the_same() -> None:
    def change(program: Program) -> Program:
        nameless = Renamed().program(program)
        return replace(nameless, body=shuffled(nameless.body, random.Random(1)))

    random_cases(CASES // 2)(lambda case: check_same_values(case, change))


def test_a_loop_that_swaps_what_it_carries() -> None:
    text = (
        DIMS + "program p(x[a], y[a]) {\n  repeat n {\n    t = x * 2.0\n    x = y + 1.0\n"
        "    y = t\n  }\n  return x, y\n}\n"
    )
    program = named(text)
    (loop,) = (node for node in program.body if isinstance(node, Loop))
    first, second = loop.carries
    swapped = replace(
        loop,
        body=(),
        stacked=(),
        carries=(replace(first, next=second.inside), replace(second, next=first.inside)),
    )
    body = tuple(swapped if n is loop else n for n in program.body)
    changed = replace(program, body=body)
    inputs = {"x": np.arange(4.0), "y": np.ones(4)}
    wanted = run_reference(changed, inputs, {})
    found = run_reference(named(to_mdsl(changed)), inputs, {})
    assert all(np.array_equal(found[k], wanted[k]) for k in wanted)


# --- what cannot be written ------------------------------------------------------------------


def test_functions_of_one_name_that_differ_are_refused() -> None:
    text = (
        DIMS + "def f(x[a]) -> [a] {\n  param w[a]\n  return x * w\n}\n"
        "def g(x[a]) -> [a] {\n  return f(x)\n}\n"
        "def h(x[a]) -> [a] {\n  return f(x)\n}\n"
        "program p(x[a]) {\n  return h(g(x))\n}\n"
    )
    program = named(text)
    first = next(op for op in program.body if isinstance(op, Op) and op.name == "mul")
    other = replace(first, name="add")
    changed = replace(program, body=tuple(other if n is first else n for n in program.body))
    assert to_mdsl(program).count("def f(") == 1
    with pytest.raises(Unwritable, match="two functions are called `f`"):
        to_mdsl(changed)


def test_backward_passes_are_refused() -> None:
    program = named(DIMS + "program p(x[a]) {\n  return relu(x)\n}\n")
    (op,) = program.body
    assert isinstance(op, Op)
    with pytest.raises(Unwritable, match="`grad`"):
        to_mdsl(replace(program, body=(replace(op, phase="backward"),)))
