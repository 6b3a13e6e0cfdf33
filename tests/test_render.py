"""Diagnostics on the screen and as JSON, and the table of codes."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from meshdsl.carets import print_diagnostics, render, to_json
from meshdsl.codes import CODES, SECTIONS
from meshdsl.diagnostics import Diagnostic, Diagnostics, Related, Source, Span, all_closest
from meshdsl.named import builder
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source
from meshdsl.syntax.parse import parse
from tests.project import ROOT, matching

TEXT = "dim heads = 6\nmesh pod = {\n  tp: 4\n}\n\nlayout megatron {\n  heads -> tp\n}\n"
SOURCE = Source("lm.mdsl", TEXT)


def _span(text: str, source: Source = SOURCE) -> Span:
    start = source.text.index(text)
    return Span(source, start, start + len(text))


DIVIDES = Diagnostic(
    "MD0301",
    "dim `heads` of size 6 does not divide over mesh axis `tp` of size 4",
    _span("heads -> tp"),
    related=(
        Related(_span("heads = 6"), "`heads` is declared here"),
        Related(_span("tp: 4"), "the axis"),
    ),
    help="sizes that divide: 4 or 8",
)

DIVIDES_SHOWN = """\
error[MD0301]: dim `heads` of size 6 does not divide over mesh axis `tp` of size 4
  --> lm.mdsl:7:3
  |
1 | dim heads = 6
  |     --------- `heads` is declared here
. |
3 |   tp: 4
  |   ----- the axis
. |
7 |   heads -> tp
  |   ^^^^^^^^^^^
help: sizes that divide: 4 or 8

