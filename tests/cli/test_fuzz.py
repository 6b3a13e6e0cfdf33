"""Files that somebody's cat walked over: `check` always answers, and soon."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.report.checks import check_source
from meshdsl.syntax.parse import read_source
from tests.project import matching
from tests.work import counted

FILES = [*matching("examples/*.mdsl"), *matching("tests/errors/*.mdsl")]
TEXTS = [path.read_text(encoding="utf-8").split("#| ")[0] for path in FILES]
WORD = re.compile(r'\s+|\w+|->|"[^"\n]*"|#.*|.')
OWN_WORDS = [
    *"dim mesh layout sbp def program expect on extends at over by param repeat".split(),
    *"recompute return minimize with and or not none keep params grads state".split(),
    *"0 1 2 7 1e999 10^13 99999999999999999999 0.5 x y a i32 bool f64 softmax sum einsum".split(),
    *'( ) [ ] { } , : ; = == -> @ + - * / ^ < ... . " # \\ é \0 \t'.split(" "),
    "\n",
    "[a -> b]",
    "[a = 0]",
    "repeat a {",
    "return",
]
MOST_CALLS = 30_000_000
"""The most calls for a file of some hundred words; the longest example takes 4,000,000."""


def mutated(text: str, chance: random.Random) -> str:
    """The text with some words deleted, doubled, exchanged, or others put in."""
    words = WORD.findall(text)
    if chance.random() < 0.5:
        return "".join(exchanged(words, chance))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(words) + 1)
        end = min(len(words), at + chance.choice([0, 1, 1, 1, 2, 5, 30]))
        new = chance.choice([[], words[at:end] * 2, [chance.choice(OWN_WORDS)], words[end:at:-1]])
        if words and chance.random() < 0.3:
            new = [chance.choice(words)]
        words[at:end] = new
    return "".join(words)


def exchanged(words: list[str], chance: random.Random) -> list[str]:
    """One or two names or numbers become others: mostly still the grammar, seldom the types."""
    places = [i for i, word in enumerate(words) if word.isalnum()]
    names = [words[i] for i in places] + [word for word in OWN_WORDS if word.isalnum()]
    for at in chance.sample(places, min(len(places), chance.randint(1, 2))):
        words[at] = chance.choice(names)
    return words


def check(text: str) -> None:
    """Check a text; if there is nothing wrong with it, it compiles as well."""
    diagnostics = Diagnostics()
    source = Source("fuzz.mdsl", text)
    with counted() as work:
        check_source(source, Options(), diagnostics)
        if not diagnostics.errors and "program" in text:
            compiles(source)
    assert work.calls < MOST_CALLS


def compiles(source: Source) -> None:
    """Assert that what `check` accepts compiles, unless the program must be named."""
    codes = set()
    try:
        made = compile_source(source, Options(), Diagnostics())
        compile(made.text, "fuzz.py", "exec")
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics}
    assert codes <= {"MD0111"}


@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_words(text: str, seed: int) -> None:
    check(mutated(text, random.Random(seed)))


@given(st.sampled_from(TEXTS), st.data())
def test_bytes(text: str, data: st.DataObject) -> None:
    folder = data.draw(st.builds(_folder))
    found = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(found)))
        found[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = folder / "fuzz.mdsl"
    path.write_bytes(found)
    codes = set()
    try:
        check(read_source(path).text)
    except DiagnosticError as error:
        codes = {d.code for d in error.diagnostics}
    assert codes <= {"MD0011", "MD0012"}


_FOLDERS: list[Path] = []


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not _FOLDERS:
        _FOLDERS.append(tmp_path_factory.mktemp("fuzz"))


def _folder() -> Path:
    return _FOLDERS[0]
