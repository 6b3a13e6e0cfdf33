"""Passes on ten lines of text, each with the lines expected of it: `tests/ir/passes/*.txt`.

A case is a title, a pass with its argument, a program, and after `---` what becomes of it:

```
=== a sum of a product is one einsum
> simplify
program p
  …
---
program p
  …
```

`MESHDSL_UPDATE_GOLDEN=1 pytest tests/ir` writes what is expected anew: read it before it is kept.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshdsl.device import printer as device_printer
from meshdsl.device.buckets import in_buckets
from meshdsl.device.filled_stacks import filled_stacks
from meshdsl.device.from_placed import lower
from meshdsl.device.overlap import overlapped
from meshdsl.device.sums import added_directly, summed_in_place
from meshdsl.device.verify import verify as verify_device
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.rewrite import rewritten
from meshdsl.ir.types import DTYPES
from meshdsl.named import ir as named
from meshdsl.named import printer as named_printer
from meshdsl.named.autocast import mixed
from meshdsl.named.cse import cse
from meshdsl.named.dtype_override import retype
from meshdsl.named.optimizers import resolve
from meshdsl.named.passes import simplify
from meshdsl.named.simplify import drop_unused, hoist_invariants
from meshdsl.named.sums_after_loops import sum_after_loops
from meshdsl.named.training_step import training_step
from meshdsl.named.verify import verify as verify_named
from meshdsl.named.vjp import with_vjp
from meshdsl.pipeline import Options, front, place_named
from meshdsl.placed import ir as placed
from meshdsl.placed import printer as placed_printer
from meshdsl.placed.reshard import route
from meshdsl.placed.verify import verify as verify_placed
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse
from tests.ir_text import device as device_parser
from tests.ir_text import named as named_parser
from tests.ir_text import placed as placed_parser
from tests.project import matching
from tests.report.golden import UPDATE


@dataclass(frozen=True, slots=True)
class Stage:
    """How programs of one stage are read, printed and verified."""

    read: Callable[[str], Any]
    text: Callable[[Any], str]
    verify: Callable[[Any], None]


NAMED = Stage(named_parser.parse_program, named_printer.print_program, verify_named)
PLACED = Stage(placed_parser.parse_program, placed_printer.print_program, verify_placed)
UNROUTED = Stage(placed_parser.parse_program, placed_printer.print_program, lambda _: None)
"""Placed programs whose reshards say what is wanted, not how it comes about."""
DEVICE = Stage(device_parser.parse_program, device_printer.print_program, verify_device)


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass from one stage to another; `run` takes a program and the argument as it is written."""

    before: Stage
    after: Stage
    run: Callable[[Any, str], Any]


def gradient(program: named.NamedProgram, names: str) -> named.NamedProgram:
    """The vector-Jacobian product by the parameters and inputs `names`."""
    wanted = names.split()
    return simplify(with_vjp(program, wanted, wanted).program)


def train(program: named.NamedProgram, optimizer: str) -> named.NamedProgram:
    """The training step that minimises the first output: `sgd(lr=0.5)`."""
    text = f"program p(x[]) {{ return x\n minimize x with {optimizer} }}\n"
    tree, problems = parse(Source("optimizer", text))
    assert not list(problems), list(problems)
    (written,) = (item for item in tree.declarations if isinstance(item, ast.ProgramDecl))
    (goal,) = (s for s in written.body if isinstance(s, ast.Minimize))
    loss, params = program.outputs[0].value, program.trainable
    found = named.Goal(loss, resolve(goal.optimizer), program.span, params=params)
    return simplify(training_step(replace(program, goal=found)))


def place(program: named.NamedProgram, layout: str) -> Any:
    """The program placed under `rows: 2, cols: 2; batch -> rows`, by default `deferred`."""
    mesh, rules, *policy = (part.strip() for part in layout.split(";"))
    dims = {d for op in named.walk(program.body) for v in (*op.ins, *op.outs) for d in v.type.dims}
    sizes = "".join(f"dim {d.name} = {d.size}\n" for d in dims)
    text = f"{sizes}mesh m = {{ {mesh} }}\nlayout l {{ {rules} }}\n"
    diagnostics = Diagnostics()
    declared = front(Source("layout", text), {}, diagnostics)
    options = Options(layout="l", mesh="m", reduce=(*policy, "deferred")[0], cache=False)
    found = place_named(program, declared, options, diagnostics)
    diagnostics.raise_errors()
    return found


