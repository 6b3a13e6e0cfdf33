"""The Pygments lexer: the words of the language, coloured; any text, whole."""

from __future__ import annotations

import html
import random
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pygments.lexer import Lexer
from pygments.token import Error, Keyword, Name, Number, Operator, String

from meshdsl.lexer import (
    AXIS,
    DIM,
    DTYPE,
    FUNCTION,
    OPERATOR,
    SELECTOR,
    MdslLexer,
    highlight_ansi,
    highlight_css,
    highlight_html,
    vocabulary,
)
from tests.project import ROOT, matching

EXAMPLES = matching("examples/**/*.mdsl", "meshdsl/prelude/*.mdsl")
BROKEN = matching("tests/errors/*.mdsl")


def lexed(text: str) -> list[tuple[Any, str]]:
    return list(MdslLexer(stripnl=False, ensurenl=False).get_tokens(text))


def whole(text: str) -> str:
    return "".join(part for _, part in lexed(text))


def words(text: str) -> list[tuple[Any, str]]:
    return [(type_, part) for type_, part in lexed(text) if part.strip()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_have_no_errors(path: Path) -> None:
    text = path.read_text()
    assert [part for type_, part in lexed(text) if type_ is Error] == []
    assert whole(text) == text


def test_broken_text_comes_through_whole() -> None:
    for path in BROKEN:
        text = path.read_text().replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
        assert whole(text) == text, path


def test_any_text_comes_through_whole() -> None:
    drawn = random.Random(7)
    texts = [path.read_text() for path in EXAMPLES]
    for _ in range(300):
        text = drawn.choice(texts)
        start = drawn.randrange(len(text))
        piece = list(text[start : start + drawn.randrange(400)])
        for _ in range(drawn.randrange(8)):
            extra = drawn.choice("\"'@{}[]()#\\\t§é\x00\u2028\v0_.-><=,:\n")
            piece.insert(drawn.randrange(len(piece) + 1), extra)
        assert whole("".join(piece)) == "".join(piece)


CASES = {
    "dim batch = 64, d_ff = 4 * batch": {
        "dim": Keyword.Declaration,
        "batch": DIM,
        "d_ff": DIM,
        "64": Number.Integer,
    },
    "mesh pod = { data: 2, model: n } on h100": {
        "pod": Name.Class,
        "data": AXIS,
        "n": DIM,
        "on": Keyword,
        "h100": Name.Class,
    },
    "layout fsdp extends other { batch -> data, params: model -> (x, y) keep, mlp.h: a -> none }": {
        "fsdp": Name.Class,
        "extends": Keyword,
        "other": Name.Class,
        "batch": DIM,
        "->": Operator,
        "data": AXIS,
        "params": SELECTOR,
        "model": DIM,
        "x": AXIS,
        "y": AXIS,
        "keep": Keyword,
        "mlp": Name,
        "h": Name,
        "a": DIM,
        "none": Keyword.Constant,
    },
    "sbp s { x: (S(0), B), w at y: P(max) }": {
        "S": Keyword.Constant,
        "B": Keyword.Constant,
        "at": Keyword,
        "w": Name,
        "y": Name,
        "max": Keyword.Constant,
    },
    "layout l { a -> pipe } with interleaved[batch](8, chunks=2, recompute=stage, reduce=each)": {
        "with": Keyword,
        "interleaved": Name.Class,
        "batch": DIM,
        "8": Number.Integer,
        "chunks": Name,
        "recompute": Name,
        "stage": Keyword.Constant,
        "each": Keyword.Constant,
    },
    "schedule mine(stages=2, weights=latest) {\n  0: F0 B0@1\n}\ndim schedule = 3": {
        "mine": Name.Class,
        "stages": Name,
        "latest": Keyword.Constant,
        "F0": OPERATOR,
        "@": Name.Decorator,
        "1": Number.Integer,
        "3": Number.Integer,
    },
    'weights hf {\n  (m.w, v): "k.{a}"[b, (c, d) + 1] or e or init\n  ignore "*.x"\n}': {
        "weights": Keyword.Declaration,
        "hf": Name.Class,
        "w": Name,
        "e": Name,
        "c": DIM,
        "or": Operator.Word,
        "init": Keyword.Constant,
        "ignore": Keyword,
    },
    "def f[d](x[..., d], g[d] = 1.0) -> [..., d] {\n  return norm(x) + f[d](g)\n}": {
        "def": Keyword.Declaration,
        "f": FUNCTION,
        "d": DIM,
        "...": DIM,
        "x": Name,
        "1.0": Number.Float,
        "norm": FUNCTION,
    },
    "program p(ids[batch@data]: i32) {\n  h[a@(x, y), b@none] = ids\n}": {
        "p": FUNCTION,
        "ids": Name,
        "batch": DIM,
        "@": Name.Decorator,
        "data": AXIS,
        "i32": DTYPE,
        "x": AXIS,
        "y": AXIS,
        "none": Keyword.Constant,
    },
    "program p(x[a]) {\n  y = softmax[mem](x[(h, k) -> m, seq = ids, n = 0:4 -> t])\n}": {
        "softmax": OPERATOR,
        "mem": DIM,
        "h": DIM,
        "k": DIM,
        "m": DIM,
        "seq": DIM,
        "ids": Name,
        "t": DIM,
    },
    'program p(x[a]) {\n  param w[a]: bf16 = glorot()\n  z = gelu(cast(x, f32), "tanh") and x\n}': {
        "param": Keyword,
        "w": Name,
        "bf16": DTYPE,
        "glorot": OPERATOR,
        "gelu": OPERATOR,
        "f32": DTYPE,
        '"tanh"': String,
        "and": Operator.Word,
    },
    "expect l on m with mesh-tf { h: [a@x], all_reduce over (x, y): 2 }": {
        "expect": Keyword.Declaration,
        "l": Name.Class,
        "m": Name.Class,
        "mesh-tf": Keyword,
        "a": DIM,
        "all_reduce": Name,
        "over": Keyword,
        "y": AXIS,
    },
    "expect for for q with optimal { memory: 1 }": {"q": Name.Class, "with": Keyword},
    "expect l for q { memory: 1 }": {"l": Name.Class, "for": Keyword, "q": Name.Class},
    "program p(x[a]) {\n  y = shift[a](x, by=1)\n}": {"by": Name, "x": Name, "1": Number.Integer},
    "dim a = 1\nh = relu(b)": {"relu": OPERATOR, "b": Name, "h": Name},
}


@pytest.mark.parametrize("text", CASES)
def test_words_are_what_they_stand_for(text: str) -> None:
    found: dict[str, set[Any]] = {}
    for type_, part in words(text):
        found.setdefault(part, set()).add(type_)
    assert {w: found[w] for w in CASES[text]} == {w: {t} for w, t in CASES[text].items()}


def test_bad_words_are_errors() -> None:
    assert (Error, "§") in words("dim a = § 4")
    assert [part for type_, part in words("dim a = 4") if type_ is Error] == []


def test_the_vocabulary_is_that_of_the_language() -> None:
    from meshdsl.grammar import CONTEXTUAL
    from meshdsl.ops.opdef import load_all
    from meshdsl.syntax.tokens import RESERVED

    known = vocabulary()
    every = known.declarations | known.statements | known.links | known.logic
    reserved = every - {*CONTEXTUAL.values()}
    assert (Keyword.Declaration, "schedule") in words("schedule mine(stages=2)")
    assert (Name, "schedule") in words("program p(x[a]) {\n  schedule = x\n}")
    assert len(reserved) == len(RESERVED)
    assert {n for n, o in load_all().items() if o.surface.items != "view"} <= known.operators
    for word in reserved:
        (type_,) = {t for t, part in words(f"{word} ") if part == word}
        assert type_ in Keyword or type_ is Operator.Word


def test_the_entry_point_leads_to_the_lexer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["pygments.lexers"]["mdsl"].partition(":")
    lexer = getattr(import_module(module), name)
    assert issubclass(lexer, Lexer)
    assert {"mdsl", "meshdsl"} <= set(lexer.aliases)
    assert "*.mdsl" in lexer.filenames


def test_html_is_escaped_and_coloured() -> None:
    text = '# <script>\nprogram p(x[a]) {\n  return x < 1.0 and "<b>" == x\n}\n'
    found = highlight_html(text)
    assert "<script>" not in found
    assert "<b>" not in found
    assert '<span class="mdsl-kd">program</span>' in found
    stripped = re.sub(r"<[^>]+>", "", found)
    assert html.unescape(stripped) == text


def test_css_has_a_colour_for_what_html_uses() -> None:
    text = (ROOT / "examples/transformer.mdsl").read_text()
    used = set(re.findall(r'class="(mdsl-\w+)"', highlight_html(text)))
    assert {"mdsl-kd", "mdsl-no", "mdsl-nb", "mdsl-c1"} <= used
    css = highlight_css()
    assert "prefers-color-scheme: dark" in css
    uncoloured = used - set(re.findall(r"\.(mdsl-\w+)", css))
    assert uncoloured <= {"mdsl-p", "mdsl-n", "mdsl-w"}


def test_ansi_is_the_text_with_escapes() -> None:
    text = "dim a = 4\n"
    found = highlight_ansi(text)
    assert "\x1b[" in found
    assert re.sub(r"\x1b\[[0-9;]*m", "", found) == text
