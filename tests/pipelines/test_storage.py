"""Parameters, gradients and states stored in other parts than their stages have them.

Each program does the step of one device, with the bytes that are predicted for each of them and for
all. What a pipeline cannot do is refused, with its place.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from meshdsl.analysis import analyse
from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.place import POLICIES
from meshdsl.report.explanation import explain
from tests.covering import covered, in_turn
from tests.pipelines.test_programs import compiled, hold_bytes, hold_to, on_one_device, results

TEXT = """
dim b = 12, m = 4, h = H, l = 4, o = m
program p(x[b, m], t[b, m]) {
  param s[m] = ones()
  y = mean(square(s))
  x = x * (tanh(y) + s)
  repeat l {
    param w[m, h]
    param c[h]
    param v[h, o]
    x = x + einsum(tanh(einsum(x, w -> [b, h]) + c), v -> [b, o])[o -> m]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""
RULES = {
    "ZeRO 1": "state: h -> d",
    "ZeRO 2": "state: h -> d, grads: h -> d",
    "ZeRO 3": "state: h -> d, grads: h -> d, params: h -> d",
    "ZeRO 2 by layers": "state: l -> (pipe, d), grads: l -> (pipe, d)",
    "ZeRO 3 by layers": "state: l -> (pipe, d), grads: l -> (pipe, d), params: l -> (pipe, d)",
    "parameters whole": "params: l -> none",
    "all whole": "params: l -> none, grads: l -> none, state: l -> none",
    "parameters over data": "params: l -> d",
    "parameters over the stages by another dim": "params: m -> pipe, state: m -> pipe",
    "gradients over data": "grads: l -> d",
    "gradients whole": "grads: l -> none, state: l -> d",
    "gradients over the stages by another dim": "grads: m -> pipe",
    "gradients over both by other dims": "grads: m -> pipe, grads: l -> d",
    "parameters by one dim, gradients by another": "params: m -> pipe, grads: h -> d",
    "parameters by another dim, gradients by layers": "params: m -> pipe, grads: l -> pipe",
    "gradients over data and the stages": "grads: l -> (d, pipe)",
    "data and ZeRO 2": "b -> d, state: h -> d, grads: h -> d",
    "data and ZeRO 3": "b -> d, state: m -> d, grads: m -> d, params: m -> d",
    "data and gradients over both": "b -> d, grads: l -> (pipe, d), state: l -> (pipe, d)",
    "tensor": "h -> d",
    "tensor and ZeRO": "h -> d, state: m -> d, grads: m -> d",
}
SEVERAL = "with interleaved[b](2, reduce=each)"
"""A device has two stages, and blocks of its iterations are not those of a stage.

Gradients cannot be placed by these behind each pass."""


def is_refused(rules: str, use: str) -> bool:
    """Whether gradients are to lie in blocks that stages do not have, behind each pass."""
    return "grads: l -> (pipe" in rules and use == SEVERAL


@covered(rules=("h -> d", "m -> d", "l -> (pipe, d)"), micro=(2, 3, 6), cut=(True, False))
def test_gradients_are_reduced_once_or_behind_each_pass(rules: str, micro: int, cut: bool) -> None:
    """`reduce=each` sends as many times the bytes as there are micro-batches."""
    optimizer = "sgd(lr=0.1)" if cut else f"sgd(lr=0.1, accumulate={micro})"
    text = TEXT.replace("OPT", optimizer).replace("H,", "8,")
    sent = {}
    for reduce in ("last", "each"):
        options = f"[b]({micro}, reduce={reduce})" if cut else f"(reduce={reduce})"
        use = f"with one_f_one_b{options}"
        made = compiled(text, "d:2,pipe:2", f"l -> pipe, b -> d, grads: {rules}", use, "deferred")
        found = explain(made.device)["collectives"]
        reduced = [c for c in found if c["kind"] == "reduce_scatter" and c["axes"] == ["d"]]
        sent[reduce] = sum(c["wire_bytes"] for c in reduced)
    assert sent["each"] == micro * sent["last"] > 0


@in_turn(
    rules=("b -> (t, d)", "b -> d, grads: h -> d", "h -> d"), micro=(6, 1), dtype=("f32", "bf16")
)
def test_the_plan_of_least_cost_counts_each_micro_batch(rules: str, micro: int, dtype: str) -> None:
    """What every micro-batch sends as a whole costs as often: another policy may send less."""
    text = TEXT.replace("OPT", "adafactor(lr=0.02)").replace("H,", "8,").replace("b = 12", "b = 24")
    text = text.replace("(square(x - t))", "(square(x - t)) + 0.1 * sum(square(v))")
    text += f"layout chosen {{ l -> pipe, {rules} }} with one_f_one_b[b]({micro})\n"
    sent = {}
    for policy in POLICIES:
        about: dict[str, Any] = {"reduce": policy, "dtype": dtype, "message_bytes": 0}
        options = Options(mesh="d:2,t:2,pipe:2", layout="chosen", **about)
        made = Compilation(Source("net.mdsl", text), options)
        # Each collective counts, whichever stage does it.
        sent[policy] = sum(c["wire_bytes"] for c in explain(made.device)["collectives"])
    assert sent["optimal"] <= min(sent.values())


def in_fewer_bits(name: str, use: str) -> tuple[str, Compilation]:
    """A step whose gradients are cast on their way to others, and its text."""
    optimizer = "sgd(lr=0.1" + (")" if "[" in use else ", accumulate=3)")
    text = TEXT.replace("OPT", optimizer).replace("H,", "8,")
    rules = f"l -> pipe, {RULES[name]}, grads: reduce = bf16"
    return text, compiled(text, "d:2,pipe:2", rules, use, "deferred")


@in_turn(
    name=[name for name, rules in RULES.items() if not is_refused(rules, SEVERAL)],
    use=("with zb_h1[b](3)", "with gpipe", "with zb_v", SEVERAL),
)
def test_sums_in_fewer_bits(name: str, use: str) -> None:
    """Also where one way goes on from another."""
    text, made = in_fewer_bits(name, use)
    alone = on_one_device(text)
    for key, array in results(run_local(made.text, seed=4)).items():
        np.testing.assert_allclose(array, alone[key], rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("name", [n for n, rules in RULES.items() if is_refused(rules, SEVERAL)])
def test_sums_in_blocks_of_layers(name: str) -> None:
    text, made = in_fewer_bits(name, "with zb_h1[b](3)")
    alone = on_one_device(text)
    for key, array in results(run_local(made.text, seed=4)).items():
        np.testing.assert_allclose(array, alone[key], rtol=1e-2, atol=5e-3)
    with pytest.raises(DiagnosticError, match="MD0335"):
        in_fewer_bits(name, SEVERAL)[1].checked()


OTHERS = """
dim b = 12, m = 4, h = H, l = 4, i = 2, o = m
program p(x[b, m], t[b, m]) {
  param u[m, l]
  param r[h, l, m]
  param s[i, m, h]
  param e[m, l] = zeros()
  repeat l {
    param w[h]
    param v[m, h]
    y = x * u * sum(w) + sum[h](r)
    repeat i {
      x = x + einsum(tanh(einsum(y, v -> [b, h])), s -> [b, m])
    }
    e := 0.9 * e + 0.1 * u + mean[b](y)
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""
"""Stacks whose iterations are not first, parameters read through sums, and in an inner loop."""


KEPT = {
    "kept over the stages": "params: m -> pipe keep",
    "kept over data, gradients over layers": "params: m -> d keep, grads: l -> d",
}


NAMES = ("forward", "backward", "inputs", "weights", "kept", "kept_first", "kept_last", "action")


@in_turn(name=NAMES, old=("w", "x", "y"), schedule=("one_f_one_b", "zb_h1"))
def test_a_name_of_the_text_may_be_one_of_the_program(name: str, old: str, schedule: str) -> None:
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,")
    made = re.sub(rf"\b{old}\b", name, text)
    alone = on_one_device(made)
    piped = compiled(made, "pipe:2", "l -> pipe", f"with {schedule}[b](3)")
    for key, array in results(run_local(piped.text, seed=4)).items():
        np.testing.assert_allclose(array, alone[key], rtol=0, atol=1e-5)


REFUSED = {
    "b -> pipe": ("MD0907", "`b` cannot be split over the stages"),
    "w: h -> pipe": ("MD0907", "`h` cannot be split over the stages"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_another_dim_over_the_axis_of_the_stages(rule: str) -> None:
    code, message = REFUSED[rule]
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,")
    with pytest.raises(DiagnosticError, match=message) as caught:
        compiled(text, "d:2,pipe:2", f"l -> pipe, {rule}", "with gpipe[b](3)").checked()
    (found,) = (d for d in caught.value.diagnostics if d.severity == "error")
    assert found.code == code
    assert found.span is not None
    assert found.span.text == rule.partition(",")[0]


LINTED = {
    "l -> pipe, h -> pipe": "MD0907",
    "l -> pipe, gone -> pipe, b -> d, m -> d": "MD0302",
}
"""Layouts with what is wrong with them. No tensor has the dim `gone`: the pipeline is possible."""


@pytest.mark.parametrize("rules", LINTED)
def test_lint_reports_what_placing_refuses(rules: str) -> None:
    """An editor shows it: `analyse` places nothing."""
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4, gone = 2,")
    text += "mesh two = { d: 2, pipe: 2 }\n"
    text += f"layout staged {{ {rules} }} with gpipe[b](3)\n"
    analysis = analyse(Source("step.mdsl", text), Options(layout="staged"))
    assert {d.code for d in analysis.diagnostics.errors} == {LINTED[rules]}


ONCE = {
    "no gradient of a micro-batch": ("mean(square(x - t))", "mean(square(t * s))\n  z = mean(x)"),
    "reads nothing of a micro-batch": ("x = x * (tanh(y) + s)", "x = broadcast[b](s)"),
    "goes through the loop over `l` twice": ("repeat l {", "recompute { repeat l {"),
}


@pytest.mark.parametrize("message", ONCE)
def test_a_micro_batch_goes_once_through_the_stages_and_back(message: str) -> None:
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,").replace(*ONCE[message])
    if "broadcast" in text:
        text = text.replace("b = 12,", "b = 12, b2 = 2,").replace("broadcast[b]", "broadcast[b2]")
        text = re.sub(r"\[b, ([ho])\]", r"[b2, \1]", text).replace("x - t)", "mean[b2](x) - t)")
    if "recompute" in text:
        text = text.replace("[o -> m]\n  }", "[o -> m]\n  } }")
    if "z = " in text:
        text = text.replace("return loss", "return loss, z")
    with pytest.raises(DiagnosticError, match=message) as caught:
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](3)").checked()
    assert {d.code for d in caught.value.diagnostics} == {"MD0907"}


TWO_LOOPS = """
dim b = 4, m = 4, l = 2, o = m
program p(x[b, m], z[b, m]) {
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m])
  }
  y = z
  repeat l {
    param v[m, o]
    y = tanh(einsum(y, v -> [b, o])[o -> m]) + x
  }
  loss = mean(square(y))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_of_an_encoder_and_a_decoder_each_has_a_stage() -> None:
    """Two loops over one dim are refused, with a rule that works."""
    ending = "with gpipe[b](2)"
    with pytest.raises(DiagnosticError, match="two loops over `l`") as caught:
        compiled(TWO_LOOPS, "pipe:2", "l -> pipe", ending).checked()
    rule, instead = re.findall("`(.*?)`", str(caught.value.diagnostics[0].help))
    assert (rule, instead) == ("y: pipe = 1", "l -> pipe")
    alone = on_one_device(TWO_LOOPS)
    made = compiled(TWO_LOOPS, "pipe:2", rule, ending)
    for key, array in results(run_local(made.text, seed=4)).items():
        np.testing.assert_allclose(array, alone[key], rtol=0, atol=1e-5)


def test_the_loop_itself_is_not_cut() -> None:
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,")
    with pytest.raises(DiagnosticError, match="`l` is on the stages") as caught:
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[l](2)").checked()
    assert {d.code for d in caught.value.diagnostics} == {"MD0534"}


def test_one_micro_batch_is_the_whole_batch() -> None:
    """What needs all of a batch, and what is returned with its dim, is there."""
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,")
    text = text.replace("= mean(square(x - t))", "= sqrt(mean(square(x - t)))")
    alone = on_one_device(text)
    piped = compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](1)")
    for key, array in results(run_local(piped.text, seed=4)).items():
        np.testing.assert_allclose(array, alone[key], rtol=0, atol=1e-5)
    with pytest.raises(DiagnosticError, match="MD0332"):
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](2)").checked()