def routed(program: placed.PlacedProgram, _: str) -> placed.PlacedProgram:
    """Every reshard of the program along its cheapest route."""

    def rule(node: placed.Node) -> tuple[placed.Node]:
        if not isinstance(node, placed.Reshard):
            return (node,)
        ends = (node.source.placement, node.target.placement)
        found = route(node.target.type, *ends, program.mesh)
        assert found is not None, "there is no route"
        return (replace(node, route=found),)

    return replace(program, body=rewritten(program.body, rule))


PASSES: dict[str, Pass] = {
    "simplify": Pass(NAMED, NAMED, lambda p, _: simplify(p)),
    "drop_unused": Pass(NAMED, NAMED, lambda p, _: drop_unused(p)),
    "hoist_invariants": Pass(NAMED, NAMED, lambda p, _: hoist_invariants(p)),
    "sum_after_loops": Pass(NAMED, NAMED, lambda p, _: sum_after_loops(p)),
    "cse": Pass(NAMED, NAMED, lambda p, _: cse(p, lambda one, other: True)),
    "gradient": Pass(NAMED, NAMED, gradient),
    "train": Pass(NAMED, NAMED, train),
    "mixed": Pass(NAMED, NAMED, lambda p, dtype: mixed(p, DTYPES[dtype], p.trainable)),
    "retype": Pass(NAMED, NAMED, lambda p, dtype: retype(p, DTYPES[dtype])),
    "place": Pass(NAMED, PLACED, place),
    "route": Pass(UNROUTED, PLACED, routed),
    "lower": Pass(PLACED, DEVICE, lambda p, _: lower(p)),
    "buckets": Pass(DEVICE, DEVICE, lambda p, _: in_buckets(p)),
    "sums_in_place": Pass(DEVICE, DEVICE, lambda p, _: summed_in_place(p)),
    "added_directly": Pass(DEVICE, DEVICE, lambda p, _: added_directly(p)),
    "filled_stacks": Pass(DEVICE, DEVICE, lambda p, _: filled_stacks(p)),
    "overlap": Pass(DEVICE, DEVICE, lambda p, _: overlapped(p)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a file."""

    file: Path
    title: str
    name: str
    argument: str
    program: str
    expected: str

    @property
    def text(self) -> str:
        """The case as it is in its file."""
        head = f"=== {self.title}\n> {self.name} {self.argument}".rstrip()
        return f"{head}\n{self.program}---\n{self.expected}"


_CASE = re.compile(r"> (\w+) ?(.*)\n((?:.*\n)*?)---\n((?:.*\n)*)")


def cases_of(file: Path) -> Iterator[Case]:
    """The cases of a file, in order."""
    _, *parts = re.split(r"^=== ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for part in parts:
        title, _, rest = part.partition("\n")
        found = _CASE.fullmatch(rest)
        assert found, f"{file.name}: no case is written like {title!r}"
        yield Case(file, title, *found.groups())


FILES = matching("tests/ir/passes/*.txt")
CASES = [case for file in FILES for case in cases_of(file)]


def becomes(case: Case) -> str:
    """The text of the pass's result, verified; it is read back to the same text."""
    it = PASSES[case.name]
    program = it.before.read(case.program)
    it.before.verify(program)
    made = it.run(program, case.argument)
    it.after.verify(made)
    text = it.after.text(made)
    assert it.after.text(it.after.read(text)) == text
    return text


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.file.stem}: {c.title}")
def test_pass(case: Case) -> None:
    found = becomes(case)
    if UPDATE:
        text = case.file.read_text(encoding="utf-8")
        text = text.replace(case.text, replace(case, expected=f"{found}\n").text)
        case.file.write_text(f"{text.rstrip()}\n", encoding="utf-8", newline="\n")
        return
    one, other = (text.rstrip().splitlines() for text in (case.expected, found))
    differs = "\n".join(difflib.unified_diff(one, other, "expected", "found", n=99, lineterm=""))
    assert not differs, f"{case.file.name}: {case.title}\n{differs}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_case_of_a_file_is_tried(file: Path) -> None:
    titles = [case.title for case in CASES if case.file == file]
    assert len(set(titles)) == len(titles)
    assert file.read_text(encoding="utf-8").count("\n---\n") == len(titles)


def test_every_pass_has_a_case() -> None:
    assert {case.name for case in CASES} == set(PASSES)
