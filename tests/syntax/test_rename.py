"""Renaming: the same program under other names, there and back; what would change it is refused."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.printer import print_program
from meshdsl.report.checks import check_source
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import parse
from meshdsl.syntax.rename import renamed
from meshdsl.syntax.symbols import Symbols, symbols
from tests.programs.harness import Case
from tests.programs.strategy import cases
from tests.report.golden import SOME, source

MARK = "_zq"
"""The end of every new name."""

LONG = 1500
"""Characters of a file of which a few names are renamed, and none back: each rename reads it."""


def read(text: str) -> Symbols:
    return symbols(parse(Source("t", text))[0])


def rename(text: str, old: str, new: str, at: int | None = None) -> str | Diagnostic:
    """The text with the symbol whose first definition has the name `old` (or is `at`) renamed."""
    known = read(text)
    offset = text.index(old) if at is None else at
    (symbol, *_) = known.at(offset)
    edits = renamed(known, symbol, new)
    return edits if isinstance(edits, Diagnostic) else apply(text, edits)


def all_renamed(text: str, back: bool, most: int = 1000) -> str:
    """Every symbol renamed, one after the other, to a new name or back to what it was called.

    Of more than `most`, the first ones.
    """
    for _ in range(most):
        known = read(text)
        left = [s for s in known.every if s.definitions and s.name.endswith(MARK) == back]
        if not left:
            return text
        new = left[0].name.removesuffix(MARK) if back else left[0].name + MARK
        edits = renamed(known, left[0], new)
        assert not isinstance(edits, Diagnostic), edits.message
        text = apply(text, edits)
    return text


def found(text: str) -> list[tuple[str, str]]:
    diagnostics = Diagnostics()
    check_source(Source("t", text), Options(), diagnostics)
    return [(d.code, d.message.replace(MARK, "")) for d in diagnostics]


def placed(text: str, options: Options) -> str:
    """The placed program in words; an error as its message."""
    try:
        made = compile_source(Source("t", text), options, Diagnostics(), "placed")
    except DiagnosticError as error:
        return str(error)
    return print_program(made.placed)


@pytest.mark.parametrize("example", SOME)
def test_examples_under_other_names(example: str) -> None:
    text = source(example).text
    other = all_renamed(text, back=False, most=12 if len(text) > LONG else 1000)
    assert found(other) == found(text)
    options = Options(reduce="deferred")
    assert placed(other, options).replace(MARK, "") == placed(text, options)
    if len(text) < LONG:
        assert all_renamed(other, back=True) == text


@seed(1)
@settings(max_examples=3, suppress_health_check=list(HealthCheck), deadline=None)
@given(case=cases())
def test_random_programs_under_other_names(case: Case) -> None:
    text = case.source_text
    other = all_renamed(text, back=False)
    options = Options(mesh=case.mesh, layout="chosen", reduce=case.reduce)
    changed = Options(mesh=case.mesh, layout="chosen" + MARK, reduce=case.reduce)
    assert placed(other, changed).replace(MARK, "") == placed(text, options)
    assert all_renamed(other, back=True) == text


TEXT = """\
dim batch = 4, io = 8
mesh m = { rows: 2 }
layout l { batch -> rows, h: io -> none }
def f[d](x[..., d]) -> [..., d] {
  h = x * 2
  return h
}
program p(x[batch, io]) {
  h = f[io](x)
  y = cast(h, f32) + iota[io] + batch
  return y
}
"""


def test_tensors_of_one_selector_are_renamed_together() -> None:
    changed = rename(TEXT, "h = f", "g")
    assert isinstance(changed, str)
    assert "g: io" in changed
    assert "g = x * 2" in changed
    assert "h" not in set(changed.replace("(", " ").replace(",", " ").split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h = f", "y"),
        ("h = f", "batch"),
        ("io = 8", "batch"),
        ("x[batch, io])", "h"),
        ("batch = 4", "f32"),
        ("f[d]", "cast"),
    ],
)
def test_collisions_are_refused(old: str, new: str) -> None:
    changed = rename(TEXT, old, new)
    assert isinstance(changed, Diagnostic)
    assert changed.code == "MD0130"
    assert changed.help


@pytest.mark.parametrize(("old", "new"), [("f[d]", "iota"), ("y = cast", "batch"), ("d](x", "io")])
def test_names_that_mean_something_else_elsewhere_are_free(old: str, new: str) -> None:
    assert isinstance(rename(TEXT, old, new), str)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h = f", "2h"),
        ("h = f", "h-2"),
        ("h = f", ""),
        ("h = f", "é"),
        ("h = f", "return"),
        ("h = f", "params"),
        ("io = 8", "dim"),
        ("rows: 2", "none"),
        ("h = f", "h" * 300),
    ],
)
def test_words_that_are_no_names_are_refused(old: str, new: str) -> None:
    changed = rename(TEXT, old, new)
    assert isinstance(changed, Diagnostic)
    assert changed.code == "MD0131"


def test_what_the_file_does_not_define_is_refused() -> None:
    changed = rename(TEXT, "cast(h", "to")
    assert isinstance(changed, Diagnostic)
    assert "not defined" in changed.message


def test_a_line_that_cannot_be_read_stops_a_rename_only_of_its_names() -> None:
    damaged = TEXT.replace("  return y", "  z = y + (\n  return y")
    assert isinstance(rename(damaged, "io = 8", "width"), str)
    changed = rename(damaged, "y = cast", "out")
    assert isinstance(changed, Diagnostic)
    assert "cannot be read" in changed.message


WEIGHTS = """dim io = 2, layers = 3
weights hf { under "h.{2 * layers}." { f.w: "w"[io = io] } }
def f(x[io]) -> [io] {
  param w[io]
  return x * w
}
program p(x[io]) {
  repeat layers {
    x = f(x)
  }
  return x
}
"""


def test_entries_of_weights_are_renamed_with_what_they_name() -> None:
    text = WEIGHTS
    for old, new in (("layers", "blocks"), ("io", "width"), ("w[", "weight"), ("f(", "mix")):
        changed = rename(text, old, new, text.index(f" {old}") + 1)
        assert isinstance(changed, str)
        text = changed
    assert 'weights hf { under "h.{2 * blocks}." { mix.weight: "w"[width = width] } }' in text
    assert found(text) == found(WEIGHTS) == []
