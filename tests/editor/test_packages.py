"""An editor knows the packages that a file uses: hover, completion, signatures, the outline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lsprotocol import types as lsp

from meshdsl.diagnostics import Diagnostic
from meshdsl.editor.completion import complete, signature
from meshdsl.editor.facts import DocumentFacts, read
from meshdsl.editor.hovers import hover
from meshdsl.editor.navigation import outline, rename
from meshdsl.editor.text import Text
from tests.packages import KERNELS, example

TEXT = f"""\
use {KERNELS}

dim a = 4
weights w {{ v: "v"[a] }}

program p(x[a]) {{
  param v[a]
  y = swiglu(x, v, alpha=1.5)
  return y
}}
"""


@pytest.fixture(autouse=True)
def _there(tmp_path: Path) -> Iterator[None]:
    with example(tmp_path):
        yield


def known(text: str = TEXT) -> DocumentFacts:
    return read(Text.of("f.mdsl", text, "utf-32"))


def hovered(facts: DocumentFacts, word: str) -> str:
    found = hover(facts, None, facts.text.source.text.index(word) + 1)
    assert found is not None
    assert isinstance(found.contents, lsp.MarkupContent)
    return found.contents.value


def offered(text: str, offset: int) -> set[str]:
    return {item.label for item in complete(known(text), text, offset)}


def test_a_file_that_uses_one_is_fine() -> None:
    assert known().diagnostics == ()


def test_hover_says_what_an_operator_and_a_package_are() -> None:
    facts = known()
    assert "swiglu(x, y, alpha=1.0)" in hovered(facts, "swiglu(x")
    assert "sigmoid(alpha" in hovered(facts, "swiglu(x")
    assert "S(b)" in hovered(facts, "swiglu(x")
    assert "meshdsl prove swiglu_kernels" in hovered(facts, KERNELS)


def test_packages_operators_and_options_are_completed() -> None:
    assert offered("use ", 4) == {KERNELS}
    assert offered("use swi\n", 7) == {KERNELS}
    assert offered("dim a = 2\nuse swi\n", 17) == {KERNELS}
    assert "use" in offered("\n", 0)
    assert "swiglu" in offered(TEXT, TEXT.index("swiglu(x"))
    assert "alpha=" in offered(TEXT, TEXT.index("x, v"))
    without = TEXT.replace(f"use {KERNELS}\n", "")
    assert "swiglu" not in offered(without, without.index("swiglu(x"))


def test_a_call_shows_its_form() -> None:
    shown = signature(known(), TEXT, TEXT.index("v, alpha"))
    assert shown is not None
    assert shown.signatures[0].label == "swiglu(x, y, alpha=1.0)"


def test_the_outline_lists_it_and_a_rename_is_refused() -> None:
    facts = known()
    assert [s.name for s in outline(facts)] == [KERNELS, "a", "w", "p"]
    assert isinstance(rename(facts, "f", 6, "other"), Diagnostic)
