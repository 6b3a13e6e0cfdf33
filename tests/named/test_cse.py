"""Equal operators are done once: what merges, what stays, and what that saves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from meshdsl.named.cse import cse
from meshdsl.placed.ir import Apply, PlacedLoop, PlacedProgram, Reshard, walk
from tests.compiling import compile_text, named, run_text
from tests.programs.harness import Case
from tests.training.stepping import check_step
from tests.work import calls

HEAD = """
dim a = 4, d = 8, k = 4
mesh grid = { p: 2, q: 2 }
layout none { }
layout parts { d -> q }
"""
CLASSES = """
program test(x[a, k], ids[a]: i32) {
  param w[k, d]
  logits = einsum(x, w -> [a, d])
  loss = mean(cross_entropy[d](logits, ids))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def placed(
    body: str, layout: str = "parts", reduce: str = "deferred", **options: Any
) -> PlacedProgram:
    found = compile_text(HEAD + body, layout=layout, reduce=reduce, **options).placed
    assert isinstance(found, PlacedProgram)
    return found


def operators(program: PlacedProgram, phase: str | None = None) -> list[str]:
    """The names of the operators of a phase, or of all, constants aside."""
    ops = [n.named for n, _ in walk(program.body) if isinstance(n, Apply)]
    return [op.name for op in ops if op.name != "constant" and phase in (None, op.phase)]


def reductions(program: PlacedProgram) -> list[tuple[str, str | None]]:
    """Phase and operation of every all_reduce over the split classes."""
    moves = [n for n, _ in walk(program.body) if isinstance(n, Reshard)]
    steps = [(n.phase, s) for n in moves for s in n.route.steps if s.axes == ("q",)]
    return [(phase, s.op) for phase, s in steps if s.kind == "all_reduce"]


# --- what it is for ----------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["immediate", "mesh-tf", "deferred", "optimal"])
def test_a_backward_pass_finds_no_maximum_and_no_sum_again(reduce: str) -> None:
    program = placed(CLASSES, reduce=reduce)
    assert {"max", "sum"}.isdisjoint(operators(program, "backward"))
    assert "max" not in [op for phase, op in reductions(program) if phase == "backward"]


def test_what_is_large_is_read_where_it_was_made_just_before() -> None:
    program = placed(CLASSES)
    assert operators(program, "forward").count("exp") == 1
    assert not {"sub", "exp"}.intersection(operators(program, "backward"))


def test_what_is_large_is_made_again_after_something_as_large() -> None:
    later = CLASSES.replace("return loss", "loss = loss + mean(abs(x - 1.0))\n  return loss")
    program = placed(later.replace("x[a, k]", "x[a, k, d]").replace("x, w ->", "x[d = 0], w ->"))
    assert operators(program, "forward").count("exp") == 1
    assert operators(program, "backward").count("exp") == 1


RECURRENCE = """
dim layers = 3
program test(x[a, k], y[a, k]) {
  h = x
  repeat layers {
    param w[k]
    s = linear_recurrence[a](sigmoid(h * w), h)
    before = shift[a](s, 1)
    h = h + before * w
  }
  loss = mean((h - y)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize("layout", ["none", "split"])
def test_a_backward_loop_reads_what_the_forward_loop_has_of_the_same(layout: str) -> None:
    """The gradient of a recurrence reads what was there before: `before`, which is kept anyway."""
    again = RECURRENCE.replace("h = h + before * w", "h = h + before")
    rules = "layout split { a -> q }\n"
    program, other = (placed(rules + text, layout) for text in (RECURRENCE, again))
    loops = [node for node in program.body if isinstance(node, PlacedLoop)]
    shifts = [operators(each, "backward").count("shift") for each in (program, other)]
    assert len(loops[0].collected) == 3  # the state itself is not kept
    assert shifts[0] == shifts[1] - 1  # without `w` nothing keeps `before`
    check_step(Case(HEAD + RECURRENCE, "p:1,q:2", "{ a -> q }" if layout == "split" else "{ }"))


def test_what_numbers_make_is_a_number() -> None:
    """The gradient of a mean is known: of the loss, less than none of it at the targets."""
    assert "neg" not in operators(placed(CLASSES))


def test_the_step_is_as_it_was() -> None:
    rng = np.random.default_rng(0)
    inputs = {"x": rng.normal(size=(4, 4)).astype(np.float32), "ids": np.array([0, 7, 3, 4], "i4")}
    whole, parts = (run_text(HEAD + CLASSES, inputs, layout=n) for n in ("none", "parts"))
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-6)


# --- one block ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("return relu(exp(x)) + abs(exp(x))", {"exp": 1}),
        ("return relu(exp(x) * 2.0) + abs(exp(x) * 2.0)", {"exp": 1, "mul": 1}),
        ("return relu(x * 2.0) + abs(x * 3.0)", {"mul": 2}),
        ("return relu(sum[d](x)) + abs(sum[a](x)[d = 0])", {"sum": 2}),
        ("y = exp(x)\n  z = exp(x)\n  return y + z", {"exp": 1, "identity": 1}),
        ("y = exp(x)\n  return y, exp(x)", {"exp": 1, "identity": 1}),
        ("y[a@p, d] = exp(x)\n  return relu(y) + exp(x)", {"exp": 2}),
        ("return einsum(x, x -> [a]) + einsum(x, x -> [a])", {"einsum": 1}),
    ],
)
def test_what_is_left(body: str, left: dict[str, int]) -> None:
    found = operators(placed(f"program test(x[a, d]) {{\n  {body}\n}}\n", "none"))
    assert {name: found.count(name) for name in left} == left


def test_a_name_stays_a_tensor() -> None:
    program = placed("program test(x[a, d]) {\n  y = exp(x)\n  z = exp(x)\n  return y + z\n}\n")
    assert {"y", "z"} <= {t.value.name for t in program.tensors}


def test_a_rule_for_one_of_two_keeps_them_apart() -> None:
    rules = "layout apart { d -> q, y: a -> p }\n"
    body = "program test(x[a, d]) {\n  y = exp(x)\n  z = exp(x)\n  return y + z\n}\n"
    assert operators(placed(rules + body, "apart")).count("exp") == 2
    assert operators(placed(rules + body, "parts")).count("exp") == 1


def test_inside_a_loop() -> None:
    body = "dim n = 3\nprogram test(x[a, d], w[n]) {\n  repeat n {\n"
    body += "    x = relu(exp(x) * w) + abs(exp(x) * w)\n  }\n  return x\n}\n"
    found = operators(placed(body))
    assert (found.count("exp"), found.count("mul")) == (1, 1)


def test_a_loop_keeps_one_stack_of_what_is_computed_twice() -> None:
    body = """
dim n = 3
program test(x[a, d]) {
  param w[n, a, d]
  y = x
  repeat n {
    y = y * w / (exp(y) + 1.0) + y / (exp(y) + 1.0)
  }
  loss = mean(y^2)
  return loss
  minimize loss with adam(lr=0.1)
}
"""
    forward, backward = (node for node in placed(body).body if isinstance(node, PlacedLoop))
    # y, exp(y), that + 1, the product's quotient and the other one; the backward pass has w, too.
    assert (len(forward.collected), len(backward.stacked)) == (5, 6)


def test_an_sbp_block_sees_the_same_program() -> None:
    block = "sbp block { x: (B, S(1)) }\n"
    body = "program test(x[a, d]) {\n  return relu(exp(x)) + abs(exp(x))\n}\n"
    for policy in ("deferred", "optimal"):
        made = compile_text(HEAD + block + body, sbp="block", reduce=policy)
        assert operators(made.placed).count("exp") == 1


# --- what must be done twice -------------------------------------------------------------------


def test_what_is_recomputed_is_computed_again() -> None:
    body = """
program test(x[a, k]) {
  param w[k, d]
  recompute {
    h = softmax[d](einsum(x, w -> [a, d]))
    s = sum[d](square(h))
  }
  loss = mean(square(s))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
    forward = operators(placed(body), "forward")
    backward = operators(placed(body), "backward")
    again = ("einsum", "max", "exp", "sum")
    assert [backward.count(n) >= forward.count(n) > 0 for n in again] == [True] * len(again)


def test_parameters_are_gathered_in_each_phase() -> None:
    """But for the last, whose copy is alive when the backward pass begins."""
    body = """
layout zero { a -> p, params: k -> p }
program test(x[a, d]) {
  param w[d, k]
  param u[k, d]
  param v[d, k]
  h = relu(einsum(relu(einsum(x, w -> [a, k])), u -> [a, d]))
  y = einsum(h, v -> [a, k])
  loss = mean(square(y))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
    moves = [n for n, _ in walk(placed(body, "zero").body) if isinstance(n, Reshard)]
    gathers = [(n.source.value.name, n.phase) for n in moves if n.source.value.role == "param"]
    twice = [("u", "backward"), ("u", "forward")]
    assert sorted(gathers) == [*twice, ("v", "forward"), ("w", "forward")]


# --- what it costs -----------------------------------------------------------------------------


def doubled(times: int) -> str:
    """A program of 2 ** `times` products with a number, each inlined from a definition."""
    twice = (f"def f{i + 1}(x[a]) {{ return f{i}(f{i}(x)) }}\n" for i in range(times))
    head = "def f0(x[a]) { return x * 2.0 }\n" + "".join(twice)
    return f"{HEAD}{head}program p(x[a]) {{\n y = f{times}(x)\n return y\n}}\n"


def test_the_numbers_of_a_long_program_are_not_compared_with_each_other() -> None:
    few, many = (named(doubled(times)) for times in (6, 8))
    work = [calls(partial(cse, program, lambda first, again: True)) for program in (few, many)]
    assert len(many.body) == 4 * len(few.body)
    assert work[1] < 5 * work[0]
