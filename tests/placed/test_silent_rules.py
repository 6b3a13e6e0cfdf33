"""Rules that change nothing of any program are told, and no other ones are."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings

from meshdsl.analysis import analyse
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.ir import walk as named_ops
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.layout import Layout
from meshdsl.placed.request import resolve
from meshdsl.placed.silent_rules import silent_rules
from meshdsl.report.checks import check_source
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import read_source
from tests.compiling import compile_text
from tests.programs.harness import Case
from tests.programs.strategy import cases
from tests.project import ROOT, examples

CASES = int(os.environ.get("MESHDSL_CASES", "20"))

HEAD = """
dim batch = 4, time = 8, d = 4, e = 4
mesh m = {{ sp: 2, tp: 2 }}
layout l {{ {rules} }}{schedule}
"""
LOOP = """
program scan(x[batch, time, d], h[batch, d]) {
  repeat time { h = tanh(h + x) }
  return h
}
"""
LAYERS = """
program train(x[batch, d]) {
  repeat time {
    param w[d, e] = normal(0.1)
    x = tanh(einsum(x, w -> [batch, e]))[e -> d]
  }
  return sum(x)
  minimize sum(x) with sgd(lr=0.1)
}
"""
PLAIN = """
program plain(x[batch, d], k[d, e]) {
  y = einsum(x, k -> [batch, e])
  return y
}
"""


def silent(rules: str, *programs: str, schedule: str = "", strict: bool = False) -> list[str]:
    """The rules that are told of, after the fix of each was tried."""
    text = HEAD.format(rules=rules, schedule=schedule) + "".join(programs)
    found = Diagnostics()
    check_source(Source("test.mdsl", text), Options(), found)
    if strict:
        found.promote_warnings()
    told = [d for d in found if d.code == "MD0226"]
    assert [d for d in found.errors if d.code == "MD0226"] == told * strict
    for diagnostic in told:
        (fix,) = diagnostic.fixes
        edited = analyse(Source("test.mdsl", apply(text, fix.edits)), Options()).diagnostics
        assert len([d for d in edited if d.code == "MD0226"]) < len(told)
    return [d.span.text for d in told if d.span]


@pytest.mark.parametrize(
    ("rules", "programs", "told"),
    [
        ("time -> sp", (LOOP,), ["time -> sp"]),
        ("batch -> tp, time -> sp", (LOOP,), ["time -> sp"]),
        ("params: time -> sp", (LAYERS,), []),
        ("batch -> sp, y: batch -> sp", (PLAIN,), ["y: batch -> sp"]),
        ("batch -> sp, y: batch -> tp", (PLAIN,), []),
        ("y: d -> sp", (PLAIN,), []),
        ("batch -> sp, y: batch -> none", (PLAIN,), []),
        ("d -> sp, x: d -> tp, k: d -> tp", (PLAIN,), ["d -> sp"]),
        ("batch -> sp, x: batch -> sp", (PLAIN, LOOP), ["x: batch -> sp"]),
        ("e -> tp, time -> sp", (PLAIN, LOOP), ["time -> sp"]),
        ("batch -> sp, params: d -> sp, state: d -> sp, grads: d -> sp", (LAYERS,), []),
    ],
)
def test_a_rule_is_told_that_changes_no_program(
    rules: str, programs: tuple[str, ...], told: list[str]
) -> None:
    assert silent(rules, *programs) == told
    assert silent(rules, *programs, strict=True) == told


def test_a_schedule_gives_the_rule_for_a_loop_a_meaning() -> None:
    assert silent("time -> sp", LAYERS, schedule=" with one_f_one_b[batch](2)") == []


def test_a_rule_that_serves_one_program_of_the_file_is_not_told() -> None:
    rules = "batch -> tp, k: d -> sp"
    assert silent(rules, PLAIN, LOOP) == []
    other = replace(Options(), program="scan")
    text = HEAD.format(rules=rules, schedule="") + PLAIN + LOOP
    told = analyse(Source("test.mdsl", text), other).diagnostics
    assert "MD0226" not in [d.code for d in told]


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.stem)
def test_no_layout_of_the_examples_has_a_rule_without_effect(path) -> None:
    told = analyse(read_source(ROOT / path), Options()).diagnostics
    assert [d.message for d in told if d.code == "MD0226"] == []


def test_an_annotation_on_the_dim_of_a_loop_advises_no_silent_rule() -> None:
    """Only where a schedule would put the iterations on stages is there a rule to write."""
    text = HEAD.format(rules="batch -> tp", schedule="") + LOOP.replace("time,", "time@sp,")
    with pytest.raises(DiagnosticError) as caught:
        _ = Compilation(Source("test.mdsl", text), Options()).placed
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "MD0907"
    assert diagnostic.help == "leave the `@` out"


def check(case: Case) -> None:
    """Without a rule that is told of, the same text is emitted."""
    made = Compilation(Source(case.name, case.source_text), case.options, Diagnostics())
    try:
        made.checked()
    except DiagnosticError:
        return
    options, declared = made.options, made.declarations
    node = declared.layouts.get(options.layout or "")
    if node is None:
        return
    spec = resolve(declared, options.mesh, options.layout, None, None, Diagnostics())
    assert isinstance(spec, Layout)
    for diagnostic in silent_rules(made.named, spec):
        rules = tuple(rule for rule in node.rules if rule.span != diagnostic.span)
        assert len(rules) == len(node.rules) - 1
        layouts = {**declared.layouts, node.name.text: replace(node, rules=rules)}
        without = made.under(options, Diagnostics(), replace(declared, layouts=layouts))
        assert bare(without) == bare(made)


def bare(made: Compilation) -> str:
    return "\n".join(line.partition("  #")[0] for line in made.bare.splitlines())


def test_random_programs_are_emitted_the_same_without_a_silent_rule():
    test = settings(max_examples=CASES, suppress_health_check=list(HealthCheck), deadline=None)(
        given(case=cases())(check)
    )
    if "MESHDSL_CASES" not in os.environ:
        test = seed(0)(test)
    test()


ATTENTION = """
dim batch = 4, seq = 8, mem = seq, heads = 4, key = 4
mesh m = { tp: 2 }
layout plain { heads -> tp }
layout l RULES
program p(q[batch, heads, seq, key], k[batch, heads, mem, key], v[batch, heads, mem, key]) {
  s = einsum(q, k -> [batch, heads, seq, mem]) / sqrt(key)
  return einsum(softmax[mem](s), v -> [batch, heads, seq, key])
}
"""


@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        ("{ heads -> tp, s: heads -> tp }", False),
        ("{ heads -> tp, s: key -> tp }", False),
        ("extends plain { s: heads -> tp }", False),
        ("{ heads -> tp, s: heads -> none }", True),
        ("{ s: batch -> tp }", True),
    ],
)
def test_a_rule_for_scores_keeps_them_only_where_it_changes_something(
    rules: str, changes: bool
) -> None:
    source = Source("test.mdsl", ATTENTION.replace("RULES", rules))
    made = Compilation(source, Options(layout="l", cache=False), Diagnostics()).checked()
    fused = any(op.name == "attention" for op in named_ops(made.named.body))
    assert fused != changes
    found = Diagnostics()
    check_source(source, Options(), found)
    told = [d.code for d in found if "`s: " in d.message]
    assert told == ([] if changes else ["MD0226"])


@pytest.mark.parametrize("rules", ["d -> x, t: d -> y", "d -> y, t: d -> x"])
def test_a_rule_for_what_a_definition_reduces_is_not_silent(rules: str) -> None:
    """Where a dim of `argmax` is split, it is a minimum of indices: over the axis of the rule."""
    text = "dim d = 4\nprogram p(x[d]) {\n  t = argmax(x)\n  return t\n}\n"
    diagnostics, layout = Diagnostics(), f"{{ {rules} }}"
    compile_text(
        f"{text}layout l {layout}\n", diagnostics, mesh="x:2,y:2", layout="l", reduce="deferred"
    )
    assert {"MD0226", "MD0306"}.isdisjoint(d.code for d in diagnostics)
    check(Case(text, "x:2,y:2", layout, "deferred"))
