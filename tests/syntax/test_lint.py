"""Names that nothing uses, inputs that are never read, layouts that say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostic, Source
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import parse
from meshdsl.syntax.unused_names import lint_symbols
from tests.project import matching

HEAD = "dim a = 4, b = 8\n"


def lints(text: str) -> tuple[Diagnostic, ...]:
    return lint_symbols(parse(Source("t", text))[0])


def codes(text: str) -> list[str]:
    return [d.code for d in lints(text)]


def program(body: str, head: str = "x[a, b]") -> str:
    return f"{HEAD}program p({head}) {{\n{body}\n}}\n"


CLEAN = [
    program("  return x"),
    program("  _y = x * 2\n  return x"),
    program("  u, v = both(x)\n  return u"),
    program("  repeat a {\n    x = x + 1\n  }\n  return x"),
    program("  return x", "x[a, b], _other[a]"),
    HEAD + "def f[d](x[..., d]) { return sum[d](x) }\nprogram p(x[a, b]) { return f[b](x) }\n",
    program("  dx = grad(sum(x), x)\n  return dx"),
    program("  loss = sum(x)\n  return x\n  minimize loss with sgd(lr=0.1)"),
    HEAD + "layout one { a -> rows }\nlayout two { b -> rows }\nprogram p(x[a, b]) { return x }\n",
    HEAD + "layout none_ {}\nprogram p(x[a, b]) { return x }\n",
]


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_used_or_hidden_is_not_reported(text: str) -> None:
    assert codes(text) == []


REPORTED = [
    (program("  y = x * 2\n  return x"), "MD0132"),
    (program("  y = x * 2\n  return x") + "layout l { y: a -> none }\n", "MD0132"),
    (program("  u, v = both(x)\n  return x").replace("u, v", "v, v"), "MD0132"),
    (program("  param w[a]\n  return x"), "MD0133"),
    (program("  return x", "x[a, b], y[a]"), "MD0133"),
    (HEAD + "def f(x[a], y[b]) { return x }\n", "MD0133"),
    (program("  return x", "x[a]"), "MD0134"),
    (HEAD + "def f[d](x[a, b]) { return x }\n", "MD0134"),
    (HEAD + "layout one { a -> r, b -> s }\nlayout two { b -> s, a -> r }\n", "MD0135"),
    (HEAD + "layout one { a -> r, b -> s }\nlayout two extends one {}\n", "MD0135"),
    (program("  x = y * 2\n  return x", "x[a, b], y[a, b]"), "MD0136"),
    (program("  param x[a, b]\n  return x"), "MD0136"),
]


@pytest.mark.parametrize(("text", "code"), REPORTED)
def test_what_has_no_effect_is_reported_once_with_a_fix(text: str, code: str) -> None:
    (found,) = lints(text)
    assert (found.code, found.severity) == (code, "warning")
    assert found.help
    for fix in found.fixes:
        after = apply(text, fix.edits)
        assert parse(Source("t", after))[1] == ()
        assert found.message not in {d.message for d in lints(after)}


REMOVED = [
    (program("  # why\n  y = x * 2  # what\n  return x"), program("  # why\n  return x")),
    ("dim a = 4, b = 8, c = 3\n", "dim a = 4, b = 8\n"),
    ("dim c = 3, a = 4, b = 8\n", "dim a = 4, b = 8\n"),
    ("dim a = 4, c = 3, b = 8\n", "dim a = 4, b = 8\n"),
    ("dim c = 3  # spare\ndim a = 4, b = 8", "dim a = 4, b = 8"),
    ("dim a = 4, b = 8\ndim c = 3,", "dim a = 4, b = 8\n"),
]


@pytest.mark.parametrize(("text", "wanted"), REMOVED)
def test_removal_takes_the_line_and_leaves_the_rest(text: str, wanted: str) -> None:
    use = "" if "program" in text else "\ndef f(x[a, b]) { return x }\n"
    (found,) = lints(text.rstrip("\n") + use if use else text)
    edits = found.fixes[0].edits
    after = apply(edits[0].span.source.text, edits)
    assert after == (wanted.rstrip("\n") + use if use else wanted)


@pytest.mark.parametrize("path", matching("examples/*.mdsl", "tests/seeds/*.mdsl"), ids=str)
def test_files_of_the_project_are_clean(path: Path) -> None:
    assert codes(path.read_text(encoding="utf-8")) == []
