"""Symbols of a file: every name finds its definition and its uses, by the rules of scopes."""

from __future__ import annotations

import re

import pytest

from meshdsl.diagnostics import Source
from meshdsl.syntax.parse import parse, read_source
from meshdsl.syntax.symbols import Symbol, Symbols, symbols
from tests.project import matching

SCOPES = """\
dim batch = 4, io = 8, d = 2, layers = 3
dim part = io / 2

mesh one = { rows: 2, cols: 2 }
mesh two = { rows: 4 }

layout base { batch -> rows }
layout more extends base { h: io -> cols, norm.z: io -> none, norm_2.z: io -> cols }
layout rest { params: io -> cols, d_h: io -> none, w.m: io -> rows, norm: io -> none }

sbp manual { x: (S(0), B), x at h: B }

def norm[d](x[..., d], scale = 1.0) -> [..., d] {
  z = x * scale + d
  return z
}

program p(x[batch@rows, io], ids[batch]: i32) {
  param w[io]
  h = norm[io](x, scale=2.0) * w
  repeat layers {
    local = norm[io](h)
    h = h + local
  }
  repeat layers {
    local = h * 2
    h = local
  }
  g = h[io = 0:part -> part]
  k = iota[batch] + ids
  h, g = both(h, k[batch = ids])
  return h, g
  minimize mean(h) with sgd(lr=cosine(0.1, steps=batch))
}

expect base for p on one with immediate {
  h: [batch@rows, io]
  all_reduce over (rows, cols): batch
}
"""


def read(text: str) -> Symbols:
    return symbols(parse(Source("t", text))[0])


def shown(symbol: Symbol) -> tuple[list[int], list[int]]:
    """The lines of its definitions and of its references."""
    return [s.line for s in symbol.definitions], [s.line for s in symbol.references]


def found(known: Symbols, kind: str, name: str, inside: str | None = None) -> list[Symbol]:
    return [
        s
        for s in known.every
        if (s.kind, s.name) == (kind, name) and (s.inside.name.text if s.inside else None) == inside
    ]


EXPECTED: dict[tuple[str, str, str | None], list[tuple[list[int], list[int]]]] = {
    ("dim", "batch", None): [([1], [7, 18, 18, 30, 31, 33, 37, 38])],
    ("dim", "d", None): [([1], [])],
    ("dim", "d", "norm"): [([13], [13, 13, 14])],
    ("dim", "part", None): [([2], [29, 29])],
    ("mesh", "one", None): [([4], [36])],
    ("axis", "rows", None): [([4, 5], [18, 7, 9, 37, 38])],
    ("layout", "base", None): [([7], [8, 36])],
    ("sbp", "manual", None): [([11], [])],
    ("function", "norm", None): [([13], [20, 22, 8, 8, 9])],
    ("program", "p", None): [([18], [36])],
    ("argument", "scale", "norm"): [([13], [14, 20])],
    ("argument", "x", "norm"): [([13], [14])],
    ("input", "x", "p"): [([18], [20, 11, 11])],
    ("param", "w", "p"): [([19], [20, 9])],
    ("tensor", "z", "norm"): [([14], [15, 8, 8])],
    ("tensor", "local", "p"): [([22], [23]), ([26], [27])],
    ("tensor", "g", "p"): [([29, 31], [32])],
    ("operator", "both", None): [([], [31])],
    ("operator", "iota", None): [([], [30])],
}
"""Lines of definitions and references, where they are worth telling."""


@pytest.mark.parametrize("key", EXPECTED, ids=lambda key: f"{key[0]}-{key[1]}-{key[2]}")
def test_definitions_and_references(key: tuple[str, str, str | None]) -> None:
    known = read(SCOPES)
    lines = [(sorted(d), sorted(r)) for d, r in map(shown, found(known, *key))]
    assert lines == [(sorted(d), sorted(r)) for d, r in EXPECTED[key]]


def test_a_carried_name_is_one_symbol() -> None:
    (h,) = found(read(SCOPES), "tensor", "h", "p")
    assert [s.line for s in h.definitions] == [20, 23, 27, 31]
    assert {s.line for s in h.references} == {8, 9, 11, 22, 23, 26, 29, 31, 32, 33, 37}
    (cotangent,) = [s for s in h.references if s.line == 9]
    assert cotangent.text == "h"


def test_lookup_by_offset() -> None:
    known = read(SCOPES)
    at = SCOPES.index("scale=2.0")
    for offset in (at, at + 2, at + len("scale")):
        assert [s.name for s in known.at(offset)] == ["scale"]
    assert known.at(SCOPES.index("{ rows")) == ()
    assert known.at(len(SCOPES)) == ()
    second = SCOPES.index("norm_2") + 1
    place = known.place(second)
    assert place is not None
    assert place[0].text == "norm"


def visible(known: Symbols, before: str) -> dict[str, str]:
    offset = known.file.span.source.text.index(before)
    return {s.name: s.kind for s in known.visible(offset)}


def test_visible_names() -> None:
    known = read(SCOPES)
    first = visible(known, "h = h + local")
    assert first["local"] == "tensor"
    assert "g" not in first
    assert "z" not in first
    assert visible(known, "g = h[io")["local"] == "tensor"  # a stack
    assert {"x": "argument", "scale": "argument", "rows": "axis"}.items() <= (
        visible(known, "z = x").items()
    )
    inner = [s for s in known.visible(SCOPES.index("z = x")) if s.name == "d"]
    assert [s.inside is None for s in inner] == [False]


def test_every_name_of_a_file_is_a_symbol() -> None:
    for path in matching("examples/*.mdsl", "tests/errors/*.mdsl"):
        known = symbols(parse(read_source(path))[0])
        for symbol in known.every:
            for span in symbol.places:
                assert span.text == symbol.name, span
                assert symbol in known.at(span.start), span
                assert symbol in known.at(span.end), span


@pytest.mark.parametrize("cut", range(20, len(SCOPES), 90))
def test_damaged_files_have_the_symbols_that_can_be_read(cut: int) -> None:
    known = read(SCOPES[:cut] + " %( " + SCOPES[cut + 3 :])
    assert {s.name for s in known.every if s.kind == "dim"} & {"batch", "part", "io"}
    for symbol in known.every:
        assert 0 <= symbol.region.start <= symbol.region.end <= len(SCOPES) + 2
    assert known.visible(len(SCOPES))
    words = set(re.findall(r"\w+", SCOPES[:cut] + " " + SCOPES[cut + 3 :]))
    assert {s.name for s in known.every} <= words | {"norm", "h"}


@pytest.mark.parametrize("end", ["", "\n\ndim other = 2\n"])
def test_what_an_unclosed_program_computes_is_visible_to_its_end(end: str) -> None:
    text = "dim a = 4\nprogram p(x[a]) {\n  repeat a {\n    y = x * 2\n    "
    known = read(text + end)
    assert {"a", "x", "y"} <= {s.name for s in known.visible(len(text))}
    if end:
        assert "y" not in {s.name for s in known.visible(len(text + end))}
