"""Fixes of diagnostics: each mends what it belongs to; `fixed` carries out the safe ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from meshdsl.codes import CODES, SECTIONS
from meshdsl.diagnostics import (
    Diagnostic,
    Diagnostics,
    Edit,
    Fix,
    Source,
    Span,
    advice,
    spelled_right,
)
from meshdsl.pipeline import Options
from meshdsl.report.autofix import Fixed, fixed, with_line_ends_of
from meshdsl.report.checks import check_source
from meshdsl.syntax.edits import apply
from tests.cli.test_tried_fixes import ROWS
from tests.project import matching

LARGE = ("MD0008", "MD0017", "MD0117")
"""Codes whose examples are long and have no fixes."""

UNCOVERS = {
    ("selectors", "MD0306"): "the rule, spelled right, is there already",
    ("syntax_semicolon", "MD0002"): "behind the semicolon, the size is missing too",
    ("syntax_seven_errors", "MD0002"): "behind the semicolon, the size is missing too",
    ("layout_settings", "MD0312"): "the setting, spelled right, is there already",
    ("layout_settings", "MD0314"): "the setting, with a value that there is, is there already",
    ("many_mistakes_in_one", "MD0101"): "the dim, once declared, is not of that tensor",
    ("seven_mistakes", "MD0101"): "the dim, once declared, is not the one that is summed",
    ("views", "MD0101"): "the dim, once declared, is not of that tensor",
    ("layout_settings", "MD0313"): "the setting, of what has it, is there already",
    ("states", "MD0140"): "the state, once its value has its type, is assigned twice",
    ("convolution", "MD0220"): "the result, once there is a stride, has the wrong size",
    ("convolution", "MD0222"): "the result, once there is a window, has the wrong size",
    ("joining", "MD0216"): "the result, once the dims are known, has the wrong size",
    ("MD0291", "MD0291"): "the input, once it is of floats, is not in the loss",
}
"""Texts in which a fix shows an error that was behind the one that it mends.

What cannot be read (MD00) hides all that is wrong with what it means: that needs no line here.
"""


LEAST = 0.85
"""The share of the codes that a program's text can show whose help is an edit of it, or more."""

OF_ALL = 0.63
"""The share of all codes whose help is an edit, of a text or of a command, or more."""


def texts() -> Iterator[tuple[str, str]]:
    for path in matching("tests/errors/*.mdsl"):
        if "[MD0604]" not in (text := path.read_text(encoding="utf-8")):
            yield path.stem, text
    for code, record in CODES.items():
        if record.wrong and code not in LARGE:
            yield code, record.wrong


def check(source: Source) -> Diagnostics:
    return checked(source.name, source.text)


@cache
def checked(name: str, text: str) -> Diagnostics:
    """What is told of a text; several tests ask for the same ones."""
    source, diagnostics = Source(name, text), Diagnostics()
    check_source(source, Options(), diagnostics)
    return diagnostics


def said(found: Diagnostics, severity: str | None = None) -> Counter[tuple[str, str]]:
    return Counter((d.code, d.message) for d in found if severity in (None, d.severity))


def test_every_fix_mends_its_diagnostic_and_makes_no_new_error() -> None:
    mended: Counter[str] = Counter()
    shown, uncovered = set(), set()
    for name, text in texts():
        found = check(Source(name, text))
        shown |= {diagnostic.code for diagnostic in found}
        for diagnostic, fix in ((d, fix) for d in found for fix in d.fixes):
            assert fix.title
            assert (diagnostic.help or "").startswith(str(advice(diagnostic.fixes))), name
            assert {edit.span.source.text for edit in fix.edits} == {text}
            after = check(Source(name, apply(text, fix.edits)))
            key = diagnostic.code, diagnostic.message
            assert said(after)[key] < said(found)[key], (name, fix.title)
            new = said(after, "error") - said(found, "error")
            if is_syntax(diagnostic.code) and not any(is_syntax(code) for code, _ in new):
                new.clear()
            if new:
                uncovered.add((name, diagnostic.code))
            assert not new or (name, diagnostic.code) in UNCOVERS, (name, fix.title, new)
            mended[diagnostic.code] += 1
    assert uncovered == set(UNCOVERS)
    assert len(mended) >= LEAST * len(shown), f"{len(mended)} of {len(shown)} codes"
    every = {*mended, *(code for code, _ in ROWS)}
    families = Counter(f"{code[:4]} {SECTIONS[code[:4]]}" for code in every)
    assert len(every) >= OF_ALL * len(CODES), f"{len(every)} of {len(CODES)}: {families}"


MOST_STEPS = 4
"""Fixes in a row that are followed from one text."""


def follow(name: str, texts: tuple[str, ...]) -> None:
    """Carry out the fixes of what the last fix has shown, and of what that shows: no way back."""
    text = texts[-1]
    new = said(checked(name, text)) - said(checked(name, texts[-2]))
    for diagnostic in checked(name, text):
        if (diagnostic.code, diagnostic.message) not in new or len(texts) > MOST_STEPS:
            continue
        for fix in diagnostic.fixes:
            assert fix.is_of(text), (name, fix.title)
            after = apply(text, fix.edits)
            assert after not in texts, f"{name}: `{fix.title}` of {diagnostic.code} leads back"
            follow(name, (*texts, after))


