"""The page as text: offline, whole without JavaScript, and nothing from a file becomes HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest

from meshdsl.pipeline import Options
from meshdsl.report.comparison import totals
from meshdsl.report.page import as_data
from tests.report.comparing import ATTACK, EVIL, columns_of, compared, example_page, page_of
from tests.report.golden import SOME, broken, layouts, source

FEW = {name: ",".join(layouts(name)[:2]) for name in SOME if name != "matmul"}
OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+|url\((?!#)|@import|@font-face|fetch\(|XMLHttp")
SVG = '"http://www.w3.org/2000/svg"'


class Page(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[tuple[str, str]] = []
        self.open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self.open = tag + "".join(f" {k}={v}" for k, v in attrs if k == "id")

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open, data))

    def text(self, opened: str) -> str:
        """All the text that follows an opening tag."""
        return "".join(data for tag, data in self.texts if tag == opened)


@pytest.mark.parametrize("name", FEW)
def test_nothing_comes_from_outside(name: str) -> None:
    text = example_page(name, FEW[name]).replace(SVG, "")
    assert OUTSIDE.findall(text) == []
    found = Page(text)
    assert {"link", "img", "iframe", "object", "base"} & set(found.tags) == set()
    assert {"src", "href", "style"} & {key for key, _ in found.attributes} == set()


def test_only_this_script_and_style_may_run() -> None:
    text = example_page("mlp")
    policy = re.search(r'content="(default-src[^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


@pytest.mark.parametrize("name", FEW)
def test_the_table_says_all_without_a_script(name: str) -> None:
    facts = compared(columns_of(source(name), Options(), FEW[name]), source(name))
    found = Page(example_page(name, FEW[name]))
    said = Counter(data for _, data in found.texts)
    wanted: Counter[str] = Counter()
    for row in facts["rows"]:
        for entry in row["tensors"]:
            wanted[entry["tensor"]] += 1
            wanted.update(cell["named"] for cell in entry["cells"] if cell)
    assert all(said[text] >= count for text, count in wanted.items())
    assert found.tags["tbody"] == len(facts["rows"]) + 2, "the columns, and what is sent in all"
    lines = source(name).text.rstrip("\n").count("\n") + 1
    assert found.tags["li"] == lines
    assert any(data.startswith("Nothing was executed") for _, data in found.texts)


def test_differences_are_marked_in_text() -> None:
    found = Page(example_page("mlp", "hybrid,megatron"))
    facts = compared(columns_of(source("mlp"), Options(), "hybrid,megatron"), source("mlp"))
    entries = [e for row in facts["rows"] for e in (*row["tensors"], *row["routes"])]
    marks = sum(not e["same"] for e in entries) + sum(sum(e["differs"]) for e in entries)
    marks += sum(any(differs) + sum(differs) for _, _, differs in totals(facts))
    assert sum(data.startswith("≠") for _, data in found.texts) == marks


def test_a_file_cannot_write_html() -> None:
    plain = Page(page_of(type(EVIL)("p.mdsl", re.sub("#.*", "", EVIL.text))))
    found = Page(page_of(EVIL))
    assert found.tags == plain.tags
    assert {k for k, _ in found.attributes} == {k for k, _ in plain.attributes}
    assert found.text("script id=data").count("<") == 0
    assert ATTACK in found.text("small")
    assert f"  y = sum[b](x) # ]]> {ATTACK}" in found.text("code")
    assert "\x07" not in page_of(EVIL)
    assert "\u202e" not in page_of(EVIL)


def test_a_file_cannot_fill_in_the_template() -> None:
    assert "{{data}}" in Page(page_of(EVIL)).text("code")


NASTY: list[Any] = ["</script>", "<!--", "&amp;", "\u2028", "é\x00", {"a<b": [1, None]}]


@pytest.mark.parametrize("value", NASTY, ids=ascii)
def test_data_survives_and_stays_data(value: Any) -> None:
    text = as_data(value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_data_is_what_was_compared() -> None:
    found = json.loads(Page(example_page("mlp", "hybrid")).text("script id=data"))
    facts = compared(columns_of(source("mlp"), Options(), "hybrid"), source("mlp"))
    assert found["rows"] == json.loads(json.dumps(facts["rows"]))
    assert [c["letter"] for c in found["columns"]] == ["A", "B", "C"]


def test_a_column_that_is_broken_says_so() -> None:
    found = Page(page_of(broken("megatron"), "hybrid,megatron"))
    assert "not compiled" in found.text("b")
    assert "MD0302 `x`" in "".join(data for _, data in found.texts)
