"""Lines of any length: the work grows as they do, and what is shown of them does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshdsl.carets import render
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, Source
from meshdsl.named.program_choice import build, choose_program
from meshdsl.pipeline import front
from meshdsl.report.document import SourceLine, plain
from meshdsl.report.terminal import source_line
from meshdsl.syntax.format import format_source
from meshdsl.syntax.parse import parse
from meshdsl.syntax.tokens import MAX_NAME, MAX_WORDS
from tests.work import calls

HEAD = "dim a = 2\nprogram p(x[a]) { y = "
TAIL = "\n  return x\n}\n"

LINES: dict[str, Callable[[int], str]] = {
    "a comment": lambda n: f"dim a = 2 # {'é' * n}\n",
    "a sum": lambda n: f"dim a = {'1 + ' * n}1\n",
    "arguments": lambda n: f"{HEAD}f({'x, ' * n}x){TAIL}",
    "bad characters": lambda n: f"dim a = {';' * n}\n",
    "bad words": lambda n: f"dim a = {'; ' * n}\n",
    "a string": lambda n: f'{HEAD}gelu(x, "{"s" * n}"){TAIL}',
    "escapes": lambda n: f'{HEAD}gelu(x, "{chr(92) * 2 * n}"){TAIL}',
    "an open string": lambda n: f'{HEAD}gelu(x, "{"s" * n}){TAIL}',
    "a name": lambda n: f"{HEAD}{'y' * n}{TAIL}",
    "a foreign name": lambda n: f"dim a = {'é' * n}\n",
    "digits": lambda n: f"dim a = {'1' * n}\n",
    "no number": lambda n: f"dim a = 1{'x' * n}\n",
    "spaces before an error": lambda n: f"dim a = {' ' * n};\n",
    "an error before spaces": lambda n: f"dim a = ;{' ' * n}\n",
    "dims": lambda n: "dim " + ", ".join(f"a{i} = {i + 1}" for i in range(n)) + "\n",
    "dims made of the first": lambda n: (
        "dim a = 1, " + ", ".join(f"a{i} = a + {i}" for i in range(n)) + "\n"
    ),
    "dims each made of the next": lambda n: (
        "dim " + ", ".join(f"a{i} = a{i + 1}" for i in range(n)) + f", a{n} = 2\n"
    ),
    "dims without commas": lambda n: "dim " + " ".join(f"a{i} = 2" for i in range(n)) + "\n",
    "dims declared twice": lambda n: "dim " + ", ".join(["a = 2"] * n) + "\n",
    "rules": lambda n: "layout l { " + ", ".join(f"a{i} -> b" for i in range(n)) + " }\n",
    "broken rules": lambda n: "layout l { " + ", ".join(["a > b"] * n) + " }\n",
    "brackets": lambda n: f"dim a = {'(' * n}\n",
    "unknown tensors": lambda n: HEAD + "x" + TAIL.replace("x", ", ".join(["q"] * n)),
}


def mistakes(text: str) -> list[Diagnostic]:
    """Everything that is wrong with a text, through to the named program."""
    source, found = Source("long.mdsl", text), Diagnostics()
    try:
        declarations = front(source, {}, found)
        if declarations.programs:
            build(declarations, choose_program(declarations, None), (), found)
    except DiagnosticError as error:
        found.add(*error.diagnostics)
    return list(found)


def shown(text: str) -> list[str]:
    return [render(d).plain for d in mistakes(text)[:20]]


@pytest.mark.parametrize("name", LINES)
def test_work_grows_as_the_line_does(name: str) -> None:
    line = LINES[name]
    shown(line(100))  # what is loaded once
    few, many = (calls(lambda n=n: shown(line(n))) for n in (200, 800))  # type: ignore[misc]
    assert many <= 4.4 * few + 2000


@pytest.mark.parametrize("name", LINES)
def test_what_is_shown_does_not_grow(name: str) -> None:
    for text in shown(LINES[name](3000)):
        assert max(map(len, text.split("\n"))) <= 500, text


@pytest.mark.parametrize("name", ["a comment", "dims", "rules"])
def test_formatting_grows_as_the_line_does(name: str) -> None:
    sources = [Source("long.mdsl", LINES[name](n)) for n in (100, 200, 800)]
    format_source(sources[0])  # what is loaded once
    few, many = (calls(lambda s=s: format_source(s)) for s in sources[1:])  # type: ignore[misc]
    assert many <= 4.4 * few + 2000


def _source_line(source: Source) -> str:
    return plain(source_line(SourceLine("1", source.excerpt(1)), 60))


def test_a_report_shows_the_beginning_of_a_line() -> None:
    sources = [Source("t", f"y = x # {'漢' * n}") for n in (500, 50_000)]
    lines = [_source_line(s) for s in sources]
    assert lines[0] == lines[1]
    assert lines[0].startswith("1 | y = x # 漢")
    assert lines[0].endswith("漢…")
    work = [calls(lambda s=s: _source_line(s)) for s in sources]  # type: ignore[misc]
    assert work[1] == work[0]


# --- limits ----------------------------------------------------------------------------------


def test_a_text_of_too_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdsl.syntax.tokens.MAX_WORDS", 100)
    fine = "dim " + ", ".join(f"a{i} = 2" for i in range(24))
    assert not parse(Source("t", fine))[1]
    (error,) = parse(Source("t", fine.replace(", ", " + 1, ")))[1]
    assert error.code == "MD0017"
    assert error.span is not None
    assert error.span.text == fine.replace(", ", " + 1, ")[error.span.start : error.span.end]
    assert MAX_WORDS == 500_000


def test_words_beyond_the_limit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdsl.syntax.tokens.MAX_WORDS", 100)
    few, many = (calls(lambda n=n: mistakes(f"dim a = {'1 + ' * n}1")) for n in (200, 9000))  # type: ignore[misc]
    assert many == few


def test_a_name_that_is_too_long() -> None:
    longest = "a" * MAX_NAME
    assert not parse(Source("t", f"dim {longest} = 3"))[1]
    (error,) = parse(Source("t", f"dim {longest}a = 3"))[1]
    assert error.code == "MD0017"
    assert error.message == "a name of 256 characters; it may have 255"
