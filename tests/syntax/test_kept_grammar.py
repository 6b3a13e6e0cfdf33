"""The tables of the parser: kept for the next process, read as lark reads them, else made anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lark
import pytest

from meshdsl import grammar
from meshdsl.diagnostics import Source
from meshdsl.disk_cache import write
from meshdsl.grammar.parser import Parse, Token
from meshdsl.syntax.parse import parse
from meshdsl.syntax.recover import parse_tree
from meshdsl.syntax.tokens import lex, significant
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
    assert [word.type for word in grammar.load.__wrapped__().tokens("dim a")] == ["DIM", "NAME"]
    assert len(builds) == 2
    assert json.loads(path.read_text().partition("\n")[2]) != content


def test_trees_are_those_that_lark_makes_of_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = Path(grammar.__file__).with_name("mdsl.lark").read_text("utf-8")
    made = lark.Lark(text, parser="lalr", propagate_positions=True, maybe_placeholders=True)
    fed: list[Token] = []
    feed = Parse.feed

    def fed_too(self: Parse, word: Token) -> None:
        feed(self, word)
        fed.append(word)

    monkeypatch.setattr(Parse, "feed", fed_too)
    for source in SOURCES:
        fed.clear()
        tree, errors = parse_tree(source, significant(lex(source)))
        if errors:
            continue
        other = made.parse_interactive()
        for word in fed[:-1]:
            other.feed_token(lark.Token(word.type, word, word.start_pos, 1, 1, 1, 1, word.end_pos))
        assert _shape(tree) == _shape(other.feed_eof())


def _shape(part: Any) -> Any:
    """A tree of either parser: names, words and offsets."""
    if not hasattr(part, "data"):
        return part and (part.type, str(part), part.start_pos, part.end_pos)
    place = getattr(part, "meta", part)
    offsets = [getattr(place, name, None) for name in ("start_pos", "end_pos")]
    return part.data, offsets, [_shape(child) for child in part.children]
