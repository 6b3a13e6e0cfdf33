"""Remedies: each one that a report prints compiles, and saves what it says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshdsl.analysis import analyse
from meshdsl.device.printer import print_program as print_device
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.attention_fusion import spoken_of
from meshdsl.named.ir import values_of
from meshdsl.named.printer import print_program
from meshdsl.named.program_choice import finish_named
from meshdsl.pipeline import Compilation, Known, Options, front
from meshdsl.report.explanation_document import explanation
from meshdsl.report.remedies import MOST_WORK, Trials, sent
from meshdsl.report.schema import RemedyFacts
from meshdsl.report.terminal import text as as_text
from meshdsl.syntax.parse import read_source
from tests.compiling import compile_text
from tests.covering import some
from tests.project import ROOT, examples, matching
from tests.report.golden import SIZES
from tests.work import calls

QUICK = "mlp", "matmul", "transformer"
"""The examples explained each time, with those of `examples/sbp`; all with `MESHDSL_CASES`."""


def cases() -> list[Any]:
    """Examples under every other of their layouts."""
    paths = examples()
    if "MESHDSL_CASES" not in os.environ:
        paths = [path for path in paths if path.stem in QUICK or path.parent.name == "sbp"]
    return [case for path in paths for case in some(under_each_layout(path))]


def under_each_layout(path: Path) -> Iterator[Any]:
    sizes = SIZES.get(path.stem, {})
    for layout in front(read_source(path), sizes, Diagnostics()).layouts:
        options = Options(layout=layout, set_dims=sizes, cache=False)
        yield pytest.param(path, options, id=f"{path.stem}-{layout}")


@pytest.mark.parametrize(("path", "options"), cases())
def test_each_remedy_compiles_and_saves_what_it_says(path: Path, options: Options) -> None:
    made = Compilation(read_source(path), options, Diagnostics())
    before, advised = made.report["totals"], made.advised
    assert sent(made.device) == before["wire_bytes"]
    told = [remedy["summary"] for remedy in advised["remedies"]]
    assert {t for c in advised["collectives"] for t in c["remedies"]} == set(told)
    for remedy in advised["remedies"]:
        after = edited(made, remedy).checked()
        assert before["wire_bytes"] - after.report["totals"]["wire_bytes"] == remedy["saves_bytes"]
        peaks = [each.report["memory"]["peak"] for each in (made, after)]
        assert peaks[1] - peaks[0] == remedy["holds_bytes"]
        warned = [{d.message for d in each.diagnostics} for each in (made, after)]
        assert warned[1] <= warned[0]


def edited(made: Compilation, remedy: RemedyFacts) -> Compilation:
    """A program compiled anew, from its text after a remedy."""
    ((edit,),) = (fix["edits"] for fix in remedy["fixes"])
    source = made.source
    assert edit["file"] == source.name
    start, end = (
        source.bounds(at["line"])[0] + at["column"] - 1 for at in (edit["start"], edit["end"])
    )
    text = source.text[:start] + edit["text"] + source.text[end:]
    return Compilation(Source(made.source.name, text), made.options, Diagnostics())


MLP = (ROOT / "examples" / "mlp.mdsl").read_text(encoding="utf-8")


def test_half_of_an_all_reduce_is_saved_by_a_rule_for_its_result() -> None:
    """65,536 B of the sum of `y`, and 4 B of the loss: each device needs a part of `y` alone."""
    report = compile_text(MLP, layout="hybrid").advised
    saved = {r["title"]: r["saves_bytes"] for r in report["remedies"]}
    assert report["totals"]["wire_bytes"] == 65_540
    assert saved["add `y: io -> cols`"] == 65_540 - 32_774
    shown = as_text(tuple(explanation(report, {"test.mdsl": Source("test.mdsl", MLP)})))
    assert shown.count("remove it: add `y: io -> cols` (saves 32 KiB)") == 1
    assert "No plan of this layout sends less (counted: bytes + 8 KiB" in shown
    assert "Rules that make it send less:\n  add `y: " in shown
    assert "nothing worth the trouble" not in shown
    assert all(title.startswith("add `y: ") for title in saved)


STORED = "params: model -> data"


@pytest.mark.parametrize(
    ("layout", "title"),
    [("fsdp", f"remove `{STORED}`"), ("hybrid", f"replace `{STORED}` by `params: model -> none`")],
)
def test_a_parameter_may_be_stored_as_it_is_used(layout: str, title: str) -> None:
    """A rule of a layout that extends another is replaced: the other may have it, too."""
    source = read_source(Path("examples/transformer.mdsl"))
    made = Compilation(source, Options(layout=layout), Diagnostics())
    (remedy,) = made.advised["remedies"]
    assert remedy["title"] == title
    is_dearer = remedy["holds_bytes"] > made.report["memory"]["peak"] // 100
    assert remedy["summary"].endswith(" more") == is_dearer == (layout == "fsdp")


def test_rules_are_not_advised_where_no_layout_could_be_edited() -> None:
    report = compile_text(MLP, layout="batch:rows,hidden:cols").advised
    assert report["collectives"]
    assert not report["remedies"]


def test_no_rule_for_a_tensor_of_the_library_is_advised() -> None:
    """Its names are not those of the program."""
    text = """
