"""Syntax errors: which, where, how many, and what is left of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostic, DiagnosticError, Source
from meshdsl.syntax.parse import parse, read_source
from tests.work import counted

from .shape import show

SEVEN = """\
dim a = ;
dim dim = 3
mesh m = { x: 2, y 3 }
layout l {
  a -> x
  b - y
}
program p(x[a]) {
  h = relu(x
  y = h +
  z = x[a -> ]
  return z
}
dim last = 1
"""

# In a program, the case is on line 2, indented by two.
IN_PROGRAM = {
    "relu(x)": ("MD0001", (2, 7), "y = relu"),
    "y += b": ("MD0018", (2, 5), "y = y + b"),
    "y == 3": ("MD0001", (2, 5), "write `=`"),
    "y = (a = b)": ("MD0001", (2, 10), "write `==`"),
    "y = a\n    + b": ("MD0005", (3, 5), "parentheses"),
    "y = a +": ("MD0005", (2, 10), "parentheses"),
    "y = a < b < c": ("MD0006", (2, 13), "compare twice"),
    "y = x[]": ("MD0015", (2, 8), None),
    "y = x[a + 1]": ("MD0001", (2, 11), "seq = 0"),
    "y = f(x -> a)": ("MD0001", (2, 14), "brackets"),
    "y = f(a=1, 2)": ("MD0015", (2, 14), "first"),
    "y = f(a=1, a=2)": ("MD0015", (2, 14), None),
    "y = x;": ("MD0002", (2, 8), "ends a statement"),
    "y = x × 2": ("MD0002", (2, 9), "`*`"),
    "y = 1e999": ("MD0007", (2, 7), None),
    "y = 2x": ("MD0007", (2, 7), "digit"),
    'y = f(pad="same)': ("MD0009", (2, 13), 'add `"`'),
    r'y = f(pad="a\q")': ("MD0009", (2, 15), r"write `\\q`"),
    "y = naïve": ("MD0013", (2, 7), "letters"),
    "param = 3": ("MD0004", (2, 3), "param_"),
    "param w[a] = 0.5": ("MD0001", (2, 16), "zeros()"),
    "minimize loss": ("MD0001", (2, 16), "adam"),
    "minimize loss with adam() { lr = 1, w: frozen }": ("MD0001", (2, 31), "NAME: lr = 1"),
    "minimize loss with adam() { w: lr 1, v: frozen }": ("MD0001", (2, 37), "base: frozen"),
    "repeatt layers { y = x }": ("MD0001", (2, 11), "`repeat`"),
    "dim b = 3": ("MD0014", (2, 3), "out of the braces"),
    "y = relu(x": ("MD0003", (2, 11), "add `)`"),
    "y = relu(x]": ("MD0003", (2, 13), None),
    "y = {": ("MD0001", (2, 7), None),
}

AT_TOP = {
    "dim a = ;": ("MD0002", (1, 9), "ends a statement"),
    "dim dim = 3": ("MD0004", (1, 5), "dim_"),
    "dim é = 3": ("MD0013", (1, 5), "letters"),
    "dim a =": ("MD0001", (1, 7), None),
    "dim a: 4": ("MD0001", (1, 6), None),
    "dim a = 4 * (b + 1": ("MD0003", (1, 13), "add `)`"),
    "dim a = 3 b = 4": ("MD0001", (1, 11), None),
    "dim a = 1,\n    b = 2": ("MD0001", (2, 5), "write `dim b …`"),
    "mesh m { a: 2 }": ("MD0001", (1, 8), None),
    "mesh m = { a: 2": ("MD0003", (1, 15), "add `}`"),
    "mesh m = { a: 2, , b: 3 }": ("MD0001", (1, 18), None),
    "layout l { a -> x kept }": ("MD0001", (1, 19), None),
    "expect l { a.b over x: 3 }": ("MD0001", (1, 14), "placement"),
    "expect l of p on m { memory: 1 }": ("MD0001", (1, 10), "expect layout for program"),
    "layout l { a -> x } with": ("MD0001", (1, 24), "with one_f_one_b[batch](8)"),
    "layout l { a -> x } with 3": ("MD0001", (1, 26), "with one_f_one_b[batch](8)"),
    "layout l { a -> x } with f[b](2) on m": ("MD0001", (1, 34), None),
    "schedule s { 0: F0 }": ("MD0001", (1, 12), "schedule mine("),
    "schedule s(2, 4) { 0: F0 }": ("MD0015", (1, 11), "schedule mine("),
    "schedule (stages=2) { 0: F0 }": ("MD0001", (1, 1), "schedule mine("),
    "schedule s(stages=2) {\n  F0 F1\n}": ("MD0001", (2, 3), "0: F0"),
    "schedule s(stages=2) {\n  0: F0, F1\n  1: F0\n}": ("MD0001", (2, 8), "blanks"),
    "schedule s(stages=2) {\n  0: F0 F1 + 2\n  1: F0\n}": ("MD0001", (2, 12), "blanks"),
    "schedule s(stages=2) {\n  0: F0\n  1 F0\n}": ("MD0001", (3, 5), "blanks"),
    "schedule s(stages=2) {\n  0: F0@k\n}": ("MD0001", (2, 9), "blanks"),
    "schedule s(stages=2) {\n  0: F0\nmesh m = { a: 2 }": ("MD0003", (3, 1), "add `}`"),
    "program p(x[a]) {\n  y = x\nschedule s(stages=1) { 0: F0 }": (
        "MD0003",
        (3, 1),
        "add `}`",
    ),
    "prgram p(x[a]) {\n  y = x\n}": ("MD0001", (1, 1), "`program`"),
    "x = 3": ("MD0014", (1, 1), "program"),
    "return x": ("MD0014", (1, 1), "program"),
    "x = 3\n  y = 4\n}": ("MD0014", (1, 1), "program"),
    "}": ("MD0003", (1, 1), None),
    "program p(x[a]) {\n  y = x": ("MD0003", (2, 7), "add `}`"),
    "program p(x[a]) {\n  y = x\n\n# end\n": ("MD0003", (2, 7), "add `}`"),
    "program p(x[a]) {\n  y = x\ndim b = 3": ("MD0003", (3, 1), "add `}`"),
    "program p(x[a) {\n  y = x\n}": ("MD0003", (1, 14), None),
}


def _errors(text: str) -> tuple[Diagnostic, ...]:
    return parse(Source("t", text))[1]


def _check(error: Diagnostic, code: str, place: tuple[int, int], way_out: str | None) -> None:
    assert error.span is not None
    assert (error.code, (error.span.line, error.span.column)) == (code, place), error
    assert way_out is None or (error.help is not None and way_out in error.help), error.help


@pytest.mark.parametrize(("text", "wanted"), IN_PROGRAM.items())
def test_error_in_a_program(text: str, wanted: tuple[str, tuple[int, int], str | None]) -> None:
    file, errors = parse(Source("t", f"program p(x[a]) {{\n  {text}\n  return x\n}}\ndim z = 1\n"))
    assert len(errors) == 1, errors
    _check(errors[0], *wanted)
    program, after = map(show, file.declarations)
    assert program.endswith("return x }")
    assert after == "dim z = 1"


@pytest.mark.parametrize(("text", "wanted"), AT_TOP.items())
def test_error_at_the_top(text: str, wanted: tuple[str, tuple[int, int], str | None]) -> None:
    errors = _errors(text)
    assert len(errors) == 1, errors
    _check(errors[0], *wanted)


def test_a_schedule_with_a_broken_row_is_left_out() -> None:
    text = "dim a = 1\nschedule s(stages=2) {\n  0: F0 ;\n  1: F0 + \n}\ndim b = 2\n"
    file, errors = parse(Source("t", text))
    assert [e.span.line for e in errors if e.span] == [3, 4]
    assert [show(d) for d in file.declarations] == ["dim a = 1", "dim b = 2"]


def test_seven_errors() -> None:
    file, errors = parse(Source("t", SEVEN))
    assert [e.span.line for e in errors if e.span] == [1, 2, 3, 6, 9, 10, 11]
    assert [show(d) for d in file.declarations] == [
        "mesh m = x: 2 on None",
        "layout l extends None: a -> (x)",
        "program p(x[a]) { return z }",
        "dim last = 1",
    ]


def test_broken_header_still_reads_the_body() -> None:
    errors = _errors("program p(x[a) {\n  y = ;\n  repeat 3 {\n    z = ;\n  }\n}\ndim a = ;")
    assert [e.span.line for e in errors if e.span] == [1, 2, 3, 4, 7]


def test_error_inside_brackets_over_lines() -> None:
    file, errors = parse(Source("t", "program p() {\n  y = f(a,\n    b b,\n    c\n  )\n  z = 1\n}"))
    assert [e.span.line for e in errors if e.span] == [3]
    assert [show(d) for d in file.declarations] == ["program p() { z = 1 }"]


def test_many_errors_are_cut_off() -> None:
    errors = _errors("dim a = ;\n" * 50)
    assert [e.code for e in errors] == ["MD0002"] * 20 + ["MD0016"]
    assert errors[-1].severity == "note"


DEEP = {
    "parentheses": "(" * 10_000 + "1" + ")" * 10_000,
    "brackets that stay open": "(" * 10_000,
    "brackets of all kinds": "([{" * 10_000,
    "a long sum": "+".join("a" * 5000),
    "a tower of powers": "^".join("a" * 5000),
    "signs": "-" * 5000 + "a",
    "views": "x" + "[a -> b]" * 5000,
    "parentheses and sums": "(a + " * 99 + "a" + ")" * 99 + " + a" * 120,
}


@pytest.mark.parametrize("kind", DEEP)
def test_too_deep(kind: str) -> None:
    with counted() as work:
        errors = _errors(f"dim a = {DEEP[kind]}\n")
    assert [e.code for e in errors] == ["MD0008"]
    assert work.calls < 200 * len(DEEP[kind]) + 20_000


def test_deep_but_fine() -> None:
    assert not _errors(f"dim a = {'(' * 100}{'+'.join('a' * 200)}{')' * 100}\n")


@pytest.mark.parametrize("text", ["1" * 5000, "1" * 21, "_".join("1" * 5000)])
def test_long_number(text: str) -> None:
    (error,) = _errors(f"dim a = {text}\n")
    assert error.code == "MD0007"
    assert len(error.message) < 80
    assert not _errors("dim a = " + "1" * 20)


# --- files -----------------------------------------------------------------------------------


def _write(folder: Path, data: bytes) -> Path:
    path = folder / "f.mdsl"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [b"dim a = 1\r\ndim b = 2\r\n", b"\xef\xbb\xbfdim a = 1\ndim b = 2", b"dim a = 1\rdim b = 2"],
    ids=["crlf", "bom", "cr"],
)
def test_line_ends_and_bom(data: bytes, tmp_path: Path) -> None:
    source = read_source(_write(tmp_path, data))
    file, errors = parse(source)
    assert not errors
    assert [d.span.line for d in file.declarations] == [1, 2]
    assert "\r" not in source.text


BAD_BYTES = {
    b"dim a = 1\ndim b\0 = 2": ("MD0012", (2, 6), "NUL"),
    b"dim a = 1\ndim \xff = 2": ("MD0011", (2, 5), "offset 14"),
    b"\xef\xbb\xbfdim a\r\n\xe4\xb8": ("MD0011", (2, 1), "offset 10"),
}


@pytest.mark.parametrize(("data", "wanted"), BAD_BYTES.items(), ids=["nul", "latin", "cut off"])
def test_bad_bytes(data: bytes, wanted: tuple[str, tuple[int, int], str], tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_source(_write(tmp_path, data))
    (error,) = caught.value.diagnostics
    _check(error, wanted[0], wanted[1], None)
    assert wanted[2] in error.message


@pytest.mark.parametrize("name", [".", "missing.mdsl", "a\0b", "no/such/folder.mdsl"])
def test_unreadable(name: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_source(tmp_path / name)
    assert caught.value.diagnostics[0].code == "MD0010"
