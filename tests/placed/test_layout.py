"""The tensors that a rule binds, and the rule that wins."""

from __future__ import annotations

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics
from tests.compiling import compile_text

PROGRAM = """
dim batch = 8, io = 8, hidden = 8
mesh m = { x: 2, y: 2 }
def head(t[batch, hidden]) -> [batch, io] {
  param w[hidden, io]
  z = t * 2
  return einsum(z, w -> [batch, io])
}
program p(t[batch, hidden]) {
  param v[hidden, io]
  h = relu(t)
  y = head(h) + einsum(h, v -> [batch, io])
  return y
}
"""


def placements(rules: str, mesh: str = "x:2,y:2") -> dict[str, str]:
    """The placement of each named tensor under a layout of these rules."""
    made = compile_text(
        f"{PROGRAM}layout l {{ {rules} }}", layout="l", mesh=mesh, reduce="deferred"
    )
    return {
        t.value.name: t.placement.show(t.value.type) for t in made.placed.tensors if t.value.name
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("batch -> x", {"t": "[batch@x, hidden]", "v": "[hidden, io]"}),
        ("batch -> (x, y)", {"h": "[batch@(x, y), hidden]"}),
        ("batch -> (y, x)", {"h": "[batch@(y, x), hidden]"}),
        ("batch -> x, h: batch -> none", {"h": "[batch, hidden]", "y": "[batch@x, io]"}),
        ("batch -> x, h: hidden -> x", {"h": "[batch, hidden@x]", "t": "[batch@x, hidden]"}),
        (
            "batch -> x, head: batch -> none",
            {"head.z": "[batch, hidden]", "h": "[batch@x, hidden]"},
        ),
        ("params: hidden -> x", {"v": "[hidden@x, io]", "t": "[batch, hidden]"}),
        ("hidden -> x, params: io -> x", {"v": "[hidden, io@x]", "t": "[batch, hidden@x]"}),
        ("head.w: io -> y", {"head.w": "[hidden, io@y]", "v": "[hidden, io]"}),
        ("batch -> x, state: io -> y, grads: io -> y", {"v": "[hidden, io]"}),
    ],
)
def test_rules(rules, expected):
    found = placements(rules)
    assert {name: found[name] for name in expected} == expected


def test_an_axis_of_size_one_splits_nothing():
    assert placements("batch -> x", "x:1,y:2")["t"] == "[batch, hidden]"


def test_extends_keeps_what_it_does_not_override():
    text = (
        PROGRAM
        + "layout base { batch -> x, hidden -> y }\nlayout l extends base { hidden -> none }"
    )
    made = compile_text(text, layout="l")
    found = {t.value.name: t.placement.show(t.value.type) for t in made.placed.tensors}
    assert found["t"] == "[batch@x, hidden]"


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("batch -> x, io -> x", "MD0302"),
        ("batch -> x\nbatch -> y", "MD0303"),
        ("head: batch -> x, head: batch -> none", "MD0303"),
        ("batch -> (x, x)", "MD0302"),
        ("hidden -> x, t: batch -> x", None),
    ],
)
def test_conflicts(rules, code):
    if code is None:
        assert placements(rules)["t"] == "[batch@x, hidden]"
        return
    with pytest.raises(DiagnosticError) as error:
        placements(rules)
    assert error.value.diagnostics[0].code == code


@pytest.mark.parametrize(
    ("rules", "code"),
    [("bach -> x", "MD0305"), ("batch -> z", "MD0304"), ("hd: batch -> x", "MD0306")],
)
def test_rules_that_do_nothing_are_reported(rules, code):
    diagnostics = Diagnostics()
    text = f"{PROGRAM}layout l {{ {rules} }}"
    compile_text(text, diagnostics, layout="l", mesh="x:2,y:2")
    found = {d.code: d for d in diagnostics}
    assert code in found
    assert found[code].help


def test_a_rule_that_names_a_parameter_binds_its_gradient_before_rules_of_functions():
    """`f` is a function and its parameter: the gradient, inside of both functions, follows it."""
    text = """
dim b = 4, d = 8, e = 8
layout l { g: d -> none, f: d -> x }
def f(t[b, d]) -> [b, e] {
  param f[d, e]
  return einsum(t, f -> [b, e])
}
def g(t[b, d]) -> [b, e] {
  return relu(f(t))
}
program p(t[b, d]) {
  loss = sum(g(t))
  return loss
  minimize loss with momentum(lr=0.1, beta=0.9)
}
"""
    made = compile_text(text, layout="l", mesh="x:2", reduce="deferred")
    found = {t.value.name or "": t.placement.show(t.value.type) for t in made.placed.tensors}
    assert found["g.f.f"] == found["g.f.d_f"] == "[d@x, e]"


def test_the_mesh_tensorflow_form():
    made = compile_text(PROGRAM, layout="batch:x;hidden:y", mesh="x:2,y:2")
    found = {t.value.name: t.placement.show(t.value.type) for t in made.placed.tensors}
    assert found["h"] == "[batch@x, hidden@y]"


def test_without_a_mesh_the_first_that_has_the_axes_is_taken():
    text = PROGRAM + "mesh line = { z: 4 }\nlayout l { batch -> z }"
    assert compile_text(text, layout="l").placed.mesh.name == "line"


def test_the_way_out_for_a_subexpression_names_it_as_nothing_else_is_named() -> None:
    text = (
        "dim b = 8, h = 8\nmesh m = { r: 2 }\nlayout l { b -> r, h -> r, part: h -> none }\n"
        "program p(x[b], w[h]) {\n  part = x * w\n  y = sum[b](relu(part) * 2)\n  return y\n}\n"
    )
    with pytest.raises(DiagnosticError) as raised:
        compile_text(text)
    (error,) = raised.value.diagnostics
    assert "`part2 = relu(part)` on a line before" in (error.help or "")
    assert "`part2: h -> none`" in (error.help or "")
