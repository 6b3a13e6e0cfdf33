"""The tables of the parser are kept for the next process, and never believed where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import lark
import pytest

from meshdsl import grammar
from meshdsl.diagnostics import Source
from meshdsl.disk_cache import write
from meshdsl.syntax.parse import parse
from tests.project import matching

PATHS = matching("examples/**/*.mdsl", "tests/errors/*.mdsl")
SOURCES = [Source("t.mdsl", path.read_text("utf-8")) for path in PATHS]


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per parser that is built from the grammar."""
    made: list[str] = []

    class Counted(lark.Lark):
        def __init__(self, text: str, **options: object) -> None:
            made.append(text)
            super().__init__(text, **options)

    monkeypatch.setenv("MESHDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(lark, "Lark", Counted)
    return made


def test_kept_tables_parse_as_built_ones_do(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, found = grammar.load.__wrapped__, []
    for _ in range(2):
        parser = make()
        monkeypatch.setattr(grammar, "load", lambda parser=parser: parser)
        found.append([parse.__wrapped__(source) for source in SOURCES])  # none is read again
    pairs = zip(PATHS, *found, strict=True)  # some nodes are equal to themselves alone
    different = [p.name for p, a, b in pairs if a != b and repr(a) != repr(b)]
    assert different == []
    assert len(builds) == 1


@pytest.mark.parametrize("content", [1, [], [{}, {}], ["data", "memo"], {"data": 1}])
def test_tables_that_are_none_are_made_anew(
    builds: list[str], tmp_path: Path, content: object
) -> None:
    grammar.load.__wrapped__()
    (path,) = (tmp_path / "grammar").iterdir()
    write("grammar", path.stem, content)
    assert grammar.load.__wrapped__().parse("dim a = 1\n") is not None
    assert len(builds) == 2
    assert json.loads(path.read_text().partition("\n")[2]) != content