LEAVES = {
    "the result of `max` is returned, the max over micro-batches": ("return loss", "return max(z)"),
}


@pytest.mark.parametrize("message", LEAVES)
def test_what_no_sum_over_micro_batches_is_says_where_it_goes(message: str) -> None:
    text = TEXT.replace("OPT", "sgd(lr=0.1)").replace("H,", "4,")
    text = text.replace("  loss =", "  z = mean[m](x)\n  loss =").replace(*LEAVES[message])
    with pytest.raises(DiagnosticError, match=message) as caught:
        compiled(text, "pipe:2", "l -> pipe", "with gpipe[b](3)").checked()
    assert {d.code for d in caught.value.diagnostics} == {"MD0333"}


SAMPLES = """
dim b = 8, m = 4, l = 4, o = m
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, o]
    x = tanh(einsum(x, w -> [b, o])[o -> m])
  }
  param s[b, m]
  param c[b]
  loss = mean(square(x + s + c - t))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_blocks_of_a_micro_batch_change_places() -> None:
    """Over axes of the mesh: along that of the micro-batches every device is everywhere."""
    rules = "l -> pipe, b -> d, m -> t, grads: m -> d, params: m -> d"
    use = "with one_f_one_b[b](2, reduce=each)"
    made = compiled(SAMPLES, "pipe:2,d:2,t:2", rules, use, "immediate")
    assert "permute(\n" in made.text.partition("def backward")[2]
    run = run_local(made.text, seed=4)
    hold_to(results(run), on_one_device(SAMPLES))
    hold_bytes(run, made)
