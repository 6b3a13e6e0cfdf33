"""Advice about rules is true: what it offers is carried out, and the message is gone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from meshdsl.diagnostics import Diagnostic, Diagnostics, Fix, Source
from meshdsl.named.ir import values_of
from meshdsl.pipeline import Options
from meshdsl.report.checks import check_source
from meshdsl.syntax.edits import apply
from tests.compiling import named

IMAGE = """
dim batch = 2, c = 2, o = 2, h = 8, kh = 4, ho = 8
mesh m = {{ rows: 2 }}
layout a {{ {rules} }}
program p(x[batch, c, h]) {{
  param k[o, c, kh]
  y = conv[h by kh -> ho](x, k, pad="same")
  return y
}}
"""
LOSS = """
dim batch = 4, seq = 4, vocab = 8
mesh m = {{ data: 2, tp: 2 }}
layout base {{ batch -> data, vocab -> tp }}
layout sequence extends base {{ {rules} }}
program p(logits[batch, seq, vocab], targets[batch, seq]: i32) {{
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
}}
"""
GATING = """
dim groups = 2, token = 4, experts = 4, slot = 2
mesh m = {{ tp: 2 }}
layout base {{ {rules} }}
program p(logits[groups, token, experts], x[groups, slot]) {{
  combine, dispatch, auxiliary = top2_gating[token, experts, slot](logits)
  return combine, auxiliary, relu(x)
}}
"""
SCAN = """
dim batch = 4, seq = 8, tap = 4, d = 4
mesh m = {{ tp: 2 }}
layout sequence {{ {rules} }}
program p(x[batch, seq, d]) {{
  param k[tap, d]
  y = einsum(window[seq by 4 -> tap](x, before=3), k -> [batch, seq, d])
  return y
}}
"""
LAYERS = """
dim io = 8, batch = 16, hid = 8, layers = 4
mesh m = {{ pipe: 2 }}
layout staged {rules}
program p(x[io, batch]) {{
  repeat layers {{
    param w[io, hid]
    param v[hid, io]
    x = einsum(relu(einsum(x, w -> [batch, hid])), v -> [io, batch])
  }}
  loss = mean(x)
  return loss
  minimize loss with sgd(lr=0.1)
}}
"""


def told(text: str) -> Diagnostics:
    found = Diagnostics()
    check_source(Source("test.mdsl", text), Options(layout=_last(text)), found)
    return found


def _last(text: str) -> str:
    """The layout declared last."""
    return text.rsplit("layout ", 1)[1].split()[0]


def fixed(text: str, code: str) -> Iterator[tuple[Diagnostic, Fix, Diagnostics]]:
    """Every fix of the messages of a code, each with what is told of the text after it."""
    for diagnostic in told(text):
        for fix in diagnostic.fixes if diagnostic.code == code else ():
            assert fix.is_of(text), "an edit of the user's own text"
            yield diagnostic, fix, told(apply(text, fix.edits))


@pytest.mark.parametrize(
    ("text", "code", "fixes"),
    [
        (IMAGE.format(rules="x: h -> rows"), "MD0225", ["add `y: ho -> rows`"]),
        (IMAGE.format(rules="h -> rows"), "MD0225", ["add `ho -> rows`"]),
        (
            IMAGE.format(rules="k: kh -> rows"),
            "MD0224",
            ["remove the rule", "write `params: kh -> rows`"],
        ),
        (
            LOSS.format(rules="seq -> tp, logits: seq -> none"),
            "MD0302",
            ["add `cross_entropy: vocab -> none`"],
        ),
        (
            GATING.format(rules="token -> tp, slot -> tp, combine: slot -> none"),
            "MD0302",
            ["add `top2_gating: slot -> none`"],
        ),
    ],
)
def test_each_fix_makes_its_message_go_and_brings_no_other(
    text: str, code: str, fixes: list[str]
) -> None:
    tried = list(fixed(text, code))
    assert [fix.title for _, fix, _ in tried] == fixes
    before = {d.code for d in told(text)}
    for diagnostic, fix, after in tried:
        assert not after.errors, fix.title
        assert diagnostic.message not in {d.message for d in after}, fix.title
        assert {d.code for d in after} <= before, fix.title


def test_a_rule_that_would_be_refused_is_not_advised() -> None:
    """`tap -> tp` beside `seq -> tp` is MD0302: both are dims of the window."""
    assert "MD0302" in {d.code for d in told(SCAN.format(rules="seq -> tp, tap -> tp"))}
    assert not list(told(SCAN.format(rules="seq -> tp")))


def test_micro_batches_are_advised_of_a_dim_that_samples_have() -> None:
    """`io`, the first dim of the input, is one of the parameters: it cannot be cut."""
    (error,) = told(LAYERS.format(rules="{ layers -> pipe }")).errors
    assert error.help is not None
    cut, stored = re.findall(r"`([^`]+)`", error.help)
    assert cut == "with one_f_one_b[batch](8)"
    assert not told(LAYERS.format(rules=f"{{ layers -> pipe }} {cut}")).errors
    assert not told(LAYERS.format(rules=f"{{ {stored} }}")).errors


NESTED = LAYERS.replace("layers = 4", "layers = 4, inner = 2").replace(
    "    param w[io, hid]",
    "    param g[io]\n    repeat inner {{ x = x * g }}\n    param w[io, hid]",
)
NO_STAGES = LAYERS.replace("    param w[io, hid]\n    param v[hid, io]\n", "").replace(
    "  repeat layers", "  param w[io, hid]\n  param v[hid, io]\n  repeat layers"
)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (LAYERS, "layers -> (pipe, data)"),
        (NESTED, "inner -> pipe"),
        (NESTED, "inner -> (pipe, data)"),
        (NO_STAGES, "layers -> (pipe, data)"),
        (NO_STAGES, "layers -> pipe"),
    ],
)
def test_the_way_out_of_what_is_no_pipeline_leads_to_one(text: str, rule: str) -> None:
    """Rules in its place, and a schedule behind the layout, as the help says; or no rule."""
    text = text.replace("{{ pipe: 2 }}", "{{ pipe: 2, data: 2 }}")
    (error,) = told(text.format(rules=f"{{ {rule} }}")).errors
    assert error.code == "MD0907"
    edits = re.findall(r"`([^`]+)`", str(error.help))
    rules = [e for e in edits if "->" in e and not e.startswith("params")]
    schedule = next((e for e in edits if e.startswith("with ")), "")
    assert edits or error.help == "remove the rule"
    after = told(text.format(rules=f"{{ {', '.join(rules[-1:])} }} {schedule}"))
    assert not after.errors
    assert error.message not in {d.message for d in after}


def test_a_library_function_can_be_freed_of_a_rule() -> None:
    rules = "seq -> tp, logits: seq -> none, cross_entropy: seq -> none"
    assert not list(told(LOSS.format(rules=rules)))
    without = told(LOSS.format(rules=f"{rules}, softmax: seq -> none"))
    assert [d.code for d in without] == ["MD0306"]


OWN = """
dim batch = 4, experts = 4, slot = 2
def elu(x[...]) {
  inside = x * 2.0
  return inside
}
program p(x[batch, experts]) {
  own = elu(x)
  gates, kept, auxiliary = top2_gating[batch, experts, slot](own)
  return relu(hard_swish(gates)), auxiliary
}
"""


def test_rules_name_what_the_program_names_also_beside_functions_of_the_library() -> None:
    """`elu` is a function of this program, though the library has one of that name."""
    values = [v for v in values_of(named(OWN)) if v.name and v.role == "activation"]
    assert {v.label for v in values if v.is_nameable} == {"inside", "own", "gates", "auxiliary"}
    assert {"first", "queue1"} <= {v.label for v in values if not v.is_nameable}
