"""What a reduction sends of each dtype: the bytes that are predicted, and those that are sent."""

from __future__ import annotations

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import Move, walk
from tests.compiling import compile_text

TEXT = """
dim n = 4, d = 8
program p(x[n, d]) {
  y = OP[n](x)
  return y
}
"""
BYTES = {
    ("sum", "bf16"): 2, ("max", "bf16"): 4, ("min", "bf16"): 4,
    ("max", "f16"): 4, ("max", "f32"): 4, ("max", "f64"): 8, ("sum", "f64"): 8,
}  # fmt: skip
"""Per element: maxima of floats are reduced as integers, which are not sent of two bytes."""


@pytest.mark.parametrize(("op", "dtype"), BYTES)
def test_bytes_of_an_element(op: str, dtype: str) -> None:
    made = compile_text(TEXT.replace("OP", op), mesh="x:2", layout="n:x", dtype=dtype)
    (wire,) = (node.wire for node, _ in walk(made.device.body) if isinstance(node, Move))
    elements = 8 if "all_reduce" in made.emitted.text else 0
    assert wire == elements * BYTES[op, dtype]
    done = run_local(made.emitted.text, lines=made.emitted.places)
    assert [done.wire_bytes(rank) for rank in range(2)] == [wire, wire]


ATTENTION = """
dim s = 4, m = 4, k = 2
program p(q[s, k], x[m, k], v[m, k]) {
  o = attention[k, m](q, x, v)
  return grad(sum(o * o), q)
}
"""


@pytest.mark.parametrize("policy", ["immediate", "mesh-tf", "deferred", "optimal"])
@pytest.mark.parametrize("mesh", ["x:2", "x:5"])
def test_a_result_that_nothing_reads_is_not_reduced(mesh: str, policy: str) -> None:
    """The gradients by keys and values are made with that by the queries, and are not sent."""
    made = compile_text(ATTENTION, mesh=mesh, layout="s:x", reduce=policy)
    moves = (node for node, _ in walk(made.device.body) if isinstance(node, Move))
    assert not any(node.step.kind == "all_reduce" for node in moves)