"""


def _printed(*diagnostics: Diagnostic, width: int = 80, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    print_diagnostics(diagnostics, console)
    return out.getvalue()


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_two_spans_and_help() -> None:
    assert _printed(DIVIDES, width=100) == DIVIDES_SHOWN


def test_color_only_adds_color() -> None:
    colored = _printed(DIVIDES, width=100, color=True)
    assert colored != DIVIDES_SHOWN
    assert _plain(colored) == DIVIDES_SHOWN


def test_without_a_place() -> None:
    assert _printed(Diagnostic("MD0010", "no file", help="look")) == (
        "error[MD0010]: no file\nhelp: look\n\n"
    )


def test_two_marks_on_one_line_and_tabs() -> None:
    source = Source("t", "\tx = y\n")
    diagnostic = Diagnostic(
        "MD0001", "m", _span("y", source), related=(Related(_span("x", source), "here"),)
    )
    assert _printed(diagnostic).split("\n")[3:6] == [
        "1 |     x = y",
        "  |         ^",
        "  |     - here",
    ]


def test_wide_characters_keep_the_caret_in_place() -> None:
    source = Source("t", "漢字 = ;\n")
    lines = _printed(Diagnostic("MD0002", "m", _span(";", source))).split("\n")
    assert cell_len(lines[3].split(";")[0]) == lines[4].index("^")


@pytest.mark.parametrize("width", [10, 40, 80])
@pytest.mark.parametrize("at", [0, 100, 200, 399])
def test_wide_lines_are_windowed(width: int, at: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(400))
    source = Source("t", text[:at] + "!" + text[at + 1 :])
    diagnostic = Diagnostic("MD0002", "m", Span(source, at, at + 1))
    shown, carets = _printed(diagnostic, width=width).split("\n")[3:5]
    assert shown[carets.index("^")] == "!"
    assert len(shown) <= max(width, 24)


@pytest.mark.parametrize(("at", "other"), [(10, 390), (390, 10)])
def test_what_is_out_of_view_is_marked_on_its_side(at: int, other: int) -> None:
    source = Source("t", "x" * 400)
    related = (Related(Span(source, other, other + 5), "here"),)
    diagnostic = Diagnostic("MD0002", "m", Span(source, at, at + 1), related=related)
    shown, _, mark = _printed(diagnostic, width=40).split("\n")[3:6]
    assert mark.endswith("- here")
    assert mark.index("-") == (len(shown) - 1 if other > at else shown.index("…"))
    assert shown[mark.index("-")] == "…"


def test_a_span_over_lines_is_marked_to_the_end_of_the_first() -> None:
    span = _span("layout megatron {\n  heads")
    assert "| ^^^^^^^^^^^^^^^^^\n" in _printed(Diagnostic("MD0001", "m", span))


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30), st.data())
def test_nothing_from_a_file_steers_the_terminal(
    text: str, name: str, message: str, data: st.DataObject
) -> None:
    source = Source(name, f"\x1b[31m[red]{text}")
    start = data.draw(st.integers(0, len(source.text)))
    span = Span(source, start, data.draw(st.integers(start, len(source.text))))
    diagnostic = Diagnostic(
        "MD0001", message, span, related=(Related(span, message),), help=message
    )
    shown = _printed(diagnostic, width=1000)
    assert not {char for char in shown if char < " " or "\x7f" <= char < "\xa0"} - {"\n"}
    assert "[red]" in shown or span.line > 1
    assert render(diagnostic, 80).plain.endswith("\n")


def test_json() -> None:
    assert to_json(DIVIDES) == {
        "code": "MD0301",
        "severity": "error",
        "message": DIVIDES.message,
        "file": "lm.mdsl",
        "span": {"start": {"line": 7, "column": 3}, "end": {"line": 7, "column": 14}},
        "related": [
            {
                "message": "`heads` is declared here",
                "file": "lm.mdsl",
                "span": {"start": {"line": 1, "column": 5}, "end": {"line": 1, "column": 14}},
            },
            {
                "message": "the axis",
                "file": "lm.mdsl",
                "span": {"start": {"line": 3, "column": 3}, "end": {"line": 3, "column": 8}},
            },
        ],
        "help": "sizes that divide: 4 or 8",
        "fixes": [],
    }
    assert to_json(Diagnostic("MD0010", "m"))["span"] is None


# --- codes -----------------------------------------------------------------------------------


def _used() -> dict[str, str]:
    """Every code in the sources outside of the table, with one file that uses it."""
    sources = matching("meshdsl/**/*.py", "backends/**/*.py")
    return {
        code: path.relative_to(ROOT).as_posix()
        for path in sources
        for code in re.findall(r"MD\d{4}", _without_docstrings(path.read_text(encoding="utf-8")))
    }


def _without_docstrings(text: str) -> str:
    return re.sub(r'"""[^\0]*?"""', "", text)


def test_every_code_in_use_is_explained() -> None:
    missing = {code: path for code, path in _used().items() if code not in CODES}
    assert not missing


def test_every_code_explained_is_in_use() -> None:
    assert not set(CODES) - set(_used())


def test_codes_stand_in_order_in_their_section() -> None:
    assert list(CODES) == sorted(CODES)
    assert {code[:4] for code in CODES} == set(SECTIONS)
    assert all(re.fullmatch(r"MD\d{4}", code) for code in CODES)


def test_explanations_say_what_and_how_out() -> None:
    for code, record in CODES.items():
        assert record.title, code
        assert record.meaning.endswith("."), code
        assert record.way_out.endswith("."), code


# What other languages write is read, and refused where its operands' dims are known.
READING = [c for c, r in CODES.items() if c < "MD01" and c != "MD0018" and r.wrong]


@pytest.mark.parametrize("code", READING)
def test_wrong_example_of_a_syntax_error_is_reported(code: str) -> None:
    _, errors = parse(Source("t", CODES[code].wrong))
    assert errors[-1].code == code


@pytest.mark.parametrize("code", [c for c, r in CODES.items() if c not in READING and r.wrong])
def test_wrong_example_is_reported(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MAX_OPERATORS", 2000)  # the example passes any limit
    diagnostics = Diagnostics()
    check_source(Source("t", CODES[code].wrong), Options(), diagnostics)
    assert {d.code for d in diagnostics} == {code}
    assert all(d.help for d in diagnostics)


def test_of_names_about_equally_close_the_closest_comes_first() -> None:
    assert all_closest("hiddn", ["hidd", "heads", "hidden"]) == ["hidden", "hidd"]
