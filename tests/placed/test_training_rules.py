"""Rules and expectations about what a training step keeps: gradients and states."""

from __future__ import annotations

import re

import pytest

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Options
from meshdsl.placed.ir import PlacedProgram
from meshdsl.report.checks import check_source
from tests.compiling import compile_text

PROGRAM = """
dim batch = 8, io = 8, hidden = 8, layers = 2, inner = 2
mesh grid = { x: 2, y: 2 }
program p(t[batch, io]) {
  param w[io, hidden]
  m = einsum(t, w -> [batch, hidden])
  repeat layers {
    param v[hidden]
    repeat inner { m = m * v }
  }
  loss = mean(square(m))
  return loss
  minimize loss with adam(lr=0.1)
}
"""


def placed(rules: str, found: Diagnostics | None = None) -> PlacedProgram:
    made = compile_text(f"{PROGRAM}layout l {{ {rules} }}", found, layout="l", reduce="deferred")
    program = made.placed
    assert isinstance(program, PlacedProgram)
    return program


def placements(rules: str) -> dict[str, str]:
    tensors = placed(rules).tensors
    return {t.value.name: t.placement.show(t.value.type) for t in tensors if t.value.name}


def test_a_state_is_selected_by_its_whole_name() -> None:
    found = placements("w.m: hidden -> y")
    assert found["w.m"] == "[io, hidden@y]"
    assert found["w.v"] == found["w"] == "[io, hidden]"


def test_a_tensor_is_not_taken_for_a_state() -> None:
    found = placements("m: hidden -> y")
    assert found["m"] == "[batch, hidden@y]"
    assert found["w.m"] == "[io, hidden]"


def test_what_frees_a_state_of_two_rules_does_so() -> None:
    rules = "state: io -> x, state: hidden -> x"
    with pytest.raises(DiagnosticError, match="`m` of `w` ") as caught:
        placed(rules)
    (found,) = caught.value.diagnostics
    (freed,) = re.findall(r"`(\w+: hidden -> none)`", found.help or "")
    assert placements(f"{rules}, {freed}")["w.v"] == "[io@x, hidden]"


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ("grads: io -> x", []),
        ("state: io -> x", []),
        ("grads: batch -> x", ["MD0306"]),
        ("state: batch -> x", ["MD0306"]),
        ("params: batch -> x", ["MD0306"]),
        ("w.m: io -> x, d_w: io -> x", []),
        ("w.q: io -> x", ["MD0306"]),
    ],
)
def test_a_rule_that_selects_nothing_is_reported(rules: str, codes: list[str]) -> None:
    found = Diagnostics()
    placed(rules, found)
    assert [d.code for d in found] == codes
    assert {d.help for d in found} <= {"remove the rule"}, "a role is no misspelt name"


def test_without_training_rules_for_it_are_left_aside() -> None:
    text = PROGRAM.replace("  minimize loss with adam(lr=0.1)\n", "")
    found = Diagnostics()
    compile_text(f"{text}layout l {{ grads: io -> x, state: batch -> x }}", found, layout="l")
    assert not list(found)


def test_a_pin_to_a_missing_axis_is_reported_once() -> None:
    text = PROGRAM.replace("m = einsum", "m[batch@z, hidden] = einsum")
    text = text.replace("  m[", "  recompute {\n  m[").replace("hidden])\n", "hidden])\n  }\n")
    found = Diagnostics()
    compile_text(text, found)
    assert [d.code for d in found if d.severity != "note"] == ["MD0304"]


@pytest.mark.parametrize(
    ("entry", "codes"),
    [
        ("w.m: [io@x, hidden]", []),
        ("d_w: [io, hidden]", []),
        ("w.m: [io, hidden]", ["MD0401"]),
        ("w.q: [io, hidden]", ["MD0402"]),
    ],
)
def test_expectations_of_gradients_and_states(entry: str, codes: list[str]) -> None:
    text = f"{PROGRAM}layout l {{ state: io -> x }}\nexpect l on grid with deferred {{ {entry} }}\n"
    found = Diagnostics()
    check_source(Source("test.mdsl", text), Options(), found)
    assert [d.code for d in found] == codes