def test_no_fix_leads_back_or_into_the_library() -> None:
    """What follows from a fix is followed, too: neither undoes the other."""
    followed = 0
    for name, text in texts():
        for fix in (fix for d in checked(name, text) for fix in d.fixes):
            follow(name, (text, apply(text, fix.edits)))
            followed += 1
    assert followed > 300


def is_syntax(code: str) -> bool:
    return code.startswith("MD00")


# --- many fixes at once ----------------------------------------------------------------------

PLANTED = """\
dim batch = 4, io = 8;
dim hidden = 16
mesh m = { rows = 2 }
layout l { batch -> row, hiden -> none }
program p(x[batch, io]) {
  param w[io, hiddn]
  param v[io, batch] = zeors()
  h = rleu(einsum(x, w -> [batch, hidden])
  spare = h * 2  # left over
  return h, sum(v)
}
expect l { hh: [batch@rows, hidden] }
"""


def run(text: str) -> Fixed:
    return fixed(Source("t", text), check)


def test_planted_mistakes_are_fixed_in_one_go() -> None:
    found = run(PLANTED)
    assert found.text == (
        "dim batch = 4, io = 8\n"
        "dim hidden = 16\n"
        "mesh m = { rows: 2 }\n"
        "layout l { batch -> rows, hidden -> none }\n"
        "program p(x[batch, io]) {\n"
        "  param w[io, hidden]\n"
        "  param v[io, batch] = zeros()\n"
        "  h = relu(einsum(x, w -> [batch, hidden]))\n"
        "  return h, sum(v)\n"
        "}\n"
        "expect l { h: [batch@rows, hidden] }\n"
    )
    assert len(found.done) == 10
    assert list(found.left) == []


def test_nothing_is_made_worse() -> None:
    for name, text in texts():
        before = check(Source(name, text))
        if not any(fix.safe for d in before for fix in d.fixes):
            continue
        after = run(text)
        assert len(after.left.errors) <= len(before.errors), name
        assert said(check(Source(name, after.text))) == said(after.left)
        if not any(fix.safe for d in after.left for fix in d.fixes[:1]):
            assert run(after.text).text == after.text


def test_a_fix_that_reveals_more_errors_than_there_were_is_not_kept() -> None:
    text = "bad"

    def told(source: Source) -> Diagnostics:
        found = Diagnostics()
        span = Span(source, 0, 3)
        good = Fix("mend", (Edit(span, "worse"),))
        errors = 1 if source.text == text else 2
        found.add(*(Diagnostic("MD0001", str(i), span, fixes=(good,)) for i in range(errors)))
        return found

    result = fixed(Source("t", text), told)
    assert result.text == text
    assert result.done == ()


def test_two_fixes_of_one_place_are_not_mixed() -> None:
    def told(source: Source) -> Diagnostics:
        found = Diagnostics()
        for word in ("one", "two") if source.text == "thre = 1" else ():
            fix = Fix(word, (Edit(Span(source, 0, 4), word),))
            found.add(Diagnostic("MD0001", word, Span(source, 0, 4), fixes=(fix,)))
        return found

    assert fixed(Source("t", "thre = 1"), told).text == "one = 1"


def test_fixes_that_undo_each_other_end() -> None:
    def told(source: Source) -> Diagnostics:
        found = Diagnostics()
        other = "b" if source.text == "a" else "a"
        fix = Fix("turn", (Edit(Span(source, 0, 1), other),))
        found.add(Diagnostic("MD0001", "turn", Span(source, 0, 1), fixes=(fix,)))
        return found

    assert fixed(Source("t", "a"), told).text in ("a", "b")


def test_what_is_equally_close_to_two_names_is_left_to_the_user() -> None:
    span = Span(Source("t", "wp"), 0, 2)
    fixes = spelled_right(span, "wp", ["wpq", "wpk", "other"])
    assert [(fix.edits[0].text, fix.safe) for fix in fixes] == [("wpq", False), ("wpk", False)]
    assert [fix.safe for fix in spelled_right(span, "wp", ["wpq", "wp_long"])] == [True]
    assert spelled_right(Span(Source("t.py", "md.f()"), 0, 6), "wp", ["wpq"]) == ()


# --- line ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text", "wanted"),
    [
        ("a\r\nb\r\n", "a\nc\n", "a\r\nc\r\n"),
        ("\ufeffa\nb", "a\nc", "\ufeffa\nc"),
        ("a\rb\r", "a\nx\nb\n", "a\rx\rb\r"),
        ("a\r\nb\nc\r\n", "a\nb\nd\nc\n", "a\r\nb\nd\r\nc\r\n"),
        ("a\r\nb", "a\n", "a\r\n"),
        ("", "a\n", "a\n"),
        ("# \x0b\x85 signs\r\n", "# \x0b\x85 signs\n", "# \x0b\x85 signs\r\n"),
    ],
)
def test_lines_end_as_before(raw: str, text: str, wanted: str) -> None:
    assert with_line_ends_of(raw, text) == wanted
