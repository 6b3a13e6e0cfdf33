"""Arithmetic with 0 and 1 is left out, and what a file speaks of stays to be read."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.diagnostics import Diagnostics
from meshdsl.named.ir import walk
from tests.compiling import compile_text, named, run_text

TEXT = """
dim a = 4, n = 3
mesh m = { d: 2 }
layout plain { a -> d }
layout other { a -> d LAYOUT }
program p(x[a], y[a]) {
  t[aPIN] = x * 0.0
  BODY
}
EXPECT
"""
SPEAKING = {
    "a rule": {"LAYOUT": ", t: a -> none"},
    "an expectation": {"EXPECT": "expect other on m { t: [a@d] }"},
    "a pin": {"PIN": "@none"},
}


def written(**parts: str) -> str:
    """The text with its parts; those that are not given are empty."""
    text = TEXT
    for part, value in ({"BODY": "return t + y"} | parts).items():
        text = text.replace(part, value)
    for part in ("LAYOUT", "PIN", "EXPECT"):
        text = text.replace(part, "")
    return text


def operators(text: str) -> list[str]:
    return [op.name for op in walk(named(text).body)]


def test_a_sum_with_zeros_is_the_other_term() -> None:
    assert operators(written()) == ["identity"]


@pytest.mark.parametrize("parts", SPEAKING.values(), ids=SPEAKING)
def test_zeros_that_a_file_speaks_of_are_read(parts: dict[str, str]) -> None:
    text = written(**parts)
    assert operators(text) == ["zeros", "add"]
    told = Diagnostics()
    compile_text(text, told, mesh="m", layout="other")
    assert not list(told)


def test_more_that_is_spoken_of_makes_the_program_anew() -> None:
    made = compile_text(written(), mesh="m", layout="plain")
    assert "t" in made.named.unspoken


def test_fewer_that_are_spoken_of_make_the_program_anew() -> None:
    made = compile_text(written(**SPEAKING["a rule"]), mesh="m", layout="plain")
    assert made.named.kept_spoken == {"t"}


NORM = """
dim batch = 4, c = 2
mesh m = { d: 2 }
layout plain { off: batch -> none }
program p(x[batch, c], g[c], b[c]) {
  m = mean[batch](x)
  off = x - m
  return off * rsqrt(mean[batch](square(off)) + 1e-5) * g + b
}
"""


def test_a_norm_whose_parts_are_spoken_of_is_kept() -> None:
    made = compile_text(NORM, mesh="m", layout="plain")
    assert made.named.kept_spoken == {"off"}
    assert "batch_norm_stats" not in {op.name for op in walk(made.named.body)}
    made = compile_text(NORM.replace("off: batch", "x: batch"), mesh="m", layout="plain")
    assert made.named.kept_spoken == frozenset()
    assert "off" in made.named.unspoken
    assert "batch_norm_stats" in {op.name for op in walk(made.named.body)}


CARRIED = {
    "zeros": ("h = t\n  repeat n { h = h * 0.0 }\n  return h", lambda x, y: 0 * x),
    "zeros first": ("h = y\n  repeat n { h = h * 0.0 + x }\n  return h", lambda x, y: x),
    "what is handed on": (
        "h = y\n  g = x\n  repeat n {\n    s = h * 1.0\n    h = g + 0.0\n    g = s / 1.0\n  }\n"
        "  return h - 2.0 * g",
        lambda x, y: x - 2.0 * y,
    ),
    "two that begin alike": (
        "h = (x + y) * 1.0\n  g = (x + y) - 0.0\n  repeat n {\n    h = h * 1.0\n    g = g * 2.0\n"
        "  }\n  return h + g",
        lambda x, y: 9.0 * (x + y),
    ),
}


@pytest.mark.parametrize("case", CARRIED)
def test_what_a_loop_carries_is_what_it_was(case: str) -> None:
    body, expected = CARRIED[case]
    x, y = np.arange(4.0, dtype="float32"), np.arange(1.0, 5.0, dtype="float32")
    (out,) = run_text(written(BODY=body), {"x": x, "y": y}, layout="plain").values()
    np.testing.assert_allclose(out, expected(x, y))


def test_a_parameter_of_a_term_times_0_is_still_trained() -> None:
    """Its gradient is 0; the optimizer updates it, and it decays."""
    program = named("""
dim a = 4
program p(x[a]) {
  param w[a]
  param v[a]
  loss = mean(x * w) + 0.0 * mean(square(v))
  return loss
  minimize loss with adamw(lr=0.1)
}
""")
    assert [p.value.name for p in program.params] == ["w", "v"]
    assert "v.m" in [state.value.name for state in program.states]
