"""Names decide nothing: a program whose dims are called otherwise has the same plan."""

from __future__ import annotations

import re

import pytest

from meshdsl.diagnostics import Diagnostic, Source
from meshdsl.placed.printer import print_program
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import parse
from meshdsl.syntax.rename import renamed
from meshdsl.syntax.symbols import symbols
from tests.compiling import compile_text
from tests.project import ROOT


def turned(text: str) -> tuple[str, dict[str, str]]:
    """The text with its dims renamed, last in the alphabet first; their old names by the new."""
    dims = sorted({s.name for s in symbols(parse(Source("t", text))[0]).every if s.kind == "dim"})
    new = {old: f"zq{len(dims) - i:02}" for i, old in enumerate(dims)}
    while True:
        known = symbols(parse(Source("t", text))[0])
        left = [s for s in known.every if s.kind == "dim" and s.name in new and s.definitions]
        if not left:
            return text, {name: old for old, name in new.items()}
        edits = renamed(known, left[0], new[left[0].name])
        assert not isinstance(edits, Diagnostic), edits.message
        text = apply(text, edits)


def plan(text: str, layout: str, policy: str) -> str:
    made = compile_text(text, layout=layout, reduce=policy, cache=False)
    return print_program(made.placed)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("lm", ["sequence"]), ("transformer", None), ("digits", None), ("mlp", None)],
)
def test_a_plan_does_not_depend_on_the_names_of_dims(name: str, layouts: list[str] | None) -> None:
    text = (ROOT / f"examples/{name}.mdsl").read_text()
    other, old = turned(text)
    for layout in layouts or re.findall(r"^layout (\w+)", text, re.MULTILINE):
        found = re.sub(r"\bzq\d\d\b", lambda m: old[m[0]], plan(other, layout, "optimal"))
        assert found == plan(text, layout, "optimal"), layout
