"""Parts of a mesh axis: a layout with them is the layout of the mesh that is written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.module.compiler import compiler
from meshdsl.backends.peers.renderings import RENDERINGS, render
from meshdsl.backends.runtime.values import spec_of
from meshdsl.device.printer import print_program
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation
from meshdsl.placed.placements import Mesh
from meshdsl.placed.sub_axes import parts_of
from meshdsl.report import terminal
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import summary
from meshdsl.report.search_result import searched
from meshdsl.report.shard_view import Holding
from meshdsl.search.methods import METHODS
from meshdsl.search.problems import problems
from meshdsl.search.request import SearchRequest
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import parse
from meshdsl.syntax.symbols import symbols
from tests.compiling import compile_text
from tests.programs.harness import Case, run_case

PROGRAM = """
dim batch = 2, seq = 4, mem = seq, kv = 2, group = 4, key = 2, model = 8, hidden = 16
{mesh}
layout l {{ {rules} }}
program p(x[batch, seq, model], m[batch, mem, model]) {{
  param wq[model, kv, group, key]
  param wk[model, kv, key]
  param wo[kv, group, key, model]
  param w1[model, hidden]
  param w2[hidden, model]
  q = einsum(x, wq -> [batch, kv, group, seq, key])
  k = einsum(m, wk -> [batch, kv, mem, key])
  a = attention[key, mem](q, k, k, iota[seq] >= iota[mem])
  o = einsum(a, wo -> [batch, seq, model])
  h = relu(einsum(x + o, w1 -> [batch, seq, hidden]))
  y = einsum(h, w2 -> [batch, seq, model])
  loss = mean(y^2)
  minimize loss with momentum(lr=0.1)
  return loss, y
}}
"""

TWINS = {
    "attention": (
        "mesh m = { tp: 8 }",
        "kv -> tp.2, group -> tp.2.4, hidden -> tp",
        "mesh m = { a: 2, b: 4 }",
        "kv -> a, group -> b, hidden -> (a, b)",
    ),
    "one part": (
        "mesh m = { data: 2, tp: 4 }",
        "batch -> data, kv -> tp.2, hidden -> tp, x: seq -> tp",
        "mesh m = { data: 2, a: 2, b: 2 }",
        "batch -> data, kv -> a, hidden -> (a, b), x: seq -> (a, b)",
    ),
    "three parts": (
        "mesh m = { tp: 8 }",
        "kv -> tp.2, group -> tp.2.2, hidden -> tp.4, seq -> tp.4.2",
        "mesh m = { a: 2, b: 2, c: 2 }",
        "kv -> a, group -> b, hidden -> (a, b), seq -> c",
    ),
    "stored": (
        "mesh m = { data: 4, tp: 2 }",
        "batch -> data.2, kv -> tp, params: model -> data.2.2, state: model -> data, "
        "grads: model -> data.2",
        "mesh m = { a: 2, b: 2, tp: 2 }",
        "batch -> a, kv -> tp, params: model -> b, state: model -> (a, b), grads: model -> a",
    ),
    "inner first": (
        "mesh m = { tp: 4 }",
        "hidden -> (tp.2.2, tp.2), o: model -> tp, y: model -> tp.2, kv -> tp.2",
        "mesh m = { a: 2, b: 2 }",
        "hidden -> (b, a), o: model -> (a, b), y: model -> a, kv -> a",
    ),
    "uneven": (
        "mesh m = { tp: 6 }",
        "hidden -> tp, group -> tp.3, kv -> tp.3.2, y: seq -> tp.3",
        "mesh m = { a: 3, b: 2 }",
        "hidden -> (a, b), group -> a, kv -> b, y: seq -> a",
    ),
}
"""A mesh and rules with parts of an axis; the same devices with the parts written out."""


@pytest.mark.parametrize(
    ("size", "cuts", "parts"),
    [
        (8, {2}, [("tp.2", 2), ("tp.2.4", 4)]),
        (8, {2, 4, 8}, [("tp.2", 2), ("tp.2.2", 2), ("tp.2.2.2", 2)]),
        (12, {3, 6}, [("tp.3", 3), ("tp.3.2", 2), ("tp.3.2.2", 2)]),
        (8, {8}, [("tp", 8)]),
    ],
)
def test_the_names_of_parts(size: int, cuts: set[int], parts: list[tuple[str, int]]) -> None:
    assert [*parts_of("tp", size, cuts)] == parts
    mesh = Mesh("m", (("data", 2), ("tp", size))).refined((("tp", tuple(parts)),))
    assert mesh.devices == 2 * size
    assert mesh.whole == Mesh("m", (("data", 2), ("tp", size)))
    names = tuple(name for name, _ in parts)
    assert mesh.known(("tp", "data")) == (*names, "data")
    assert mesh.written((*names, "data")) == ("tp", "data")
    # Each device is where it was: its place on the axis is that on the parts, outer first.
    for rank in range(mesh.devices):
        at, on = mesh.coordinates(rank), mesh.whole.coordinates(rank)
        number = 0
        for name, n in parts:
            number = number * n + at[name]
        assert (on["data"], on["tp"]) == (at["data"], number)


def test_a_part_that_is_named_by_another_way_is_the_same() -> None:
    mesh = Mesh("m", (("tp", 8),)).refined((("tp", parts_of("tp", 8, {2, 4})),))
    assert mesh.known(("tp.4.2",)) == mesh.known(("tp.2.2.2",)) == ("tp.2.2.2",)
    assert mesh.known(("tp.4",)) == ("tp.2", "tp.2.2")
    assert mesh.known(("tp.8",)) == mesh.names
    assert mesh.known(("tp.3", "tp.16", "tq")) == ()
    assert mesh.written(("tp.2.2", "tp.2", "tp.2.2.2")) == ("tp.2.2", "tp.2", "tp.2.2.2")


def test_reports_say_the_axis_where_all_of_it_is_used() -> None:
    mesh, rules, *_ = TWINS["attention"]
    made = compile_text(PROGRAM.format(mesh=mesh, rules=rules), reduce="deferred")
    report = explain(made.device)
    tensors = {t["name"]: t for t in report["tensors"] if t["name"]}
    assert report["mesh"] == {"tp": 8}
    assert tensors["w1"]["placement"] == {"tp": "S(hidden)"}
    assert tensors["wq"]["placement"] == {"tp.2": "S(kv)", "tp.2.4": "S(group)"}
    assert tensors["wk"]["placement"] == {"tp.2": "S(kv)", "tp.2.4": "B"}
    assert tensors["x"]["placement"] == {"tp": "B"}
    assert {tuple(c["axes"]) for c in report["collectives"]} == {("tp",), ("tp.2.4",)}
    assert "splits nothing" not in terminal.text((*summary(report),), 200)
    wq = Holding.of(tensors["wq"], report["mesh"])
    assert wq.part_of(5) == {"model": 0, "kv": 1, "group": 1, "key": 0}
    assert 'groups["tp"]' in made.text
    assert 'groups["tp.2.4"]' in made.text
    assert "f32[model, hidden@tp]" in made.text
    assert made.text.count("tp.2+tp.2.4") == made.text.count("@tp.2+tp.2.4")  # of specs alone


@pytest.mark.parametrize("name", TWINS)
def test_parts_are_the_axes_of_the_mesh_written_out(name: str) -> None:
    policy = "immediate" if name == "stored" else "deferred"
    mesh, rules, twin_mesh, twin_rules = TWINS[name]
    found = run_case(Case(PROGRAM.format(mesh=mesh, rules=rules), "m", "l", policy))
    twin = run_case(Case(PROGRAM.format(mesh=twin_mesh, rules=twin_rules), "m", "l", policy))
    ours, its = found.report, twin.report
    for key in ("wire_bytes", "cluster_wire_bytes", "collectives", "by_kind", "flops_per_device"):
        assert ours["totals"][key] == its["totals"][key]
    assert ours["memory"]["peak"] == its["memory"]["peak"]
    assert [t["local_shape"] for t in ours["tensors"]] == [t["local_shape"] for t in its["tensors"]]
    for key, value in twin.run.outputs.items():
        assert np.array_equal(found.run.outputs[key], value), f"{key} in other bits"


# --- other ways to the same ----------------------------------------------------------------------

NAMED = "kv -> tp.2, group -> tp.2.4, hidden -> (tp.2, tp.2.4)"
"""No rule says `tp`: the texts of the twin differ in the names of axes alone."""


def renamed(text: str) -> str:
    return text.replace("tp.2.4", "inside").replace("tp.2", "half")


def forward(mesh: str, rules: str) -> Compilation:
    text = PROGRAM.format(mesh=mesh, rules=rules)
    return compile_text(text, reduce="deferred", evaluate=True, fused=False)


def test_other_systems_get_the_mesh_written_out() -> None:
    ours = forward("mesh m = { tp: 8 }", NAMED)
    twin = forward("mesh m = { half: 2, inside: 4 }", renamed(NAMED))
    assert renamed(print_program(ours.device)) == print_program(twin.device)
    for notation in RENDERINGS:
        assert renamed(render(ours.placed, notation)) == render(twin.placed, notation), notation


def test_a_pipeline_is_on_a_part() -> None:
    text = """
    dim batch = 8, model = 4, layers = 4
    mesh m = { pipe: 4 }
    layout l { layers -> pipe.2, batch -> pipe.2.2 } with one_f_one_b[batch](4)
    layout both { layers -> pipe, batch -> pipe.2.2 } with one_f_one_b[batch](4)
    layout named { y: pipe = 1, batch -> pipe.2 } with one_f_one_b[batch](4)
    program p(x[batch, model]) {
      repeat layers {
        param w[model]
        x = relu(x * w)
      }
      y = x * 2
      loss = mean(y^2)
      return loss
      minimize loss with sgd(lr=0.1)
    }
    """
    run_case(Case(text, "m", "l", "deferred"))
    for layout, code in (("both", "MD0907"), ("named", "MD0318")):
        with pytest.raises(DiagnosticError) as refused:
            compile_text(text, layout=layout)
        assert refused.value.diagnostics[0].code == code


def test_a_part_that_splits_nothing_is_told() -> None:
    source = "dim kv = 2\nmesh m = { tp: 8 }\nprogram p(x[kv]) {\n  return x * 2\n}\n"
    for rules, idle in (("kv -> tp.2", "tp.2.4"), ("kv -> none", "tp")):
        report = explain(compile_text(source, layout=rules).device)
        told = terminal.text((*summary(report),), 200)
        assert f"Axis {idle} splits nothing: its" in told
        assert told.count("splits nothing") == 1


def test_a_pin_takes_a_part_that_the_layout_names() -> None:
    text = PROGRAM.format(mesh="mesh m = { tp: 8 }", rules="kv -> tp.2")
    pinned = text.replace("h = relu", "h[batch, seq, hidden@tp.2.4] = relu")
    made = compile_text(pinned, reduce="deferred", evaluate=True)
    shown = {t.value.name: t.placement.show(t.value.type) for t in made.placed.tensors}
    assert shown["h"] == "[batch, seq, hidden@tp.2.4]"
    told = Diagnostics()
    compile_text(pinned.replace("tp.2.4", "tp.4"), told, evaluate=True, reduce="deferred")
    (warning,) = [d for d in told if d.code == "MD0304"]
    assert warning.help == "write `tp`; or name the sub-axis in a rule, `DIM -> tp.4`"


def test_an_edit_that_the_message_offers_works() -> None:
    text = PROGRAM.format(mesh="mesh m = { tp: 8 }", rules="kv -> tp.2, group -> tp.4")
    with pytest.raises(DiagnosticError) as refused:
        compile_text(text)
    fixes = [fix for d in refused.value.diagnostics[:1] for fix in d.fixes]
    assert fixes[0].title == "write `tp.2.4`"
    compile_text(apply(text, fixes[0].edits), reduce="deferred", evaluate=True)


def test_a_search_keeps_the_parts_of_a_layout_and_uses_them() -> None:
    text = (
        "dim a = 2, b = 8\nmesh m = { tp: 8 }\nprogram p(x[a, b]) {\n  y = x * 2\n  return y\n}\n"
    )
    made = compile_text(text)
    request = SearchRequest(fix="a -> tp.2")
    (problem,) = problems(request, made)
    assert problem.mesh.names == ("tp.2", "tp.2.4")
    found = METHODS["layouts"].solve(problem)
    assert {"a -> tp.2", "b -> tp.2.4"} <= {str(rule) for rule in found.plans[0].rules}
    assert searched(found, "f", "layouts")["mesh"] == {"tp": 8}
    with pytest.raises(DiagnosticError, match="MD0318"):
        problems(replace(request, fix="a -> tp.3"), made)


def test_a_module_is_on_a_device_mesh_of_the_parts() -> None:
    made = forward("mesh m = { tp: 8 }", "kv -> tp.2, group -> tp.2.4, hidden -> tp")
    with pytest.raises(DiagnosticError) as refused:
        compiler(made, {"tp": 8})
    (told,) = refused.value.diagnostics
    assert told.code == "MD0560"
    assert "(2, 4), mesh_dim_names=('tp.2', 'tp.2.4')" in str(told.help)
    assert compiler(made, {"tp.2": 2, "tp.2.4": 4}).layout.mesh.declared == (("tp", 8),)
    with pytest.raises(DiagnosticError, match="MD0560"):
        compiler(made, {"tp.2.4": 4, "tp.2": 2})


def test_a_name_of_an_axis_is_renamed_in_its_parts() -> None:
    text = "mesh m = { tp: 8 }\nlayout l { kv -> tp.2, group -> (tp.2.4, data) }\n"
    found = symbols(parse(Source("f", text))[0])
    (axis,) = [s for s in found.every if (s.kind, s.name) == ("axis", "tp")]
    assert [text[s.start : s.end + 2] for s in axis.references] == ["tp.2", "tp.2"]


def test_a_checkpoint_is_read_under_a_layout_with_other_parts(tmp_path: Path) -> None:
    file, data = tmp_path / "p.mdsl", tmp_path / "data.npz"
    file.write_text(PROGRAM.format(mesh="mesh m = { tp: 8 }", rules="kv -> tp.2, hidden -> tp"))
    draw = np.random.default_rng(0)
    x, m = (draw.normal(size=(8, 4, 8)).astype("f4") for _ in range(2))
    np.savez(data, x=x, m=m)
    layouts = ("l", "hidden -> tp")
    whole = md.load(file).compile(layout="hidden -> none", reduce="deferred")
    alone = whole.train(str(data), 2)
    for steps, layout in enumerate(layouts, 1):
        plan = md.load(file).compile(layout=layout, reduce="deferred")
        folder = str(tmp_path / "run")
        part = plan.train(str(data), steps, checkpoint=folder, resume=steps > 1)
        assert part.losses[-1] == pytest.approx(alone.losses[steps - 1], rel=1e-5)
    for name, value in whole.params.items():
        np.testing.assert_allclose(plan.params[name], value, rtol=1e-4, atol=1e-6)


def test_what_is_kept_in_parts_of_a_sum_may_be_so_along_parts_of_an_axis() -> None:
    spec = spec_of("f32[a=4@data.2] over data.2 data.2.2 = zeros()")
    assert spec.parts == ("data.2", "data.2.2")
    assert spec.split == {"a": ("data.2",)}
