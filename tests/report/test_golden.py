"""The emitted program and the report of each example, and every stage of each kind of program."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable

import pytest
from rich.console import Console

import meshdsl
from meshdsl.device.printer import print_program as print_device
from meshdsl.named.printer import print_program as print_named
from meshdsl.placed.printer import print_program as print_placed
from meshdsl.report.explanation_document import explanation
from meshdsl.report.terminal import print_document
from tests.project import matching
from tests.report.golden import GOLDEN, PRINTED, UPDATE, WHOLE, Case, made, same_as_golden

OWN = {"MESH", "GROUPS", "INPUTS", "PARAMS", "OUTPUTS", "device"}
"""The program's own names in an emitted text; the support library is tested by itself."""


def report_text(case: Case) -> str:
    """The output of `explain` on a screen that is not a terminal."""
    stages = made(case)
    out = io.StringIO()
    document = explanation({**stages.advised, "warnings": []}, {stages.source.name: stages.source})
    print_document(document, Console(file=out, width=100))
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


TEXTS: dict[str, Callable[[Case], str]] = {
    "named": lambda case: print_named(made(case).named),
    "placed": lambda case: print_placed(made(case).placed),
    "device": lambda case: print_device(made(case).device),
    "program": own_text,
    "report": report_text,
}
GOLDENS = {
    f"{case.example}/{case.layout}.{kind}.txt": (case, kind)
    for kind in ("placed", "device", "program", "report")
    for case in (WHOLE if kind in ("program", "report") else PRINTED)
} | {f"{case.example}/named.txt": (case, "named") for case in PRINTED}


@pytest.mark.parametrize("name", GOLDENS)
def test_printed_as_before(name: str) -> None:
    case, kind = GOLDENS[name]
    same_as_golden(name, TEXTS[kind](case))


def test_no_golden_file_is_an_orphan() -> None:
    there = {p.relative_to(GOLDEN).as_posix(): p for p in matching("tests/golden/*/*")}
    orphans = {name: path for name, path in there.items() if name not in GOLDENS}
    if UPDATE:
        for path in orphans.values():
            path.unlink()
        return
    assert not orphans, "no test makes these"
