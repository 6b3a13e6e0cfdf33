"""Operators of the backward pass say what they are for: the verifiers refuse any that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshdsl.ir.program import Origin, every
from meshdsl.named import verify
from meshdsl.named.ir import NamedLoop, NamedProgram
from meshdsl.named.origins import with_kept_origins
from meshdsl.placed import verify as placed_verify
from tests.compiling import compile_text
from tests.ir_text import named as parser
from tests.ir_text import placed as placed_parser

NAMED = """program p
  input %0 x : f32[a 2]
  repeat k 3
    carry %1 h : f32[a 2] = %0
    %2 h = exp %1 : f32[a 2]
    next %1 = %2; at the end %3 h
  %4 g = neg %3 [backwardTAG] : f32[a 2]
  repeat k 3 from the last [backwardLOOP]
    carry %5 g : f32[a 2] = %4
    %6 g = neg %5 [backward of %2] : f32[a 2]
    next %5 = %6; at the end %7 g
  return g = %7
"""
PLACED = """program p, mesh m { data: 2 }, layout l, reduce deferred
  input %0 x : f32[a@data 2]
  %1 y = exp %0 : f32[a@data 2]
  %2 g = neg %1 [backwardTAG] : f32[a@data 2]
  return g = %2
"""


def read(tag: str = " of %3", loop: str = " of %3") -> NamedProgram:
    return parser.parse_program(NAMED.replace("TAG", tag).replace("LOOP", loop))


def test_an_origin_may_be_inside_of_a_loop_that_has_ended() -> None:
    verify.verify(read())
    verify.verify(read(tag=" copy of %2"))


@pytest.mark.parametrize("tags", [("", " of %3"), (" of %3", "")], ids=["operator", "loop"])
def test_none_is_refused(tags: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match="has no origin"):
        verify.verify(read(*tags))


def test_one_that_is_not_in_the_program_is_refused() -> None:
    program = read()
    gone = replace(program.inputs[0])
    body = tuple(replace(n, origin=n.origin and Origin(gone)) for n in program.body)
    with pytest.raises(AssertionError, match="origin x is not in the program"):
        verify.verify(replace(program, body=body))


def test_of_a_placed_program_too() -> None:
    found = placed_parser.parse_program(PLACED.replace("TAG", " of %1"))
    placed_verify.verify(found)
    assert [n.origin is not None for n in every(found.named.body)] == [False, True]
    with pytest.raises(AssertionError, match="has no origin"):
        placed_verify.verify(placed_parser.parse_program(PLACED.replace("TAG", "")))


STACKED = """program p
  input %0 x : f32[a 2]
  %1 y = exp %0 : f32[a 2]
  repeat k 3 [backward of %1]
    carry %2 g : f32[a 2] = %1
    %3 = exp %2 [backward of %1] : f32[a 2]
    %4 = neg %2 [backward of %1] : f32[a 2]
    %5 = neg %4 [backward of %3] : f32[a 2]
    next %2 = %5; at the end %6 g
    collect %7 : f32[k 3, a 2] of %1[k] = %3
  return g = %6
  return all = %7
"""


def test_one_in_a_loop_is_no_result_of_that_loop() -> None:
    """Of what is removed, only the stack was made."""
    before = parser.parse_program(STACKED)
    verify.verify(before)
    loop = before.body[1]
    assert isinstance(loop, NamedLoop)
    neg, last = loop.body[1:]
    collected = tuple(replace(c, inside=neg.makes[0]) for c in loop.collected)
    less = replace(loop, body=(neg, last), collected=collected)
    after = with_kept_origins(before, replace(before, body=(before.body[0], less)))
    verify.verify(after)
    *_, last = every(after.body)
    assert last.origin == Origin(loop.carries[0].inside)


GONE = """
dim e = 4, c = 6, d = 4
program p(x[c, e]) {
  recompute {
    param w[d]
    param v[d]
    t[d, e, c] = tanh(x * w)
    u = einsum(t, x * v -> [c, e]) / sqrt(d)
    d1 = grad(mean(tanh(t * u)), u)
  }
  d2 = grad(mean(tanh(d1)), w)
  return d2
}
"""


def test_a_constant_whose_readers_are_gone_leaves_an_origin_among_what_they_read() -> None:
    """A gradient alone reads the block, in copies; the division by a constant is for nothing."""
    compile_text(GONE)
