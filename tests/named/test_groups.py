"""Parameter groups: which options each parameter has, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from meshdsl.codes import CODES
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import NamedProgram
from tests.compiling import named

PROGRAM = """
dim a = 4, n = 2

def f(x[a]) {{
  param w[a]
  return g(x * w)
}}

def g(x[a]) {{
  param s[a]
  return x * s
}}

program p(x[a]) {{
  param weight[a]
  param total[a] = zeros()
  param scale[a]
  total := total + x
  y = x
  repeat n {{
    y = f(y) * weight
  }}
  loss = sum(g(y)^2)
  return loss, y * scale
  minimize loss with adamw(lr=1e-3) {{ {groups} }}
}}
"""
PARAMS = ("weight", "f.w", "f.g.s", "g.s")


def program(groups: str) -> NamedProgram:
    return named(PROGRAM.format(groups=groups))


GROUPS: dict[str, dict[str, dict[str, Any] | None]] = {
    "": {},
    "weight: frozen": {"weight": None},
    "params: frozen, f: trained": {"weight": None, "g.s": None},
    "params: frozen, g.s: trained": {"weight": None, "f.w": None},
    "f: frozen, f.g.s: trained, f.w: trained": {},
    "f.g: eps = 1, s: eps = 2": {"f.g.s": {"eps": 2}, "g.s": {"eps": 2}},
    "(weight, f): beta1 = 1 / a": {n: {"beta1": 0.25} for n in PARAMS[:3]},
    "w: lr = 1, eps = 2, weight: lr = 1": {
        "f.w": {"lr": 1, "eps": 2},
        "weight": {"lr": 1},
    },
    "w: lr = 1e-3, s: weight_decay = 0.01": {},  # as all others
    "f: weight_decay = 0, g.s: weight_decay = 0.0": {n: {"weight_decay": 0} for n in PARAMS[1:]},
}
"""What is different in the options of parameters; None: they are frozen."""


@pytest.mark.parametrize("groups", GROUPS)
def test_the_narrowest_setting_of_an_option_wins(groups: str) -> None:
    goal = program(groups).goal
    assert goal is not None
    members = [str(p.name) for g in goal.groups for p in g.params]
    assert len(members) == len(set(members))
    found = {
        str(p.name): group.optimizer and _different(group.optimizer.options, goal.optimizer.options)
        for group in goal.groups
        for p in group.params
    }
    assert found == GROUPS[groups]


def _different(options: Any, usual: Any) -> dict[str, Any]:
    peaks = {n: getattr(v, "peak", v) for n, v in options.items() if v != usual[n]}
    return peaks


WRONG = [
    ("wieght: lr = 1", "MD0277", "wieght", "did you mean `weight`?"),
    ("parms: frozen", "MD0277", "parms", "did you mean `params`?"),
    ("total: lr = 1", "MD0277", "total", "there are `weight`"),
    ("scale: lr = 1", "MD0277", "scale", "the loss does not depend on what it selects"),
    ("scale: frozen", "MD0277", "scale", "leave it out"),
    ("y: frozen", "MD0277", "y", "there are `weight`, `w`, `f`, `s`, `g`"),
    ("(w, q): frozen", "MD0277", "q", "there are `weight`"),
    ("f.s: frozen", "MD0277", "f.s", "did you mean `f.g.s`?"),
    ("f: lr = 1e-4, g: lr = 1e-5", "MD0278", "g: lr = 1e-5", "say it of the parameter: `s: …`"),
    ("f: frozen, g: trained", "MD0278", "g: trained", "say it of the parameter"),
    ("w: lr = 1, w: lr = 1", "MD0273", "w: lr = 1", "remove this setting"),
    ("w: frozen, w: trained", "MD0273", "w: trained", "remove this setting"),
    ("weight: froze", "MD0272", "froze", "did you mean `frozen`?"),
    ("weight: lr", "MD0272", "lr", "write `lr = 0.001`"),
    ("weight: frozen = 1", "MD0272", "frozen", "write `frozen` alone"),
    ("weight: clip = 1", "MD0272", "clip", "`clip=…` as an argument of `adamw(…)`"),
    ("weight: wight_decay = 1", "MD0272", "wight_decay", "did you mean `weight_decay`?"),
    ("weight: nesterov = true", "MD0272", "nesterov", "there are `lr`, `beta1`"),
    ("weight: lr = cosinus(1, 2)", "MD0271", "cosinus", "did you mean `cosine`?"),
    ("weight: lr = -1", "MD0276", "-1", "write `lr=0.001`"),
    ("weight: beta1 = x", "MD0275", "x", "write `beta1=0.9`"),
    ("params: frozen", "MD0294", None, "`trained`"),
]


@pytest.mark.parametrize(("groups", "code", "place", "help"), WRONG)
def test_a_wrong_group_is_reported_where_it_stands(
    groups: str, code: str, place: str | None, help: str
) -> None:
    with pytest.raises(DiagnosticError) as raised:
        program(groups)
    (found,) = raised.value.diagnostics
    assert found.span is not None
    assert found.help is not None
    assert found.code == code
    assert place in (None, found.span.text)
    assert help in found.help


OTHER_OUTPUT = """
dim a = 4, b = 2

def of_matrices[r, c](w[..., r, c], g[..., r, c], lr) -> [..., r, c] {{
  return w - lr * g
}}

program p(x[a]) {{
  param w[a, b]
  param frozen[b, a]
  param scale[a]
  loss = sum(einsum(einsum(x, w -> [b]), frozen -> [a])^2)
  return loss, x * scale
  minimize loss with {optimizer} {{ frozen: frozen }}
}}
"""


@pytest.mark.parametrize(
    ("optimizer", "dtypes"),
    [
        ("of_matrices(lr=1.0)", ["f32", "f32", "f32"]),
        ('of_matrices(lr=1.0, compute="bf16")', ["bf16", "bf16", "f32"]),
        ('sgd(compute="bf16", accumulate=2)', ["bf16", "bf16", "f32"]),
    ],
)
def test_a_parameter_of_another_output_is_not_of_the_loss(
    optimizer: str, dtypes: list[str]
) -> None:
    """No optimizer need be for it, and it is stored as it is declared."""
    made = named(OTHER_OUTPUT.format(optimizer=optimizer))
    assert [p.value.type.dtype.name for p in made.params] == dtypes
    assert made.goal is not None
    assert [v.name for v in made.goal.trained] == ["w"]
    assert {u.old.source.name for u in made.updates} == {"w", "step"}


def test_an_error_on_the_way_to_the_loss_is_no_error_of_a_group() -> None:
    text = PROGRAM.format(groups="f: lr = 1").replace("y = f(y)", "y = unknown(f(y))")
    text = text.replace("sum(g(y)^2)", "sum(g(x)^2)")
    with pytest.raises(DiagnosticError) as raised:
        named(text)
    assert [d.code for d in raised.value.diagnostics] == ["MD0103"]


@pytest.mark.parametrize("code", ["MD0277", "MD0278", "MD0279"])
def test_the_wrong_example_of_a_code_is_wrong_in_this_way(code: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        named(CODES[code].wrong)
    assert [d.code for d in raised.value.diagnostics] == [code]
