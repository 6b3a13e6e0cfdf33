"""Operators of an `ir.program.OpKind`: the verifiers refuse those that are placed otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshdsl.ir.program import OpKind
from meshdsl.placed import verify
from meshdsl.placed.ir import Apply
from tests.ir_text import placed as parser

KINDS = {
    OpKind.LOAD: (
        "%1 = load %0 : f32[a@data 2] param",
        "%1 = load %0 : f32[a 2] param",
        "as it is stored",
    ),
    OpKind.WORKER_PARTS: (
        "%1 = worker_parts %0 {dim=w} : f32[w@data 2, a 2]",
        "%1 = worker_parts %0 {dim=w} : f32[w 2, a 2]",
        "in parts is",
    ),
    OpKind.STAGE_OUTPUT: ("", "%1 = stage_output %0 : f32[a 2]", "without stages"),
}
"""Of each kind a right line and a wrong one, and what is said of that."""


def placed(kind: OpKind, line: str) -> str:
    source = {
        OpKind.LOAD: "param %0 w : f32[a@data 2]",
        OpKind.WORKER_PARTS: "input %0 x : f32[a 2] partial sum over data",
        OpKind.STAGE_OUTPUT: "input %0 x : f32[a 2]",
    }[kind]
    head = "program p, mesh m { data: 2 }, layout l, reduce deferred"
    return f"{head}\n  {source}\n  {line}\n"


@pytest.mark.parametrize("kind", OpKind)
def test_its_placements(kind: OpKind) -> None:
    right, wrong, said = KINDS[kind]
    if right:
        program = parser.parse_program(placed(kind, right))
        verify.verify(program)
        assert [n.kind for n in program.body if isinstance(n, Apply)] == [kind]
        assert program.named.body[0].kind is kind  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match=said):
        verify.verify(parser.parse_program(placed(kind, wrong)))


@pytest.mark.parametrize("kind", OpKind)
def test_it_is_one_operator_of_the_registry(kind: OpKind) -> None:
    program = parser.parse_program(placed(kind, KINDS[kind][1]))
    (op,) = program.body
    assert isinstance(op, Apply)
    with pytest.raises(AssertionError, match=f"a {kind} is no exp"):
        verify.verify(replace(program, body=(replace(op, name="exp"),)))