dim batch = 8, d = 64
mesh m = { x: 4 }
layout l { d -> x }
program p(z[batch, d]) {
  return softmax[d](z)
}
"""
    report = compile_text(text, layout="l").advised
    assert report["collectives"]
    assert all("z:" in r["title"] for r in report["remedies"])


# --- the work is bounded -------------------------------------------------------------------------


def test_trials_end_by_a_count_of_work() -> None:
    made = compile_text(MLP, layout="hybrid")
    trials = Trials(made, "hybrid")
    trials.remedies([])
    assert trials.worked == 0
    rules = made.advised["remedies"]
    assert rules
    assert MOST_WORK // trials.work < 40


def many(axes: int) -> str:
    names = [f"m{i}" for i in range(axes)]
    one, other = ", ".join(names[: axes // 2]), ", ".join(names[axes // 2 :])
    return f"""
dim a = 4096, b = 4096
mesh m = {{ {", ".join(f"{name}: 2" for name in names)} }}
layout l {{ a -> ({one}), b -> ({other}) }}
program p(x[a, b], w[b]) {{
  y = einsum(x, w -> [a])
  return y
}}
"""


@pytest.mark.parametrize("axes", [6, 8])
def test_explaining_on_many_axes_is_about_as_much_work_as_compiling(axes: int) -> None:
    made = compile_text(many(axes), layout="l")
    compiling = calls(lambda: compile_text(many(axes), layout="l").device)
    assert calls(lambda: made.advised) < compiling + 1_500_000


@pytest.mark.parametrize("name", ["transformer", "lm", "moe"])
def test_a_name_that_attention_does_not_replace_changes_no_program(name: str) -> None:
    (path,) = matching(f"examples/{name}.mdsl")
    made = Compilation(read_source(path), Options(), Diagnostics())
    spoken = spoken_of(made.declarations)
    before = print_program(made.named)
    labels = {v.label for v in values_of(made.written) if v.name is not None}
    labels -= {name for name, _ in spoken}
    assert labels
    for label in sorted(labels - made.named.unspoken):
        more = {*spoken, (label, "")}
        assert print_program(finish_named(made.written, None, False, spoken=more)) == before
    fewer = {(n, dim) for n, dim in spoken if n in made.named.kept_spoken}
    assert print_program(finish_named(made.written, None, False, spoken=fewer)) == before


def test_a_name_that_attention_replaces_is_one_that_nobody_speaks_of() -> None:
    (path,) = matching("examples/transformer.mdsl")
    made = Compilation(read_source(path), Options(), Diagnostics())
    replaced = {v.label for v in values_of(made.written) if v.name} - {
        v.label for v in values_of(made.named) if v.name
    }
    assert replaced
    assert made.named.unspoken & replaced


GRADIENT = """
dim batch = 4, seq = 8, mem = 8, heads = 2, key = 4
mesh m = { tp: 2 }
program p(q[batch, seq, heads, key], k[batch, mem, heads, key], v[batch, mem, heads, key]) {
  s = einsum(q, k -> [batch, heads, seq, mem])
  weights = softmax[mem](s)
  o = einsum(weights, v -> [batch, seq, heads, key])
  dq = grad(sum(o * o), q)
  return o, dq
}
layout plain { batch -> tp }
layout speaking { weights: seq -> tp }
"""


def test_gradients_are_those_of_the_layouts_that_are_declared_now() -> None:
    """An attention is fused before its gradients are taken, unless a layout speaks of it."""
    both = compile_text(GRADIENT, layout="plain")
    plain = replace(both.declarations, layouts={"plain": both.declarations.layouts["plain"]})
    fused = both.under(both.options, Diagnostics(), plain)
    made_anew = Compilation(both.source, both.options, Diagnostics(), Known(both.tree, plain))
    assert "attention" in print_program(made_anew.named)
    assert print_program(fused.named) == print_program(made_anew.named)
    back = fused.under(both.options, Diagnostics(), both.declarations)
    assert print_program(back.named) == print_program(both.named)


def test_a_trial_that_sends_more_ends_early() -> None:
    made = compile_text(MLP, layout="hybrid")
    under = made.under(replace(made.options, reduce="deferred", cache=False), Diagnostics())
    assert under.placed_within(10**9) is not None
    assert under.placed_within(0) is None


def test_a_layout_that_is_written_out_speaks_of_tensors_as_a_declared_one() -> None:
    """Its rule for what an attention has inside is followed, also where another was compiled."""
    declared = compile_text(GRADIENT, layout="speaking")
    text = GRADIENT.replace("layout speaking { weights: seq -> tp }", "")
    options = Options(layout="weights: seq -> tp")
    written_out = Compilation(Source("p.mdsl", text), options, Diagnostics())
    plain = compile_text(text, layout="plain")
    assert "attention" in print_program(plain.named)
    for made in (written_out, plain.under(options, Diagnostics())):
        assert print_program(made.named) == print_program(declared.named)
        assert print_device(made.device) == print_device(declared.device)
        assert not made.diagnostics
        again = made.under(plain.options, Diagnostics())
        assert print_program(again.named) == print_program(plain.named)
    (written,) = analyse(written_out.source, options).named.values()
    assert written is not None
    assert print_program(written) == print_program(declared.named)
