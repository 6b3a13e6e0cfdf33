"""A printed tree is parsed to the same tree, in canonical form, on lines that are not too long."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from meshdsl.diagnostics import Source
from meshdsl.syntax import ast
from meshdsl.syntax.format import format_source
from meshdsl.syntax.parse import parse
from meshdsl.syntax.printer import WIDTH, print_file
from tests.programs.harness import Case
from tests.programs.strategy import cases
from tests.project import ROOT, matching

from .shape import show, tree
from .test_format import PROGRAM

FILES = matching("**/*.mdsl")
CASES = int(os.environ.get("MESHDSL_CASES", "120"))


def check(file: ast.SourceFile) -> str:
    """The text of a tree, which means the same."""
    text = print_file(file)
    assert list(map(show, tree(text).declarations)) == list(map(show, file.declarations)), text
    assert format_source(Source("printed.mdsl", text)) == text
    assert max(map(len, text.splitlines()), default=0) <= WIDTH
    return text


def test_files_come_back() -> None:
    for path in FILES:
        file, errors = parse(Source(path.name, path.read_text(encoding="utf-8", errors="replace")))
        if not errors:
            check(file)


def test_random_programs_come_back() -> None:
    chosen = settings(
        max_examples=CASES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
        database=None,
    )

    def body(case: Case) -> None:
        check(tree(case.text))

    run = chosen(given(case=cases())(body))
    (run if "MESHDSL_CASES" in os.environ else seed(5)(run))()


def test_every_form_comes_back() -> None:
    check(tree(PROGRAM))


def test_long_rows_of_a_schedule_fill_their_lines() -> None:
    row = " ".join(f"F{m} B{m}" for m in range(40))
    text = check(tree(f"schedule s(stages=1, micro=40) {{ 0: {row} }}"))
    assert len(text.splitlines()) == 6


def test_the_transformer_reads_as_it_was_written() -> None:
    text = (ROOT / "examples/transformer.mdsl").read_text()
    functions = text.index("def attention")
    assert print_file(tree(text)).endswith(text[functions:])


EXPRESSIONS = [
    "x^3 + x^-1.5 - (-x)^2 - (x + 1)^x",
    "-(x * x) / (x / x) - (x - (x - x))",
    "not (x > 0.0 and x < 1.0) or not x == x",
    "not (not x)",
    "--x",
    "(x == y) == z",
    "(x or y) and (x or (y or z))",
    "(x + y)[a -> b]",
    "(-x)[a = 0]",
    'f("a \\"b\\" \\\\ \\n\\t", k=-1e-9, out=2)',
    "0.1 + 1e-9 + 1e22 + 100.0 + 123456789.0",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_brackets_stand_where_they_are_needed(text: str) -> None:
    assert f"  it = {text.replace('not (not x)', 'not not x')}\n" in check(
        tree(f"program p() {{\nit = {text}\n}}")
    )
