"""Parts of a mesh axis: a layout with them is the layout of the mesh that is written out."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.placed.placements import Mesh
from meshdsl.placed.sub_axes import parts_of
from meshdsl.report.explanation import explain
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
    assert 'groups["tp"]' in made.text
    assert 'groups["tp.2.4"]' in made.text
    assert "f32[model, hidden@tp]" in made.text
    assert made.text.count("tp.2+tp.2.4") == made.text.count("@tp.2+tp.2.4")  # of specs alone


@pytest.mark.parametrize("name", TWINS)
def test_parts_are_the_axes_of_the_mesh_written_out(name: str) -> None:
    policy = {"attention": "optimal", "stored": "immediate"}.get(name, "deferred")
    mesh, rules, twin_mesh, twin_rules = TWINS[name]
    found = run_case(Case(PROGRAM.format(mesh=mesh, rules=rules), None, "l", policy))
    twin = run_case(Case(PROGRAM.format(mesh=twin_mesh, rules=twin_rules), None, "l", policy))
    ours, its = found.report, twin.report
    for key in ("wire_bytes", "cluster_wire_bytes", "collectives", "by_kind", "flops_per_device"):
        assert ours["totals"][key] == its["totals"][key]  # type: ignore[literal-required]
    assert ours["memory"]["peak"] == its["memory"]["peak"]
    assert [t["local_shape"] for t in ours["tensors"]] == [t["local_shape"] for t in its["tensors"]]
    for key, value in twin.run.outputs.items():
        assert np.array_equal(found.run.outputs[key], value), f"{key} in other bits"
