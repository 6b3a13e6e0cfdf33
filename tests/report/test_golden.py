"""Every printed stage, the emitted program and the report of each example under one layout."""

from __future__ import annotations

import ast
import io

import pytest
from rich.console import Console

import meshdsl
from meshdsl.device.printer import print_program as print_device
from meshdsl.named.printer import print_program as print_named
from meshdsl.placed.printer import print_program as print_placed
from meshdsl.report.explanation import explain, explanation
from meshdsl.report.terminal import print_document
from tests.project import matching
from tests.report.golden import EXAMPLES, GOLDEN, UPDATE, WHOLE, Case, made, same_as_golden

KINDS = ("placed", "device", "program", "report")
OWN = {"MESH", "GROUPS", "INPUTS", "PARAMS", "OUTPUTS", "device"}
"""The program's own names in an emitted text; the support library is tested by itself."""


def report_text(case: Case, width: int) -> str:
    """The output of `explain` on a screen that is not a terminal."""
    stages = made(case)
    out = io.StringIO()
    facts = explain(stages.device, identifiers=stages.identifiers)
    document = explanation(facts, {stages.source.name: stages.source})
    print_document(document, Console(file=out, width=width))
    return out.getvalue()


def own_text(case: Case) -> str:
    """The emitted text less the imports and the support library."""
    text = made(case).text.replace(meshdsl.__version__, "VERSION")
    lines = text.splitlines()
    found = ["\n".join(line for line in lines[:10] if line.startswith("#"))]
    for node in ast.parse(text).body:
        name = node.targets[0] if isinstance(node, ast.Assign) else node
        if {getattr(name, "id", ""), getattr(name, "name", "")} & OWN:
            found.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return "\n\n".join(found) + "\n"


def text_of(case: Case, kind: str) -> str:
    """One printed form of a case."""
    match kind:
        case "placed":
            return print_placed(made(case).placed)
        case "device":
            return print_device(made(case).device)
        case "program":
            return own_text(case)
    return report_text(case, 100)


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
def test_printed_as_before(case: Case, kind: str) -> None:
    same_as_golden(f"{case.example}/{case.layout}.{kind}.txt", text_of(case, kind))


@pytest.mark.parametrize("example", EXAMPLES)
def test_named_program_is_printed_as_before(example: str) -> None:
    first = next(case for case in WHOLE if case.example == example)
    same_as_golden(f"{example}/named.txt", print_named(made(first).named))


def test_no_golden_file_is_an_orphan() -> None:
    wanted = {f"{case.example}/{case.layout}.{kind}.txt" for case in WHOLE for kind in KINDS}
    wanted |= {f"{example}/named.txt" for example in EXAMPLES}
    there = {p.relative_to(GOLDEN).as_posix(): p for p in matching("tests/golden/*/*")}
    orphans = {name: path for name, path in there.items() if name not in wanted}
    if UPDATE:
        for path in orphans.values():
            path.unlink()
        return
    assert not orphans, "no test makes these"
